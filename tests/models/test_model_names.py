import subprocess
import sys
import time

import pytest

from sglang_acache.models.names import (
    SHORT_NAMES,
    TINY_MODEL,
    ModelNotAvailable,
    ensure_available,
    is_short_name,
    resolve_model,
)


def test_short_names():
    assert resolve_model("llada") == "GSAI-ML/LLaDA-8B-Instruct"
    assert resolve_model("llada-base") == "GSAI-ML/LLaDA-8B-Base"
    assert resolve_model("llada-1.5") == "GSAI-ML/LLaDA-1.5"
    assert resolve_model("dream") == "Dream-org/Dream-v0-Instruct-7B"
    assert resolve_model("dream-base") == "Dream-org/Dream-v0-Base-7B"
    assert resolve_model("llada-tiny") == str(TINY_MODEL)
    assert all(is_short_name(name) for name in SHORT_NAMES)


@pytest.mark.parametrize("name", ["apple/DiffuCoder-7B-Base", "./somewhere", "LLADA", ""])
def test_other_names_stay(name):
    assert resolve_model(name) == name
    assert not is_short_name(name)


def test_a_folder_of_a_short_name_wins(tmp_path, monkeypatch):
    (tmp_path / "llada").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("llada") == "llada"


def test_a_folder_is_available_when_it_has_a_config(tmp_path):
    with pytest.raises(ModelNotAvailable, match=r"no config\.json"):
        ensure_available(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert ensure_available(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("model", ["/no/such/folder", "nonsense", "a/b/c"])
def test_neither_folder_nor_id(model):
    with pytest.raises(ModelNotAvailable, match=r"no such folder.*llada-tiny"):
        ensure_available(model)


def test_offline_says_what_to_do_and_quickly(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    begin = time.monotonic()
    with pytest.raises(ModelNotAvailable) as error:
        ensure_available("Dream-org/Dream-v0-Instruct-7B-not-there")
    assert time.monotonic() - begin < 5
    message = str(error.value)
    assert "huggingface-cli download Dream-org/Dream-v0-Instruct-7B-not-there" in message
    assert "--model /path" in message
    assert "HF_HUB_OFFLINE" in message


def test_an_unreachable_hub_says_what_to_do_and_quickly(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("sglang_acache.models.names._hub_url", lambda *_: "http://127.0.0.1:9/config.json")
    begin = time.monotonic()
    with pytest.raises(ModelNotAvailable, match="huggingface-cli download no-one/nothing"):
        ensure_available("no-one/nothing")
    assert time.monotonic() - begin < 10


def test_names_and_defaults_are_light_to_import():
    """The launcher reads them before anything heavy is loaded."""
    code = "import sys, sglang_acache.models.names, sglang_acache.models.defaults; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
