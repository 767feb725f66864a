"""The random checkpoints of the benchmarks, under the name that tests know them by."""

from sglang_acache.bench.random_model import (
    DREAM,
    LLADA,
    SPECIALS,
    CheckpointSpec,
    Tensors,
    build_tokenizer,
    compute_bound_spec,
    dream_spec,
    published_name,
    random_tensors,
    write_checkpoint,
)

__all__ = [
    "DREAM",
    "LLADA",
    "SPECIALS",
    "CheckpointSpec",
    "Tensors",
    "build_tokenizer",
    "compute_bound_spec",
    "dream_spec",
    "published_name",
    "random_tensors",
    "write_checkpoint",
]
