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

    x, residual: [N, H]; weight: [H]. Both results have x's dtype. Raises ValueError for other shapes.
    """
    if x.ndim != 2 or weight.shape != x.shape[1:] or (residual is not None and residual.shape != x.shape):
        given = None if residual is None else tuple(residual.shape)
        raise ValueError(f"x {tuple(x.shape)}, residual {given} and weight {tuple(weight.shape)} do not fit")
    native = native_rows(x, residual, weight)
    if native is not None:
        return native.add_rms_norm(x, residual, weight, eps)
    wide = x.float() if residual is None else x.float() + residual.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype), x if residual is None else wide.to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [N, 2 I] = (gate, up), computed in float32: [N, I]. Raises ValueError for other shapes."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [N, 2 I], not {tuple(gate_up.shape)}")
    native = native_rows(gate_up)
    if native is not None:
        return native.silu_mul(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, angles: torch.Tensor) -> None:
    """Rotates x [N, heads, D] in place by its absolute positions int64 [N]: halves of a head are the pairs (Llama's).

    angles: float32 [P, D], cosines [D / 2] then sines [D / 2] of every position. Raises ValueError for shapes and
    dtypes that do not fit, IndexError for a position outside the table.
    """
    if x.ndim != 3 or positions.shape != x.shape[:1] or angles.ndim != 2 or angles.shape[1] != x.shape[2]:
        raise ValueError(
            f"x {tuple(x.shape)}, positions {tuple(positions.shape)} and angles {tuple(angles.shape)} do not fit"
        )
    if positions.dtype != torch.int64 or angles.dtype != torch.float32:
        raise ValueError(f"positions must be int64 and angles float32, not {positions.dtype} and {angles.dtype}")
    native = native_rows(x)
    plain = x.stride(2) != 1 or x.stride(1) != x.shape[2] or not positions.is_contiguous() or not angles.is_contiguous()
    if native is not None and not plain:
        native.rotate(x, positions, angles)
        return
    cos, sin = angles[positions].unsqueeze(1).chunk(2, dim=-1)  # [N, 1, D / 2]
    first, second = x.float().chunk(2, dim=-1)
    x.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
