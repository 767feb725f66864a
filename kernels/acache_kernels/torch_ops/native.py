"""The C++ attention for CPUs; None where it cannot be compiled (see native_library.py)."""

import ctypes

import torch

from acache_kernels.torch_ops.native_library import load_library

HEAD_DIMS = (32, 64, 80, 96, 128)
DTYPES = (torch.float32, torch.bfloat16)
TASK_ROWS = 256
"""Packed rows (query x head of the group) of a task."""
TASK_FIELDS = 5  # first query, packed rows of the request, first packed row, first key, keys


class _Step(ctypes.Structure):
    """Mirrors `Step` in cpu_attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse", "slots")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")),
        ("num_q_heads", ctypes.c_int),
        ("num_kv_heads", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


class NativeAttention:
    """Runs tasks of `cpu_attention.cpp`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.acache_attend
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._attend.argtypes = [pointer, pointer, ctypes.c_int64, integer, integer, integer]

    @staticmethod
    def serves(head_dim: int, dtype: torch.dtype) -> bool:
        return head_dim in HEAD_DIMS and dtype in DTYPES

    def attend(
        self,
        tasks: torch.Tensor,
        slots: torch.Tensor,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scale: float,
    ) -> None:
        """Writes the rows of `out` [N, Hq, D] and `lse` [N, Hq] (both contiguous) that `tasks` name.

        tasks: int64 [T, TASK_FIELDS]; slots: int64, what the tasks' keys index. q and the pools may be strided
        but for their last dimension.
        """
        if any(x.stride(-1) != 1 for x in (q, k_pool, v_pool)):
            raise ValueError("the last dimension of q, k_pool and v_pool must be contiguous")
        step = _Step(
            *(x.data_ptr() for x in (q, k_pool, v_pool, out)),
            None if lse is None else lse.data_ptr(),
            slots.data_ptr(),
            *(x.stride(i) for x in (q, k_pool, v_pool) for i in (0, 1)),
            q.shape[1],
            k_pool.shape[1],
            scale,
        )
        bfloat16 = int(q.dtype == torch.bfloat16)
        threads = torch.get_num_threads()
        failed = self._attend(ctypes.addressof(step), tasks.data_ptr(), len(tasks), q.shape[2], bfloat16, threads)
        if failed:
            raise ValueError(f"no native attention for head size {q.shape[2]}")


def load_native() -> NativeAttention | None:
    """The compiled kernel, or None where it cannot be had."""
    library = load_library("cpu_attention")
    return None if library is None else NativeAttention(library)
