"""The task files say what the paper's settings are; lm-eval's part of it where lm-eval is installed."""

import json

import pytest

from sglang_acache.evals.__main__ import main
from sglang_acache.evals.prompts import FORMATS, POSITIONS
from sglang_acache.evals.sweep import RATIOS, TASK_FOLDER, TASKS, client_arguments, reuse

yaml = pytest.importorskip("yaml")

SHARED_KEYS = {
    "class",
    "output_type",
    "test_split",
    "num_fewshot",
    "generation_kwargs",
    "process_results",
    "metric_list",
}


class Loader(yaml.SafeLoader):
    pass


Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def read(name):
    fields = yaml.load((TASK_FOLDER / name).read_text(), Loader)
    included = fields.pop("include", None)
    return {**read(included), **fields} if included else fields


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("position", POSITIONS)
def test_every_task_has_a_file_for_every_position(task, position):
    fields = read(f"acache_{task}_{position}.yaml")
    metadata = fields["metadata"]
    assert fields.keys() >= SHARED_KEYS
    assert fields["task"] == f"acache_{task}_{position}"
    assert metadata["position"] == position
    assert metadata["format"] in FORMATS
    assert metadata["decoding"]["threshold"] == 0.9
    if task == "tiny":
        assert (fields["generation_kwargs"]["max_gen_toks"], metadata["decoding"]["block_length"]) == (12, 4)
    else:
        assert (fields["generation_kwargs"]["max_gen_toks"], metadata["decoding"]["block_length"]) == (256, 32)
    assert bool(fields.get("unsafe_code")) == (task == "mbpp")


def test_no_file_is_left_over():
    assert len(list(TASK_FOLDER.glob("*.yaml"))) == len(TASKS) * len(POSITIONS)


def test_the_sweep_is_the_papers():
    assert RATIOS == (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)
    assert reuse(0.2, None) == {"anchor_ratio": 0.2}
    assert reuse(0.0, "first") == {"anchor_ratio": 0.0, "selector": "first"}
    assert client_arguments("http://h/v1/completions", "m", 8)["num_concurrent"] == 8


def test_commands(tmp_path, capsys):
    assert main(["tasks-path"]) == 0
    assert main(["tiny-data", "--out", str(tmp_path / "a.jsonl"), "--count", "3"]) == 0
    assert str(TASK_FOLDER) in capsys.readouterr().out
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [sorted(json.loads(line)) for line in lines] == [["answer", "facts", "question", "updates"]] * 3


# with lm-eval


@pytest.fixture
def load():
    tasks = pytest.importorskip("lm_eval.tasks")
    manager = tasks.TaskManager(include_path=TASK_FOLDER, include_defaults=False)

    def loader(position):
        name = f"acache_tiny_{position}"
        return manager.load([name])["tasks"][name]

    return loader


@pytest.mark.parametrize("position", POSITIONS)
def test_lm_eval_builds_the_requests(load, position):
    task = load(position)
    task.set_config("generation_kwargs", {"custom_params": {"acache": {"anchor_ratio": 0.2}}}, update=True)
    task.build_all_requests(limit=9)
    doc, first, other = task.test_docs()[0], task.instances[0], task.instances[8]
    text, sampling = first.arguments
    assert text == task.render(doc).left
    assert (task.shared_text(doc) in text) == (position != "suffix")
    custom = sampling["custom_params"]
    assert custom["acache"] == {"anchor_ratio": 0.2}
    assert (custom["block_length"], custom["threshold"]) == (4, 0.9)
    assert custom.get("suffix", "") == (doc["facts"] if position == "suffix" else "")
    # other facts: lm-eval must not send the first one's arguments for both
    assert (sampling["user"] == other.arguments[1]["user"]) == (position != "suffix")


def test_lm_eval_sends_chat_as_one_user_turn(load):
    task = load("prefix")
    doc = task.test_docs()[0]

    def template(messages, add_generation_prompt):
        assert add_generation_prompt
        return messages

    sent = task.fewshot_context(
        doc, 0, apply_chat_template=True, chat_template=template, system_instruction="Be brief."
    )
    assert sent == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task.render(doc).left}]


PLACES = ("attic", "barn", "cellar", "porch", "garden", "mill")
STAND_INS = {
    "gsm8k": (
        ("openai/gsm8k", "train", "test"),
        [{"question": f"Ann has {i} pens. She buys 1. How many?", "answer": f"#### {i + 1}"} for i in range(6)],
    ),
    "mbpp": (
        ("google-research-datasets/mbpp", "prompt", "test"),
        [{"task_id": i, "text": f"Add {i}.", "code": f"c = {i}", "test_list": [f"assert c == {i}"]} for i in range(6)],
    ),
    "babilong_qa1": (
        ("RMT-team/babilong", "qa1", "qa1"),
        [{"input": f"Ann went to the {p}. ", "question": "Where is Ann? ", "target": p} for p in PLACES],
    ),
}


@pytest.mark.parametrize("task", STAND_INS)
@pytest.mark.parametrize("position", POSITIONS)
def test_lm_eval_builds_the_published_tasks(task, position, monkeypatch):
    """The task files over a few documents with the splits and columns that the data sets are published with."""
    tasks, datasets = pytest.importorskip("lm_eval.tasks"), pytest.importorskip("datasets")
    (published, *splits), docs = STAND_INS[task]
    asked_for = []

    def stand_in(path, name, **_):
        asked_for.append(path)
        return datasets.DatasetDict({split: datasets.Dataset.from_list(docs) for split in splits})

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    name = f"acache_{task}_{position}"
    made = tasks.TaskManager(include_path=TASK_FOLDER, include_defaults=False).load([name])["tasks"][name]
    made.build_all_requests(limit=4)
    sampling = [instance.arguments[1] for instance in made.instances]
    shared = {made.shared_text(doc) for doc in docs}
    assert asked_for == [published]
    assert len(shared) == 1  # the same examples for every document
    assert len({instance.arguments[0] for instance in made.instances}) == 4
    suffix = f"\n\n{shared.pop()}" if position == "suffix" else None
    assert [fields["custom_params"].get("suffix") for fields in sampling] == [suffix] * 4
    assert [fields["max_gen_toks"] for fields in sampling] == [256] * 4
    assert all(all(made.process_results(doc, [made.doc_to_target(doc)]).values()) for doc in docs)
    assert not any(made.process_results(docs[0], [made.doc_to_target(docs[1])]).values())
