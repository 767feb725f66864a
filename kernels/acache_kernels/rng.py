"""Counter-based random numbers: a value depends on (seed, counter) only, in every implementation.

All arithmetic is modulo 2^32, so torch (int64 and a mask) and Triton (uint32) give the same bits:

    mix(x)  = x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    key0    = mix(low 32 bits of the seed + 0x9E3779B9)
    key1    = mix((high 32 bits of the seed ^ key0) + 0x85EBCA6B)
    h(seed, c) = mix(mix(c + key0) ^ key1)
    uniform = ((h >> 9) + 0.5) * 2^-23          exact in float32, never 0 and never 1
    gumbel  = -log(-log(uniform))               float32

The counter is the vocabulary id; `ROW_COUNTER`, which no vocabulary reaches, gives a row's own number.
"""

import torch

MASK = 0xFFFFFFFF
MIX_A = 0x7FEB352D
MIX_B = 0x846CA68B
GOLDEN = 0x9E3779B9
APART = 0x85EBCA6B
"""Keeps key1 from being mix(key0), which would cancel for counter 0."""
ROW_COUNTER = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """In place on int64 holding 32-bit values; products wrap modulo 2^64, which keeps their low 32 bits."""
    x.bitwise_xor_(x >> 16).mul_(MIX_A).bitwise_and_(MASK)
    x.bitwise_xor_(x >> 15).mul_(MIX_B).bitwise_and_(MASK)
    return x.bitwise_xor_(x >> 16)


def keys(seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two 32-bit keys of each seed, int64 [M] -> int64 [M], int64 [M]."""
    key0 = _mix(((seed & MASK) + GOLDEN) & MASK)
    return key0, _mix(((((seed >> 32) & MASK) ^ key0) + APART) & MASK)


def hash_bits(key0: torch.Tensor, key1: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """h(seed, counter) as int64 in [0, 2^32), broadcasting keys against counters."""
    return _mix(_mix((counter + key0).bitwise_and_(MASK)).bitwise_xor_(key1))


def to_uniform(bits: torch.Tensor) -> torch.Tensor:
    """float32 strictly between 0 and 1."""
    return ((bits >> 9).to(torch.float32) + 0.5) * 2.0**-23


def row_uniform(seed: torch.Tensor) -> torch.Tensor:
    """One number per seed: int64 [M] -> float32 [M]."""
    key0, key1 = keys(seed)
    return to_uniform(hash_bits(key0, key1, torch.full_like(seed, ROW_COUNTER)))


def gumbel(seed: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Gumbel noise of every (seed, counter): int64 [M], int64 [V] -> float32 [M, V]."""
    key0, key1 = keys(seed)
    uniform = to_uniform(hash_bits(key0.unsqueeze(1), key1.unsqueeze(1), counters.unsqueeze(0)))
    return uniform.log_().neg_().log_().neg_()
