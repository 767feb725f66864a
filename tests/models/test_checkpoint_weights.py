import pytest
import torch
from torch import nn

from integration_tests.oracle.checkpoints import CheckpointSpec, published_name, random_tensors
from sglang_acache.models.configs import LLaDAConfig
from sglang_acache.models.weights import WeightNames, load_checkpoint, tensor_shapes

SPEC = CheckpointSpec(hidden=8, heads=2, kv_heads=1, layers=2, inner=12, vocab_size=20)
CONFIG = LLaDAConfig(
    d_model=8, n_heads=2, n_kv_heads=1, n_layers=2, mlp_hidden_size=12, vocab_size=20, mask_token_id=19
)
NAMES = WeightNames(
    layer_prefix="model.transformer.blocks",
    in_layer={
        "q_proj": ("self_attn.qkv_proj", "q"),
        "k_proj": ("self_attn.qkv_proj", "k"),
        "v_proj": ("self_attn.qkv_proj", "v"),
        "attn_out": ("self_attn.o_proj", None),
    },
    outside={"model.transformer.wte": "model.embed_tokens", "model.transformer.ff_out": "lm_head"},
    head="model.transformer.ff_out",
)


class Plain(nn.Module):
    """Our parameters' names, without SGLang's layers."""

    def __init__(self, tied=False):
        super().__init__()
        self.seen = {}
        self.model = nn.Module()
        self.model.embed_tokens = self.module("embed", 20, 8)
        self.model.layers = nn.ModuleList()
        for index in range(2):
            layer = nn.Module()
            layer.self_attn = nn.Module()
            layer.self_attn.qkv_proj = self.module(f"{index}.qkv", 16, 8)
            layer.self_attn.o_proj = self.module(f"{index}.o", 8, 8)
            self.model.layers.append(layer)
        self.lm_head = self.model.embed_tokens if tied else self.module("head", 20, 8)

    def module(self, label, rows, columns):
        module = nn.Linear(columns, rows, bias=False)

        def load(parameter, tensor, shard=None):
            self.seen[label, shard] = tensor

        module.weight.weight_loader = load
        return module


def checkpoint():
    tensors = {published_name("LLaDAModelLM", name): tensor for name, tensor in random_tensors(SPEC).items()}
    return {name: t for name, t in tensors.items() if NAMES.locate(name) is not None}


def load(model, tensors, tied=False, complete=True):
    shapes = tensor_shapes(CONFIG)
    return load_checkpoint(model, NAMES, tensors.items(), shapes, tied=tied, complete=complete)


def test_every_tensor_goes_to_its_place():
    model, tensors = Plain(), checkpoint()
    loaded = load(model, tensors)
    assert loaded == set(dict(model.named_parameters()))
    assert torch.equal(model.seen["1.qkv", "k"], tensors["model.transformer.blocks.1.k_proj.weight"])
    assert torch.equal(model.seen["head", None], tensors["model.transformer.ff_out.weight"])


def test_published_is_the_inverse_of_locate():
    for name in checkpoint():
        assert NAMES.published(NAMES.locate(name)) == name


def test_a_missing_tensor_is_named():
    tensors = checkpoint()
    del tensors["model.transformer.blocks.1.k_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks model\.transformer\.blocks\.1\.k_proj\.weight$"):
        load(Plain(), tensors)
    assert load(Plain(), tensors, complete=False)  # an update may bring some


@pytest.mark.parametrize(
    "name",
    ["model.transformer.blocks.0.rotary.weight", "model.transformer.blocks.2.q_proj.weight", "extra.weight"],
)
def test_an_unexpected_tensor_is_named(name):
    with pytest.raises(ValueError, match=name):
        load(Plain(), {**checkpoint(), name: torch.zeros(8, 8)})


def test_a_bias_without_a_place_is_named():
    with pytest.raises(ValueError, match=r"q_proj\.bias"):
        load(Plain(), {**checkpoint(), "model.transformer.blocks.0.q_proj.bias": torch.zeros(8)})


def test_a_wrong_shape_is_named():
    tensors = {**checkpoint(), "model.transformer.blocks.0.k_proj.weight": torch.zeros(8, 8)}
    with pytest.raises(ValueError, match=r"blocks\.0\.k_proj\.weight' has shape \[8, 8\], expected \[4, 8\]"):
        load(Plain(), tensors)


def test_a_doubled_tensor_is_named():
    tensors = checkpoint()
    twice = [*tensors.items(), ("model.transformer.wte.weight", torch.zeros(20, 8))]
    with pytest.raises(ValueError, match=r"wte\.weight' is given twice"):
        load_checkpoint(Plain(), NAMES, twice, tensor_shapes(CONFIG), tied=False, complete=True)


def test_a_tied_head_is_the_embedding():
    tensors = checkpoint()
    model = Plain(tied=True)
    assert "lm_head.weight" not in load(model, tensors, tied=True)  # a stray copy of it is skipped
    del tensors["model.transformer.ff_out.weight"]
    load(Plain(tied=True), tensors, tied=True)


def test_saved_buffers_are_skipped():
    load(Plain(), {**checkpoint(), "model.transformer.blocks.0.rotary_emb.inv_freq": torch.zeros(2)})
