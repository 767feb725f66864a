"""How a process that computes on the CPU keeps the memory of its activations."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
MMAP_THRESHOLD = 1 << 30
TRIM_THRESHOLD = (1 << 31) - 1


def keep_large_blocks() -> bool:
    """Let glibc serve large blocks from its heap and keep them when freed; False where the C library has no such knob.

    By default every activation over 32 MB is mapped from the kernel and given back, again in every layer: the page
    faults then cost more than the arithmetic of a norm or an activation function.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD))
