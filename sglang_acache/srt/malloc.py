"""How a process that computes on the CPU keeps the memory of its activations."""

from __future__ import annotations

import ctypes
import logging

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
MMAP_THRESHOLDS = (1 << 30, 1 << 25)  # the second is the most that older glibc takes
TRIM_THRESHOLD = (1 << 31) - 1

logger = logging.getLogger(__name__)


def keep_large_blocks() -> bool:
    """Let glibc serve large blocks from its heap and keep up to 2 GB of it when they are freed.

    By default every activation over 32 MB is mapped from the kernel and given back, again in every layer: the page
    faults then cost more than the arithmetic of a norm or an activation function. False where the C library does not
    do it; everything works, only slower.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mapped = any(mallopt(_M_MMAP_THRESHOLD, size) for size in MMAP_THRESHOLDS)
    kept = bool(mapped and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD))
    if not kept:
        logger.info("this C library does not keep large blocks: big steps on the CPU fault their memory in every layer")
    return kept
