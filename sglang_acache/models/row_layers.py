"""SGLang's layers that work on single rows, on a CPU through our kernels: one pass over memory instead of several.

On other devices they are SGLang's own. Only our models are built of them.
"""

from __future__ import annotations

from typing import Any

import torch
from acache_kernels.rows import add_rms_norm, silu_mul
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm


class DiffusionRMSNorm(RMSNorm):
    def forward_native(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        quant_linear: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x ``[N, hidden]`` -> the norm; with ``residual`` the norm of their sum, and the sum."""
        if x.device.type != "cpu" or post_residual_addition is not None or quant_linear is not None:
            return super().forward_native(x, residual, post_residual_addition, quant_linear)
        normed, total = add_rms_norm(x, residual, self.weight, self.variance_epsilon)
        return normed if residual is None else (normed, total)

    forward_cpu = forward_native


class DiffusionSiluAndMul(SiluAndMul):
    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """x ``[N, 2 * inner]`` -> ``[N, inner]``."""
        return silu_mul(x) if x.device.type == "cpu" else super().forward_native(x)

    forward_cpu = forward_native
