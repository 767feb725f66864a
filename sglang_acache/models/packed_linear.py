"""Linear layers on a plain CPU: weights packed once in oneDNN's own layout.

Torch's ordinary call packs or strides through the weights every time, which costs most at the few rows of a step
inside a block (``python -m acache_kernels.bench_cpu`` measures it). Packing costs a second copy of the weights, so it
is done where memory is plentiful.
"""

from __future__ import annotations

import logging
from typing import Any

import psutil
import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.utils import is_cpu
from torch import nn
from torch.nn import functional

MEMORY_SHARE = 0.25
"""Most of the free memory that packed copies may take."""

logger = logging.getLogger(__name__)


class PackedLinearMethod(UnquantizedLinearMethod):
    """Serves one layer from a packed copy of its weight, which must be made again when the weight changes."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x ``[N, in]`` -> ``[N, out]``."""
        if not len(x):  # oneDNN takes no empty product
            return functional.linear(x, layer.weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")


def pack_linear_layers(model: nn.Module) -> int:
    """Pack, or pack again, every plain linear layer of ``model``; returns how many were packed.

    None where the weights are not on a plain CPU, not float32 or bfloat16, or too large for a second copy.
    """
    layers: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, LinearBase)
        and type(module.quant_method) in (UnquantizedLinearMethod, PackedLinearMethod)
        and _can_be_packed(module.weight)
    ]
    for layer in layers:
        layer.quant_method = UnquantizedLinearMethod()  # frees what was packed before
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    if size > MEMORY_SHARE * psutil.virtual_memory().available:
        logger.info("linear layers are not packed: a second copy of %.1f GB is too much here", size / 2**30)
        return 0
    for layer in layers:
        layer.quant_method = PackedLinearMethod(layer.weight)
    return len(layers)


def _can_be_packed(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or is_cpu() or not torch.backends.mkldnn.is_available():
        return False  # is_cpu: SGLang's own CPU engine, which packs for itself
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
