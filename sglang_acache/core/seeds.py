"""Per-row random seeds that depend on the request alone, never on its batch."""

from __future__ import annotations

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def row_seeds(seed: int, positions: np.ndarray, step: int) -> np.ndarray:
    """int64 ``[M]``: splitmix64 of (request seed, denoising step of the request, position)."""
    with np.errstate(over="ignore"):
        # Nested, one hash for each: a sum or an xor of hashes would give seed a, position b what b, a gets.
        base = _splitmix(_splitmix(np.uint64(seed & (2**64 - 1))) ^ np.uint64(step))
        return _splitmix(base ^ positions.astype(np.uint64)).view(np.int64)


def seed_from_text(text: str) -> int:
    """A 63-bit seed for a request that gave none; the same on every tensor-parallel rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _splitmix(value: np.ndarray | np.uint64) -> np.ndarray:
    mixed = np.asarray(value, dtype=np.uint64) + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX2
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
