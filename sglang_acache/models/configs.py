"""Configuration classes of the supported checkpoints, read from the ``config.json`` published on the hub.

The hub ships these architectures with remote code. ``register_configs`` teaches ``transformers`` our own
classes instead, so that none of it is needed or run. A field with a value that the models here do not
implement is refused with one ValueError that names it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import AutoConfig, PretrainedConfig

Accepted = Mapping[str, tuple[object, ...]]


class DiffusionLMConfig(PretrainedConfig):
    """What LLaDA and Dream share: checks, RoPE, and the name of the mask token.

    ``default_block_length`` is ours: a checkpoint may carry the block length it was trained for, which then
    overrides the table in ``defaults.py``.
    """

    model_type = "diffusion_lm"
    accepted: ClassVar[Accepted] = {}
    published_rope_theta: ClassVar[float] = 10000.0

    vocab_size: int = 126464
    head_dim: int | None = None
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None
    mask_token_id: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    default_block_length: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for field, values in self.accepted.items():
            given = kwargs[field] if field in kwargs else getattr(self, field, values[0])
            if given not in values:
                raise self._unsupported(field, given, f"supported: {', '.join(repr(v) for v in values)}")
        if kwargs.get("rope_theta", 0) is None:
            del kwargs["rope_theta"]
        super().__post_init__(**kwargs)
        self._check_rope()
        self._check_shapes()
        self._check_tokens()

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""
        return float((self.rope_parameters or {}).get("rope_theta", self.published_rope_theta))

    @property
    def query_heads(self) -> int:
        return self._published("original_num_attention_heads", "num_attention_heads")

    @property
    def key_heads(self) -> int:
        return self._published("original_total_num_kv_heads", "num_key_value_heads")

    @property
    def mlp_width(self) -> int:
        return self._published("original_intermediate_size", "intermediate_size")

    def _published(self, kept: str, field: str) -> int:
        """A size as config.json gives it.

        On a CPU SGLang rounds some sizes up, in place, for kernels that are not used here, and keeps the old value
        as ``kept``. The model is built, and its tensors are checked, by the published sizes.
        """
        value: Any = getattr(self, kept, None)
        return int(getattr(self, field) if value is None else value)

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding and of the output head; those past ``vocab_size`` are padding."""
        return self.vocab_size

    def _unsupported(self, field: str, value: object, hint: str) -> ValueError:
        return ValueError(f"{self.model_type} config.json: {field}={value!r} is not supported ({hint})")

    def _check_rope(self) -> None:
        kind = (self.rope_parameters or {}).get("rope_type", "default")
        if kind != "default":
            raise self._unsupported("rope_scaling", kind, "supported: none, plain rotary positions")
        if not self.rope_theta > 0:
            raise self._unsupported("rope_theta", self.rope_theta, "must be positive")

    def _check_shapes(self) -> None:
        sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
        for field in (*sizes, "intermediate_size", "vocab_size", "max_position_embeddings"):
            value = getattr(self, field)
            if not isinstance(value, int) or value <= 0:
                raise self._unsupported(self.attribute_map.get(field, field), value, "must be a positive integer")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            name = self.attribute_map.get("num_key_value_heads", "num_key_value_heads")
            raise self._unsupported(name, kv_heads, f"must divide the {heads} query heads")
        if self.hidden_size % (2 * heads):
            name = self.attribute_map.get("hidden_size", "hidden_size")
            raise self._unsupported(name, self.hidden_size, f"must be an even multiple of the {heads} heads")
        if self.head_dim not in (None, self.hidden_size // heads):
            raise self._unsupported("head_dim", self.head_dim, f"must be {self.hidden_size // heads}")
        self.head_dim = self.hidden_size // heads

    def _check_tokens(self) -> None:
        if not isinstance(self.mask_token_id, int) or not 0 <= self.mask_token_id < self.vocab_size:
            hint = f"must be a token id in [0, {self.vocab_size})"
            raise self._unsupported("mask_token_id", self.mask_token_id, hint)
        length = self.default_block_length
        if length is not None and (not isinstance(length, int) or length <= 0):
            raise self._unsupported("default_block_length", length, "must be a positive integer")


class LLaDAConfig(DiffusionLMConfig):
    """``config.json`` of LLaDA (``LLaDAModelLM``); a field left out takes the value of LLaDA-8B.

    The rotary embedding is always computed in float32, whatever ``rope_full_precision`` says.
    """

    model_type = "llada"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "num_hidden_layers": "n_layers",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "weight_tying",
    }
    accepted: ClassVar[Accepted] = {
        "block_type": ("llama",),
        "block_group_size": (1,),
        "activation_type": ("silu",),
        "layer_norm_type": ("rms",),
        "layer_norm_with_affine": (True,),
        "bias_for_layer_norm": (False, None),
        "attention_layer_norm": (False,),
        "input_emb_norm": (False,),
        "rope": (True,),
        "alibi": (False,),
        "include_bias": (False,),
        "scale_logits": (False,),
    }
    published_rope_theta: ClassVar[float] = 500000.0

    d_model: int = 4096
    n_heads: int = 32
    n_kv_heads: int | None = None
    n_layers: int = 32
    mlp_ratio: int = 4
    mlp_hidden_size: int | None = None
    embedding_size: int | None = None
    max_sequence_length: int = 4096
    multi_query_attention: bool | None = None
    include_qkv_bias: bool | None = False
    weight_tying: bool = False
    mask_token_id: int | None = 126336
    pad_token_id: int | None = 126081
    eos_token_id: int | list[int] | None = 126081

    def __post_init__(self, **kwargs: Any) -> None:
        if self.n_kv_heads is None:
            self.n_kv_heads = 1 if self.multi_query_attention else self.n_heads
        elif self.multi_query_attention is not None:
            expected = 1 if self.multi_query_attention else self.n_heads
            if self.n_kv_heads != expected:
                hint = f"multi_query_attention={self.multi_query_attention} asks for {expected}"
                raise self._unsupported("n_kv_heads", self.n_kv_heads, hint)
        if self.mlp_hidden_size is None:
            self.mlp_hidden_size = self.mlp_ratio * self.d_model
        super().__post_init__(**kwargs)
        if self.embedding_rows < self.vocab_size:
            hint = f"must be at least vocab_size={self.vocab_size}"
            raise self._unsupported("embedding_size", self.embedding_size, hint)

    @property
    def embedding_rows(self) -> int:
        return self.embedding_size or self.vocab_size

    @property
    def attention_bias(self) -> bool:
        """Whether the query, key and value projections have biases."""
        return bool(self.include_qkv_bias)


class DreamConfig(DiffusionLMConfig):
    """``config.json`` of Dream, Dream-Coder and DiffuCoder (``DreamModel``): Qwen2 without a causal mask."""

    model_type = "Dream"
    accepted: ClassVar[Accepted] = {
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
    }

    vocab_size: int = 152064
    hidden_size: int = 3584
    intermediate_size: int = 18944
    num_hidden_layers: int = 28
    num_attention_heads: int = 28
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    mask_token_id: int | None = 151666
    pad_token_id: int | None = 151643
    bos_token_id: int | None = 151643
    eos_token_id: int | list[int] | None = 151643

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    @property
    def attention_bias(self) -> bool:
        """Query, key and value projections have biases, as in Qwen2."""
        return True


def register_configs() -> None:
    """Make ``AutoConfig`` and ``AutoTokenizer`` use our classes for these checkpoints. May be called again.

    A class of ours wins over a checkpoint's ``auto_map`` even where remote code is allowed.
    """
    from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES

    from sglang_acache.models.tokenizer import DreamTokenizer

    for config_class in (LLaDAConfig, DreamConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    # By class name: a class registered for the config would lose against the checkpoint's own code.
    REGISTERED_TOKENIZER_CLASSES[DreamTokenizer.__name__] = DreamTokenizer
