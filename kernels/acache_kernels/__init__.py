"""The tensor operations of the affix cache, each behind one signature with interchangeable implementations.

| operation                  | function                | implementations                 |
|----------------------------|-------------------------|---------------------------------|
| paged full attention       | `get_attention_kernel`  | `torch`, `triton`, `flashinfer` |
| affix importance           | `accumulate_importance` | `torch`, `triton`               |
| copy KV to other positions | `rebase_kv`             | `torch`, `triton`               |
| choose a token per row     | `choose_tokens`         | `torch`, `triton`               |
| store KV                   | `store_kv`              | `torch`                         |
| norm, SwiGLU, rotation     | `rows`                  | `torch`                         |

Importing this package imports torch and nothing else; Triton and FlashInfer are imported by the implementations
that need them, when they are first asked for. Nothing here knows about a server.
"""

from acache_kernels.attention import (
    AttentionKernel,
    attention_kernel_names,
    default_attention_kernel,
    get_attention_kernel,
)
from acache_kernels.choose import Choice, choose_tokens, rule_codes
from acache_kernels.importance import accumulate_importance
from acache_kernels.layout import ImportanceTargets, RaggedLayout
from acache_kernels.rebase import rebase_kv
from acache_kernels.store import store_kv

__all__ = [
    "AttentionKernel",
    "Choice",
    "ImportanceTargets",
    "RaggedLayout",
    "accumulate_importance",
    "attention_kernel_names",
    "choose_tokens",
    "default_attention_kernel",
    "get_attention_kernel",
    "rebase_kv",
    "rule_codes",
    "store_kv",
]
