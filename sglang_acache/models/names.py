"""Short model names, and a quick clear answer when a model cannot be had."""

from __future__ import annotations

import os
from pathlib import Path

TINY_MODEL = Path(__file__).parents[1] / "tiny" / "llada-tiny"

HUB_IDS = {
    "llada": "GSAI-ML/LLaDA-8B-Instruct",
    "llada-base": "GSAI-ML/LLaDA-8B-Base",
    "llada-1.5": "GSAI-ML/LLaDA-1.5",
    "dream": "Dream-org/Dream-v0-Instruct-7B",
    "dream-base": "Dream-org/Dream-v0-Base-7B",
}
SHORT_NAMES = (*HUB_IDS, "llada-tiny")

_CONNECT_TIMEOUT_S = 3.0


class ModelNotAvailable(ValueError):
    """The model is neither on this machine nor within reach; the message says what to do."""


def is_short_name(name: str) -> bool:
    """Whether ``name`` is one of ``SHORT_NAMES``, and no folder of that name is in the way."""
    return name in SHORT_NAMES and not Path(name).exists()


def resolve_model(name: str) -> str:
    """The local path or hub id that ``name`` stands for; what is no short name is returned unchanged."""
    if not is_short_name(name):
        return name
    return HUB_IDS.get(name) or str(TINY_MODEL)


def ensure_available(model: str, revision: str | None = None) -> str:
    """Return ``model`` (a path or a hub id, as ``resolve_model`` gives) if it can be loaded; no download.

    Costs one small request at most, with a short timeout; none where the model is on disk or
    ``HF_HUB_OFFLINE`` is set.

    Raises:
        ModelNotAvailable: the folder has no config.json, or the id is neither in the cache nor reachable.
    """
    if Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            raise ModelNotAvailable(f"--model {model}: the folder has no config.json")
        return model
    if model == str(TINY_MODEL):
        raise ModelNotAvailable(
            f"--model llada-tiny: {TINY_MODEL} is missing; reinstall sglang-acache or train it again "
            "with python -m sglang_acache.tiny.train"
        )
    if not _is_hub_id(model):
        raise ModelNotAvailable(
            f"--model {model}: no such folder, and neither a hub id (owner/name) nor a short name "
            f"({', '.join(SHORT_NAMES)})"
        )
    if _in_cache(model, revision):
        return model
    problem = _hub_problem(model, revision)
    if problem is not None:
        raise ModelNotAvailable(
            f"--model {model}: not in the local cache and the hub cannot give it ({problem}). Where the hub "
            f"can be reached, run `huggingface-cli download {model}` (or `hf download {model}`), copy the "
            "folder here and point to it with --model /path/to/folder"
        )
    return model


def _is_hub_id(model: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return model.count("/") == 1


def _in_cache(model: str, revision: str | None) -> bool:
    """Whether the hub's cache holds the model's config and at least one file of its weights."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    return isinstance(config, str) and any(Path(config).parent.glob("*.safetensors"))


def _hub_problem(model: str, revision: str | None) -> str | None:
    """Why the hub cannot give the model's config, in a few words; None when it can."""
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    try:
        get_hf_file_metadata(_hub_url(model, revision), timeout=_CONNECT_TIMEOUT_S)
    except GatedRepoError:
        return "the repository is gated: log in first"
    except RevisionNotFoundError:
        return f"no revision {revision!r}"
    except RepositoryNotFoundError:
        return "no such repository, or it is private"
    except Exception as error:  # every transport has errors of its own
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _hub_url(model: str, revision: str | None) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(model, "config.json", revision=revision)
