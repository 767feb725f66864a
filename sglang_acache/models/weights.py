"""From published tensor names to our parameters, every tensor accounted for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sglang_acache.models.configs import DiffusionLMConfig

Shard = str | int | None
Place = tuple[str, Shard]  # one of our parameters, and the part of it where the checkpoint splits it

_SAVED_BUFFER = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class WeightNames:
    """How a checkpoint names its tensors, up to the final ``.weight``, ``.bias`` or quantization suffix.

    Layer i's tensors are ``{layer_prefix}.{i}.{part}``; ``in_layer`` maps a part to our module inside the
    layer and its shard; ``outside`` maps every other name; ``head`` is the output head's name.
    """

    layer_prefix: str
    in_layer: Mapping[str, Place]
    outside: Mapping[str, str]
    head: str

    def locate(self, name: str) -> Place | None:
        """Our parameter and shard for the checkpoint tensor ``name``; None if the model has no such."""
        stem, _, suffix = name.rpartition(".")
        if stem in self.outside:
            return f"{self.outside[stem]}.{suffix}", None
        index, _, part = stem.removeprefix(f"{self.layer_prefix}.").partition(".")
        if not index.isdigit() or part not in self.in_layer:
            return None
        module, shard = self.in_layer[part]
        return f"model.layers.{index}.{module}.{suffix}", shard

    def published(self, place: Place) -> str:
        """The checkpoint's name for a place of ours: the inverse of ``locate``."""
        stem, _, suffix = place[0].rpartition(".")
        for theirs, ours in self.outside.items():
            if ours == stem:
                return f"{theirs}.{suffix}"
        index, module = _split_layer(stem)
        part = next(part for part, target in self.in_layer.items() if target == (module, place[1]))
        return f"{self.layer_prefix}.{index}.{part}.{suffix}"


def load_checkpoint(
    model: nn.Module,
    names: WeightNames,
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[Place, tuple[int, ...]] | None,
    *,
    tied: bool,
    complete: bool,
) -> set[str]:
    """Load ``weights`` into ``model``; returns the names of the parameters loaded.

    Args:
        shapes: from ``tensor_shapes``; None for quantized weights, whose shapes their method knows.
        tied: the output head is the embedding; a head's tensor in the checkpoint is skipped.
        complete: every parameter must be given.

    Raises:
        ValueError: an unexpected, doubled, missing or wrongly shaped tensor; names it.
    """
    parameters = dict(model.named_parameters())
    loaded: dict[Place, str] = {}
    for name, tensor in weights:
        if name.endswith(_SAVED_BUFFER) or (tied and name.rpartition(".")[0] == names.head):
            continue
        place = names.locate(name)
        if place is None or place[0] not in parameters:
            raise ValueError(f"checkpoint tensor {name!r} is not part of {type(model).__name__}")
        if place in loaded:
            raise ValueError(f"checkpoint tensor {name!r} is given twice")
        if shapes is not None:
            _check_shape(name, place, tensor, shapes)
        loaded[place] = name
        parameter: Any = parameters[place[0]]
        loader: Any = getattr(parameter, "weight_loader", _copy)
        loader(parameter, tensor, *([] if place[1] is None else [place[1]]))
    missing = [place for place in _places(parameters, names) if place not in loaded]
    if complete and missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(f"the checkpoint lacks {', '.join(map(names.published, missing[:5]))}{more}")
    return {parameter for parameter, _ in loaded}


def tensor_shapes(config: DiffusionLMConfig) -> dict[Place, tuple[int, ...]]:
    """Shape of every ``.weight`` in the checkpoint, by our module (inside its layer) and shard."""
    hidden, inner, rows = config.hidden_size, config.mlp_width, config.embedding_rows
    keys = hidden // config.query_heads * config.key_heads
    return {
        ("model.embed_tokens", None): (rows, hidden),
        ("lm_head", None): (rows, hidden),
        ("model.norm", None): (hidden,),
        ("input_layernorm", None): (hidden,),
        ("post_attention_layernorm", None): (hidden,),
        ("self_attn.qkv_proj", "q"): (hidden, hidden),
        ("self_attn.qkv_proj", "k"): (keys, hidden),
        ("self_attn.qkv_proj", "v"): (keys, hidden),
        ("self_attn.o_proj", None): (hidden, hidden),
        ("mlp.gate_up_proj", 0): (inner, hidden),
        ("mlp.gate_up_proj", 1): (inner, hidden),
        ("mlp.down_proj", None): (hidden, inner),
    }


def _check_shape(name: str, place: Place, tensor: torch.Tensor, shapes: Mapping[Place, tuple[int, ...]]) -> None:
    stem, _, suffix = place[0].rpartition(".")
    shape = shapes[_split_layer(stem)[1], place[1]]
    expected = shape[:1] if suffix == "bias" else shape
    if tuple(tensor.shape) != expected:
        found = list(tensor.shape)
        raise ValueError(f"checkpoint tensor {name!r} has shape {found}, expected {list(expected)}")


def _places(parameters: Iterable[str], names: WeightNames) -> list[Place]:
    """Every place that a checkpoint must fill. Quantization's own tensors may be absent."""
    shards: dict[str, list[Shard]] = {}
    for module, shard in names.in_layer.values():
        shards.setdefault(module, []).append(shard)
    places: list[Place] = []
    for parameter in parameters:
        stem, _, suffix = parameter.rpartition(".")
        if suffix in ("weight", "bias"):
            places += [(parameter, shard) for shard in shards.get(_split_layer(stem)[1], [None])]
    return places


def _split_layer(stem: str) -> tuple[str, str]:
    """``("3", "mlp.down_proj")`` for ``model.layers.3.mlp.down_proj``; ``("", stem)`` outside the layers."""
    inside = stem.removeprefix("model.layers.")
    if inside == stem:
        return "", stem
    index, _, module = inside.partition(".")
    return index, module


def _copy(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor)
