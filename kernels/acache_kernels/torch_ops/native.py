"""The C++ attention for CPUs: compiled for this machine at first use, kept in a cache, optional.

Without a C++ compiler, or with ACACHE_KERNELS_NATIVE=0, `load_native` returns None and plain torch serves.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu_attention.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-shared")
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

    def __init__(self, library: Path) -> None:
        self._attend = ctypes.CDLL(str(library)).acache_attend
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


@functools.cache
def load_native() -> NativeAttention | None:
    """The compiled kernel, or None, with the reason logged once, where it cannot be had."""
    if os.environ.get("ACACHE_KERNELS_NATIVE") == "0":
        return None
    try:
        return NativeAttention(_library())
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("CPU attention runs without its C++ kernel, in plain torch: %s", detail)
        return None


def _library() -> Path:
    """Path of the shared library for this source, compiler and processor, compiled when it is not cached."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (g++) was found")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    identity = "\n".join((SOURCE.read_text(), *FLAGS, version, _processor()))
    library = _cache_folder() / f"cpu_attention-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        logger.info("compiling the CPU attention kernel into %s", library)
        draft = library.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(draft)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        draft.replace(library)  # atomic: several processes may compile at once
    return library


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "acache_kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="acache_kernels-"))


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
