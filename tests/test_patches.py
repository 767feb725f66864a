"""The patches for SGLang apply to the pinned version and mend what they say."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import sglang

PATCHES = sorted((Path(__file__).parents[1] / "patches").glob("*.patch"))
INSTALLED = Path(sglang.__file__).parent


def patched(patch: Path, folder: Path) -> list[Path]:
    """The files that ``patch`` changes, copied from the installed SGLang into ``folder`` and patched."""
    names = re.findall(r"^\+\+\+ b/python/sglang/(.+)$", patch.read_text(), re.MULTILINE)
    copies = [folder / "python" / "sglang" / name for name in names]
    for name, copy in zip(names, copies, strict=True):
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED / name, copy)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)  # or git looks for a repository further up
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
    return copies


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_applies(patch: Path, tmp_path: Path) -> None:
    for copy in patched(patch, tmp_path):
        compile(copy.read_text(), str(copy), "exec")


class TestAbortOfARefusedRequest:
    @staticmethod
    def abort_task(source: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        """Run the abort task of a request that was never normalised; returns what it aborted."""
        spec = importlib.util.spec_from_file_location("a_tokenizer_manager", source)
        assert spec is not None
        assert spec.loader is not None
        module: ModuleType = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look themselves up
        spec.loader.exec_module(module)
        monkeypatch.setattr(module.asyncio, "sleep", lambda seconds: _nothing())
        manager = SimpleNamespace(rid_to_state={}, aborted=[])
        manager.abort_request = manager.aborted.append
        task = module.TokenizerManager.create_abort_task(manager, SimpleNamespace(rid="refused"))
        asyncio.run(task())
        return manager

    def test_fails_in_the_wheel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """When this test fails the patch is no longer needed."""
        with pytest.raises(AttributeError, match="is_single"):
            self.abort_task(INSTALLED / "srt/managers/tokenizer_manager.py", monkeypatch)

    def test_does_nothing_when_patched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (copy,) = patched(PATCHES[0], tmp_path)
        assert self.abort_task(copy, monkeypatch).aborted == []


async def _nothing() -> None:
    return None
