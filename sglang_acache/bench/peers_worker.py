"""Runs one peer's own code in a process of its own: started as a script, by the interpreter that has what it needs.

One JSON object a line on standard input, one on standard output for each:

    {"do": "load", "peer": "plain", "repo": null, "model": "folder", "threads": 1}    ->  {"versions": {...}}
    {"do": "run", "prompts": [[ids], ...], "batch": 16, "new_tokens": 64, "block_length": 32, "steps": 16, ...}
                                                                         ->  {"seconds": 1.2, "answers": [[ids], ...]}

What goes wrong is answered as ``{"error": "..."}``. Imports nothing of this package, so that any interpreter will do.
The peers' repositories are the user's checkouts: their code is imported from there as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[Any, dict[str, Any]], Any]
"""Prompts ``[B, T]`` of one length and the run's parameters -> answers ``[B, new_tokens]``."""


def main() -> None:
    answers_to, sys.stdout = sys.stdout, sys.stderr  # the peers print
    generate: Generate | None = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "load":
                generate, reply = load(order)
            else:
                assert generate is not None
                reply = run(generate, order)
        except Exception as error:  # whatever a peer's code raises is its report
            reply = {"error": f"{type(error).__name__}: {error}"[:600]}
        print(json.dumps(reply), file=answers_to, flush=True)


def load(order: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    import torch
    import transformers

    torch.set_num_threads(order["threads"])
    folder = Path(order["model"])
    generate = LOADERS[order["peer"]](folder, Path(order["repo"] or "."))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return generate, {"versions": versions}


def run(generate: Generate, order: dict[str, Any]) -> dict[str, Any]:
    """All prompts, ``batch`` at a time; prompts of one batch are padded by the peer, if it can."""
    import torch

    prompts, batch = order["prompts"], order["batch"]
    answers: list[list[int]] = []
    began = time.perf_counter()
    with torch.no_grad():
        for start in range(0, len(prompts), batch):
            answers += generate(prompts[start : start + batch], order).tolist()
    return {"seconds": time.perf_counter() - began, "answers": answers}


def load_plain(folder: Path, repo: Path) -> Generate:
    here = Path(__file__).with_name("peers_plain.py")
    plain = _module("peers_plain", here)
    generate: Generate = plain.load(folder)
    return generate


def load_fast_dllm(variant: str) -> Callable[[Path, Path], Generate]:
    """``generate.py`` of the LLaDA part of Fast-dLLM's repository; it takes one prompt at a time."""

    def loader(folder: Path, repo: Path) -> Generate:
        import torch

        sys.path.insert(0, str(repo / "llada"))
        _stay_offline()
        published = importlib.import_module("generate")
        model = published.LLaDAModelLM.from_pretrained(str(folder), torch_dtype=torch.float32).eval()
        function = getattr(published, variant)

        def generate(prompts: list[list[int]], order: dict[str, Any]) -> Any:
            rows = []
            for prompt in prompts:
                ids = torch.tensor([prompt])
                out, _ = function(
                    model,
                    ids,
                    steps=order["steps"],
                    gen_length=order["new_tokens"],
                    block_length=order["block_length"],
                    mask_id=order["mask_id"],
                )
                rows.append(out[:, len(prompt) :])
            return torch.cat(rows)

        return generate

    return loader


def load_dllm_cache(folder: Path, repo: Path) -> Generate:
    """dLLM-Cache's hooks and loop on the LLaDA that its own repository carries (for MMaDA)."""
    import torch

    sys.path.insert(0, str(repo))
    _stay_offline()
    cache = importlib.import_module("dllm_cache.cache")
    hooks = _module("dllm_hooks", repo / "dllm_cache" / "hooks" / "cache_hook_LLaDA.py")
    loop = _module("dllm_loop", repo / "utils" / "generate_function.py")
    models = _package("llada_code", repo / "mmada_models", "modeling_llada")
    model = models.LLaDAModelLM.from_pretrained(str(folder), torch_dtype=torch.float32).eval()
    hooks.register_cache_LLaDA(model, "model.transformer.blocks")
    for block in model.model.transformer.blocks:
        block.forward = _without(block.forward, "block_mask")

    def generate(prompts: list[list[int]], order: dict[str, Any]) -> Any:
        options = order["dllm_cache"]
        cache.dLLMCache.new_instance(**options)
        ids = torch.tensor(prompts)
        return loop.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            model=model,
            steps=order["steps"],
            gen_length=order["new_tokens"],
            block_length=order["block_length"],
            mask_id=order["mask_id"],
        )

    return generate


def _without(function: Callable[..., Any], unused: str) -> Callable[..., Any]:
    """The hooks are written for LLaDA's own model file; the repository's copy passes one argument more, None."""

    def call(*values: Any, **named: Any) -> Any:
        assert named.pop(unused, None) is None
        return function(*values, **named)

    return call


def _stay_offline() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _package(name: str, folder: Path, part: str) -> Any:
    """Module ``part`` of ``folder``, with its relative imports, without running the packages above it."""
    import types

    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    return importlib.import_module(f"{name}.{part}")


LOADERS: dict[str, Callable[[Path, Path], Generate]] = {
    "plain": load_plain,
    "fast-dllm none": load_fast_dllm("generate"),
    "fast-dllm prefix": load_fast_dllm("generate_with_prefix_cache"),
    "fast-dllm dual": load_fast_dllm("generate_with_dual_cache"),
    "dllm-cache": load_dllm_cache,
}

if __name__ == "__main__":
    main()
