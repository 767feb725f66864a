"""Launch flags of diffusion LLMs: how they become defaults, and how a wrong one is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_acache.core.params import DiffusionParams, ParamError
from sglang_acache.models.defaults import MODEL_DEFAULTS
from sglang_acache.srt.flags import AcacheServerArgs
from sglang_acache.srt.launch import LaunchError, _check_own_flags, is_ours, launch_params
from sglang_acache.srt.limits import default_params, vocabulary_limit


def flags(**values: Any) -> SimpleNamespace:
    """Our flags as a launch without any of them has them, but for ``values``."""
    unset = {one.name: one.default for one in msgspec.structs.fields(AcacheServerArgs)}
    return SimpleNamespace(**{name: unset[name] for name in AcacheServerArgs.__annotations__} | values)


def test_unset_flags_leave_the_models_defaults() -> None:
    for row in MODEL_DEFAULTS.values():
        defaults = default_params(row)
        assert launch_params(flags(), defaults) == defaults
        assert (defaults.block_length, defaults.threshold, defaults.cache) == (32, 0.9, "dual")


def test_a_flag_is_a_default_of_requests() -> None:
    params = launch_params(flags(diffusion_steps=8, diffusion_cache="none"), DiffusionParams())
    assert params == DiffusionParams(steps=8, threshold=None, cache="none")


@pytest.mark.parametrize(("name", "value"), [("block_length", 0), ("threshold", 2.0), ("cache", "both"), ("steps", -1)])
def test_a_wrong_value_names_the_flag(name: str, value: Any) -> None:
    with pytest.raises(ParamError, match=f"^diffusion_{name}: "):
        launch_params(flags(**{f"diffusion_{name}": value}), DiffusionParams())


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"diffusion_block_length": 0}, "--diffusion-block-length: "),
        ({"diffusion_steps": 4, "diffusion_factor": 1.0}, "--diffusion-factor: "),
        ({"diffusion_max_new_tokens": 0}, "--diffusion-max-new-tokens: "),
    ],
    ids=str,
)
def test_a_launch_error_is_spelt_as_on_the_command_line(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(LaunchError, match=f"^{flag}"):
        _check_own_flags(flags(**values))


def test_what_is_ours() -> None:
    assert all(is_ours([name]) for name in MODEL_DEFAULTS)
    assert not any(is_ours(names) for names in (None, [], ["LlamaForCausalLM"]))


def test_rows_past_the_tokenizer_are_never_generated() -> None:
    config = SimpleNamespace(vocab_size=256)
    assert vocabulary_limit(None, config) == 256
    assert vocabulary_limit(range(160), config) == 160
    assert vocabulary_limit(range(300), config) == 256
