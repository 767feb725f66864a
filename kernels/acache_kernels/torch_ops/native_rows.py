"""The C++ row operations for CPUs, float32 and bfloat16; see cpu_rows.cpp and, for what they mean, rows.py."""

import ctypes
import functools

import torch

from acache_kernels.torch_ops.native_library import load_library

DTYPES = (torch.float32, torch.bfloat16)


class NativeRows:
    """Calls `cpu_rows.cpp`. Shapes and dtypes are the callers' to check: rows.py and store.py do."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._norm, self._silu = library.acache_add_rms_norm, library.acache_silu_mul
        self._rotate, self._store = library.acache_rotate, library.acache_store
        self._norm.argtypes = [*[pointer] * 3, ctypes.c_float, long, long, pointer, pointer, integer, integer]
        self._silu.argtypes = [pointer, long, long, pointer, integer, integer]
        self._rotate.argtypes = [pointer, long, pointer, pointer, *[long] * 4, integer, integer]
        self._store.argtypes = [pointer, long, pointer, long, long, pointer, long, long, integer]
        for function in (self._norm, self._silu):
            function.restype = None

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = x.contiguous(), weight.contiguous()
        residual = None if residual is None else residual.contiguous()
        out = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        self._norm(
            x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(), eps, *x.shape,
            None if residual is None else total.data_ptr(), out.data_ptr(), *_how(x),
        )  # fmt: skip
        return out, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._silu(gate_up.data_ptr(), *out.shape, out.data_ptr(), *_how(out))
        return out

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, angles: torch.Tensor) -> None:
        rows, heads, dim = x.shape
        outside = self._rotate(
            x.data_ptr(), x.stride(0), positions.data_ptr(), angles.data_ptr(), len(angles), rows, heads, dim // 2,
            *_how(x),
        )  # fmt: skip
        if outside:
            raise IndexError(f"a position is outside the table of {len(angles)}")

    def store(self, pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        if not len(rows):
            return
        size = rows.element_size()
        outside = self._store(
            rows.data_ptr(), rows.stride(0) * size, pool.data_ptr(), pool.stride(0) * size, len(pool),
            slots.data_ptr(), len(rows), rows[0].numel() * size, torch.get_num_threads(),
        )  # fmt: skip
        if outside:
            raise IndexError(f"a slot is outside the pool of {len(pool)}")


def _how(x: torch.Tensor) -> tuple[int, int]:
    return int(x.dtype == torch.bfloat16), torch.get_num_threads()


def native_rows(*tensors: torch.Tensor | None) -> NativeRows | None:
    """The C++ operations where they serve these tensors: on a CPU, of one of `DTYPES`, all of the same."""
    given = [tensor for tensor in tensors if tensor is not None]
    dtype = given[0].dtype
    if dtype not in DTYPES or any(tensor.device.type != "cpu" or tensor.dtype != dtype for tensor in given):
        return None
    return _load()


def _load() -> NativeRows | None:
    library = load_library("cpu_rows")
    return None if library is None else _bound(library)


@functools.cache
def _bound(library: ctypes.CDLL) -> NativeRows:
    return NativeRows(library)
