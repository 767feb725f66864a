"""Float64 references of every kernel, written for reading, and the checks that all implementations share."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from acache_kernels import (
    AttentionKernel,
    ImportanceTargets,
    RaggedLayout,
    accumulate_importance,
    choose_tokens,
    get_attention_kernel,
)
from acache_kernels.choose import RULES, Choice
from acache_kernels.static_plan import StaticCapacity

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class AttentionCase:
    """A step over a pool in which every slot that no map reads is NaN."""

    layout: RaggedLayout
    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    scale: float

    @property
    def heads(self) -> dict[str, object]:
        return {
            "num_q_heads": self.q.shape[1],
            "num_kv_heads": self.k_pool.shape[1],
            "head_dim": self.q.shape[2],
            "dtype": self.q.dtype,
            "device": "cpu",
        }

    def run(self, kernel: str | AttentionKernel, return_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        implementation = get_attention_kernel(kernel) if isinstance(kernel, str) else kernel
        return self.run_planned(implementation, implementation.plan(self.layout, **self.heads), return_lse)

    def run_planned(
        self, kernel: AttentionKernel, plan: Any, return_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return kernel.run(plan, self.q, self.k_pool, self.v_pool, scale=self.scale, return_lse=return_lse)


def attention_case(
    shapes: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    slots: str = "permuted",
    seed: int = 0,
    index_dtype: torch.dtype = torch.int64,
    padding_slot: bool = False,
) -> AttentionCase:
    """shapes: (queries, keys) per request; heads: (Hq, Hkv, D); slots: permuted, repeated or run.

    With `padding_slot`, slot 0 holds numbers and no request reads it.
    """
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_q_heads, num_kv_heads, head_dim = heads
    total = sum(m for _, m in shapes)
    size = 2 * total + 3
    if slots == "permuted":
        indices = random.permutation(size)[:total]
    elif slots == "repeated":
        indices = random.integers(0, size, total)
    else:
        indices = 1 + np.arange(total)
    if padding_slot:
        indices = np.maximum(indices, 1)
    pools = torch.randn(2, size, num_kv_heads, head_dim, generator=generator).to(dtype)
    unread = np.setdiff1d(np.arange(int(padding_slot), size), indices)
    pools[:, torch.from_numpy(unread)] = float("nan")
    layout = RaggedLayout.build(
        [n for n, _ in shapes], [m for _, m in shapes], torch.from_numpy(indices).to(index_dtype)
    )
    q = torch.randn(layout.num_queries, num_q_heads, head_dim, generator=generator).to(dtype)
    return AttentionCase(layout, q, pools[0], pools[1], head_dim**-0.5)


def padded(case: AttentionCase, capacity: StaticCapacity) -> AttentionCase:
    """The case with as many rows of q as a static plan takes; what is in the further ones does not matter."""
    more = torch.ones((capacity.queries - len(case.q), *case.q.shape[1:]), dtype=case.q.dtype)
    return replace(case, q=torch.cat((case.q, more)))


def reference_attention(case: AttentionCase) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    lse = torch.zeros(case.q.shape[:2], dtype=torch.float64)
    group = case.q.shape[1] // case.k_pool.shape[1]
    row = key = 0
    for n, m in zip(case.layout.qo_lens.tolist(), case.layout.kv_lens.tolist(), strict=True):
        slots = case.layout.kv_indices[key : key + m].long()
        keys, values = (pool[slots].double().repeat_interleave(group, 1) for pool in (case.k_pool, case.v_pool))
        scores = case.scale * torch.einsum("nhd,mhd->nhm", case.q[row : row + n].double(), keys)
        out[row : row + n] = torch.einsum("nhm,mhd->nhd", scores.softmax(-1), values)
        lse[row : row + n] = scores.logsumexp(-1)
        row, key = row + n, key + m
    return out, lse


def check_attention(case: AttentionCase, kernel: str | AttentionKernel) -> None:
    out, lse = case.run(kernel)
    expected, expected_lse = reference_attention(case)
    tolerance = TOLERANCE[case.q.dtype]
    assert lse is not None
    assert out.dtype == case.q.dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-5, atol=2e-4)


@dataclass
class ImportanceCase:
    q: torch.Tensor
    k_pool: torch.Tensor
    lse: torch.Tensor
    targets: ImportanceTargets


def importance_case(
    probes: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> ImportanceCase:
    """probes: (mask queries, affix keys) each; slots that no probe reads are NaN, as are rows no probe asks."""
    generator = torch.Generator().manual_seed(seed)
    random = np.random.default_rng(seed)
    rows, keys = sum(n for n, _ in probes), sum(m for _, m in probes)
    query_rows = torch.from_numpy(random.permutation(rows + 5)[:rows])
    key_slots = torch.from_numpy(random.permutation(2 * keys + 4)[:keys])
    q = torch.full((rows + 5, heads[0], heads[2]), float("nan"), dtype=dtype)
    q[query_rows] = torch.randn(rows, heads[0], heads[2], generator=generator).to(dtype)
    k_pool = torch.full((2 * keys + 4, heads[1], heads[2]), float("nan"), dtype=dtype)
    k_pool[key_slots] = torch.randn(keys, heads[1], heads[2], generator=generator).to(dtype)
    lse = torch.full((rows + 5, heads[0]), float("nan"))
    lse[query_rows] = 3 + torch.randn(rows, heads[0], generator=generator)
    targets = ImportanceTargets.build(query_rows, [n for n, _ in probes], key_slots, [m for _, m in probes])
    return ImportanceCase(q, k_pool, lse, targets)


def reference_importance(case: ImportanceCase, scale: float, mode: str) -> torch.Tensor:
    group = case.q.shape[1] // case.k_pool.shape[1]
    sums = []
    row = key = 0
    for n, m in zip(case.targets.query_lens.tolist(), case.targets.key_lens.tolist(), strict=True):
        rows = case.targets.query_rows[row : row + n]
        keys = case.k_pool[case.targets.key_slots[key : key + m]].double().repeat_interleave(group, 1)
        scores = scale * torch.einsum("nhd,mhd->nhm", case.q[rows].double(), keys)
        norm = case.lse[rows].double() if mode == "attention" else scores.logsumexp(-1)
        sums.append((scores - norm.unsqueeze(-1)).exp().sum((0, 1)))
        row, key = row + n, key + m
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64)


def check_importance(case: ImportanceCase, mode: str, impl: str) -> None:
    scale = case.q.shape[2] ** -0.5
    scores = torch.arange(case.targets.num_keys, dtype=torch.float32)  # accumulates into what is there
    expected = scores.double() + 2 * reference_importance(case, scale, mode)
    for _ in range(2):
        accumulate_importance(scores, case.q, case.k_pool, case.lse, case.targets, scale=scale, mode=mode, impl=impl)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-4)


def reference_rotation(k: torch.Tensor, delta: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """k [n, H, D] in float64, by complex multiplication."""
    half = inv_freq.numel()
    turn = torch.polar(torch.ones(len(delta), half).double(), delta.double()[:, None] * inv_freq.double())
    pairs = torch.complex(k[..., :half].double(), k[..., half : 2 * half].double()) * turn.unsqueeze(1)
    return torch.cat((pairs.real, pairs.imag, k[..., 2 * half :].double()), dim=-1)


def mix32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def reference_uniform(seed: int, counter: int) -> float:
    """The documented hash in Python's integers."""
    unsigned = seed % 2**64
    key0 = mix32((unsigned + 0x9E3779B9) % 2**32)
    key1 = mix32(((unsigned >> 32 ^ key0) + 0x85EBCA6B) % 2**32)
    return ((mix32(mix32((counter + key0) % 2**32) ^ key1) >> 9) + 0.5) * 2.0**-23


@dataclass
class ChooseCase:
    """Arguments of `choose_tokens`, per-row lists."""

    logits: torch.Tensor
    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    seed: list[int]
    rule: list[str]
    forbidden: list[int]
    vocab_limit: int

    def run(self, impl: str, rows: slice | None = None) -> Choice:
        rows = rows or slice(None)
        return choose_tokens(
            self.logits[rows],
            temperature=torch.tensor(self.temperature[rows]),
            top_k=torch.tensor(self.top_k[rows], dtype=torch.int32),
            top_p=torch.tensor(self.top_p[rows]),
            seed=torch.tensor(self.seed[rows], dtype=torch.int64),
            rule=torch.tensor([RULES.index(name) for name in self.rule[rows]]),
            forbidden=torch.tensor(self.forbidden, dtype=torch.int64),
            vocab_limit=self.vocab_limit,
            impl=impl,
        )


def kept_ids(z: np.ndarray, scale: float, top_k: int, top_p: float, slack: float) -> np.ndarray:
    """Literal reading of the contract, with the mass edge moved by `slack`."""
    larger = z[None, :] > z[:, None]
    share = np.exp((z - z.max()) / scale)
    mass = (larger * share[None, :]).sum(1) / share.sum()
    kept = np.ones(len(z), dtype=bool)
    if top_k > 0:
        kept &= larger.sum(1) < top_k
    if top_p < 1:
        kept &= (mass <= top_p + slack) | (z == z.max())
    return kept & np.isfinite(z)


def check_choice(case: ChooseCase, impl: str) -> None:
    choice = case.run(impl)
    for i in range(len(case.logits)):
        check_chosen_row(case, i, *(float(column[i]) for column in choice))


def check_chosen_row(case: ChooseCase, i: int, token_value: float, confidence: float, logprob: float) -> None:
    token = int(token_value)
    z = case.logits[i, : case.vocab_limit].double().numpy().copy()
    z[[f for f in case.forbidden if f < case.vocab_limit]] = -np.inf
    t, scale = case.temperature[i], case.temperature[i] or 1.0
    assert np.isfinite(z[token]), "a forbidden id"

    log_p = z - z.max() - np.log(np.exp(z - z.max()).sum())
    assert math.isclose(logprob, log_p[token], rel_tol=1e-4, abs_tol=1e-4)
    loose, tight = (kept_ids(z, scale, case.top_k[i], case.top_p[i], slack) for slack in (1e-5, -1e-5))
    assert loose[token], "an id that top-k or top-p excludes"
    if t == 0:
        assert token == int(z.argmax())
    else:
        noise = [-math.log(-math.log(reference_uniform(case.seed[i], v))) for v in range(len(z))]
        score = z + t * np.array(noise)
        assert score[token] >= score[tight].max() - 1e-4 * (1 + abs(score[token]))
    if (loose == tight).all():
        expected = reference_confidence(case, i, z, loose, log_p, token)
        assert math.isclose(confidence, expected, rel_tol=1e-3, abs_tol=1e-4), case.rule[i]


def reference_confidence(
    case: ChooseCase, i: int, z: np.ndarray, kept: np.ndarray, log_p: np.ndarray, token: int
) -> float:
    rule, scale = case.rule[i], case.temperature[i] or 1.0
    p = np.where(kept, np.exp((z - z.max()) / scale), 0.0)
    p /= p.sum()
    if rule == "low_confidence":
        return float(np.exp(log_p[token]))
    if rule == "maskgit_plus":
        return float(p[token])
    if rule == "topk_margin":
        ordered = np.append(np.sort(p), 0.0)
        ordered.sort()
        return float(ordered[-1] - ordered[-2])
    if rule == "entropy":
        return float((p[p > 0] * np.log(p[p > 0])).sum())
    return reference_uniform(case.seed[i], 0xFFFFFFFF)
