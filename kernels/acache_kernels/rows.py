"""What a transformer does to single rows between its matrix products.

On a CPU each is one pass over memory where a C++ compiler is at hand (float32 and bfloat16), else plain torch. On
other devices servers bring fused kernels of their own; plain torch stands in.
"""

import torch
from torch.nn import functional

from acache_kernels.torch_ops.native_rows import native_rows


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight * s / sqrt(mean(s^2) + eps), s) with s = x + residual (x where it is None), computed in float32.

    x, residual: [N, H]; weight: [H]. Both results have x's dtype.
    """
    native = native_rows(x, residual, weight)
    if native is not None:
        return native.add_rms_norm(x, residual, weight, eps)
    wide = x.float() if residual is None else x.float() + residual.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype), x if residual is None else wide.to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [N, 2 I] = (gate, up), computed in float32: [N, I]."""
    native = native_rows(gate_up)
    if native is not None:
        return native.silu_mul(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, angles: torch.Tensor) -> None:
    """Rotates x [N, heads, D] in place by its absolute positions int64 [N]: halves of a head are the pairs (Llama's).

    angles: float32 [P, D], cosines [D / 2] then sines [D / 2] of every position. x is contiguous but for its rows.
    """
    native = native_rows(x)
    if native is not None:
        native.rotate(x, positions, angles)
        return
    cos, sin = angles[positions].unsqueeze(1).chunk(2, dim=-1)  # [N, 1, D / 2]
    first, second = x.float().chunk(2, dim=-1)
    x.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
