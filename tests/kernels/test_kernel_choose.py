"""Choosing tokens in torch, and the counter-based random numbers."""

from dataclasses import replace

import pytest
import torch
from acache_kernels import choose_tokens, rng, rule_codes
from acache_kernels.torch_ops import choose as torch_choose
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import ChooseCase, check_choice, reference_uniform
from kernel_strategies import choose_cases


@settings(max_examples=80)
@given(choose_cases(most_rows=6, most_ids=40))
def test_equals_the_float64_reference(case: ChooseCase) -> None:
    check_choice(case, "torch")


@settings(max_examples=20)
@given(choose_cases(most_rows=5, most_ids=60))
def test_few_candidates_and_small_blocks_change_nothing(case: ChooseCase) -> None:
    expected = case.run("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_choose, "FIRST_TOP", 2)
        patch.setattr(torch_choose, "BLOCK_LOGITS", 60)
        for mine, theirs in zip(case.run("torch"), expected, strict=True):
            torch.testing.assert_close(mine, theirs)


@settings(max_examples=20)
@given(choose_cases(most_rows=6, most_ids=40))
def test_a_row_gives_the_same_alone_and_in_any_batch(case: ChooseCase) -> None:
    together = case.run("torch")
    for i in range(len(case.logits)):
        for mine, all_rows in zip(case.run("torch", slice(i, i + 1)), together, strict=True):
            assert torch.equal(mine[0], all_rows[i])


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1))
def test_hash_equals_the_documented_integers(seed: int, counter: int) -> None:
    key0, key1 = rng.keys(torch.tensor([seed]))
    bits = rng.hash_bits(key0, key1, torch.tensor([counter]))
    assert float(rng.to_uniform(bits)) == reference_uniform(seed, counter)


def test_noise_looks_random_along_rows_and_columns() -> None:
    """Moments of every id over consecutive seeds and of every seed over consecutive ids; neighbours independent."""
    noise = rng.gumbel(torch.arange(600), torch.arange(500))
    for axis in (0, 1):
        count = noise.shape[axis]
        spread = 6 * 1.2825 / count**0.5
        assert float((noise.mean(axis) - 0.5772).abs().max()) < spread
    centred = noise - noise.mean()
    for pair in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(float(pair.mean())) < 6 * 1.645 / pair.numel() ** 0.5


def test_golden_numbers_pin_the_hash() -> None:
    """What a seed samples is part of the contract: changing these changes users' outputs."""
    found = rng.row_uniform(torch.tensor([0, 1, -1, 2**40])).tolist()
    assert found == [reference_uniform(seed, 0xFFFFFFFF) for seed in (0, 1, -1, 2**40)]
    assert found == [0.9878697991371155, 0.8983305096626282, 0.11311036348342896, 0.6451453566551208]


def many_draws(draws: int, **changes: object) -> ChooseCase:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, 9.0]]).expand(draws, 6)
    case = ChooseCase(logits, [1.5] * draws, [0] * draws, [1.0] * draws, list(range(draws)), ["random"] * draws, [5], 6)
    return replace(case, **changes)


@pytest.mark.parametrize(("changes", "kept"), [({}, 5), ({"top_k": [3] * 20_000}, 3), ({"top_p": [0.5] * 20_000}, 2)])
def test_samples_follow_the_softmax_of_what_is_kept(changes: dict[str, object], kept: int) -> None:
    case = many_draws(20_000, **changes)
    share = torch.bincount(case.run("torch").token, minlength=6) / 20_000
    expected = torch.zeros(6)
    expected[:kept] = torch.softmax(case.logits[0, :kept] / 1.5, 0)
    torch.testing.assert_close(share, expected, rtol=0, atol=0.015)


def test_random_confidence_is_uniform_and_independent_of_the_token() -> None:
    choice = many_draws(20_000).run("torch")
    assert float(choice.confidence.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(choice.confidence[choice.token == 0].mean()) == pytest.approx(0.5, abs=0.02)


def test_ties_go_to_the_lowest_id_and_rules_may_be_named_once() -> None:
    choice = choose_tokens(
        torch.tensor([[1.0, 3.0, 3.0, 3.0]]),
        temperature=torch.zeros(1),
        top_k=torch.zeros(1, dtype=torch.int32),
        top_p=torch.ones(1),
        seed=torch.zeros(1, dtype=torch.int64),
        rule="topk_margin",
        forbidden=torch.tensor([1]),
        vocab_limit=4,
    )
    assert choice.token.tolist() == [2]
    assert choice.confidence.tolist() == [0.0]


def test_no_rows() -> None:
    assert many_draws(0).run("torch").token.shape == (0,)


def test_bad_arguments_are_refused() -> None:
    case = many_draws(2)
    with pytest.raises(ValueError, match="vocab_limit 7 outside"):
        replace(case, vocab_limit=7).run("torch")
    with pytest.raises(ValueError, match="leave none"):
        replace(case, forbidden=[0, 1, 2, 3, 4, 5]).run("torch")
    with pytest.raises(ValueError, match="temperature has shape"):
        replace(case, temperature=[1.0]).run("torch")
    with pytest.raises(ValueError, match="valid rules: low_confidence"):
        rule_codes(["best"])
