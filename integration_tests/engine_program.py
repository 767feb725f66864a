"""``sglang.Engine`` on ``llada-tiny``, as a user's own program: prints what it got as JSON."""

from __future__ import annotations

import json
from typing import Any

import sglang

from sglang_acache.tiny import task

REQUESTS = 8
ANSWER: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "custom_params": {"block_length": 4}}


def ask(engine: Any, item: task.Item) -> str:
    custom = {**ANSWER["custom_params"], **({"suffix": item.right} if item.right else {})}
    return str(engine.generate(item.left, {**ANSWER, "custom_params": custom})["text"])


def main() -> None:
    engine = sglang.Engine(model_path="llada-tiny", max_total_tokens=8192, diffusion_max_new_tokens=24)
    items = [item for layout in task.LAYOUTS for item in task.held_out(0, REQUESTS, layout)]
    lefts = [item.left for item in items[:REQUESTS]]
    batch = engine.generate(lefts, ANSWER)
    stream = [chunk["text"] for chunk in engine.generate(lefts[0], ANSWER, stream=True)]
    refusal = ""
    try:
        engine.generate(lefts[0], {**ANSWER, "regex": "a"})
    except ValueError as error:
        refusal = str(error)
    default = engine.generate(lefts[0], {"ignore_eos": True})["meta_info"]["completion_tokens"]
    answers = [ask(engine, item) for item in items]
    engine.shutdown()
    result = {
        "batch": [one["text"] for one in batch],
        "stream": stream,
        "refusal": refusal,
        "default": default,
        "answers": answers,
        "right": [item.answer for item in items],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
