"""Affix importance in torch."""

import pytest
import torch
from acache_kernels import ImportanceTargets, accumulate_importance
from acache_kernels.importance import MODES
from acache_kernels.torch_ops import importance as torch_importance
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import ImportanceCase, attention_case, check_importance, importance_case
from kernel_strategies import importance_cases


@settings(max_examples=40)
@given(importance_cases(largest=40), st.sampled_from(MODES))
def test_equals_the_float64_reference(case: ImportanceCase, mode: str) -> None:
    check_importance(case, mode, "torch")


def test_blocks_of_queries_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_importance, "BLOCK_SCORES", 100)
    check_importance(importance_case([(17, 9), (3, 40)], (4, 2, 32), torch.float32, 0), "attention", "torch")


def test_the_weights_over_a_whole_canvas_sum_to_one_per_query_and_head() -> None:
    case = attention_case([(6, 50)], (4, 2, 32))
    _, lse = case.run("torch")
    slots = case.layout.kv_indices
    targets = ImportanceTargets.build(torch.arange(6), [6], slots, [50])
    scores = torch.zeros(50)
    accumulate_importance(scores, case.q, case.k_pool, lse, targets, scale=case.scale)
    assert float(scores.sum()) == pytest.approx(6 * 4, rel=1e-5)


def test_bad_arguments_are_refused() -> None:
    case = importance_case([(2, 3)], (2, 1, 32), torch.float32, 0)
    arguments = (case.q, case.k_pool, case.lse, case.targets)
    with pytest.raises(ValueError, match="valid modes: attention, attention_affix"):
        accumulate_importance(torch.zeros(3), *arguments, scale=1.0, mode="mean")
    with pytest.raises(ValueError, match="scores must be float32"):
        accumulate_importance(torch.zeros(4), *arguments, scale=1.0)
    with pytest.raises(ValueError, match="needs lse"):
        accumulate_importance(torch.zeros(3), case.q, case.k_pool, None, case.targets, scale=1.0)
    with pytest.raises(ValueError, match="valid names: torch, triton"):
        accumulate_importance(torch.zeros(3), *arguments, scale=1.0, impl="cuda")
