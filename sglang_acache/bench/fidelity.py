"""What reuse does to answers: accuracy, and agreement with full recompute, by ratio, selector and position.

Every question is asked under every policy, on one server; the policies of a question are paired, so differences are
judged question by question. ``direct reuse`` is ratio 0, what a cache without anchors would answer.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sglang_acache.bench.client import Answer, Client, Payload, closed_loop
from sglang_acache.bench.fidelity_tasks import Question, read_task_file, tiny_questions
from sglang_acache.bench.options import add_common, model_folder, names, numbers
from sglang_acache.bench.report import Plot, Report, Series, Table
from sglang_acache.bench.server import serve
from sglang_acache.bench.stats import Estimate, bootstrap, mean_difference, wilson

SELECTORS = ["attention_affix", "random", "first", "bottom", "kv_deviation", "drop_non_anchors"]
MAIN = "attention"


@dataclass(frozen=True)
class Policy:
    """``ratio`` None is full recompute: reuse switched off."""

    selector: str = MAIN
    ratio: float | None = None
    probe: str = "request"

    @property
    def label(self) -> str:
        if self.ratio is None:
            return "full recompute"
        if self.ratio == 0:
            return "direct reuse"
        return f"{self.selector} {self.ratio:g}" + ("" if self.probe == "request" else f", {self.probe} probe")

    @property
    def fields(self) -> dict[str, Any]:
        if self.ratio is None:
            return {"enabled": False}
        return {"anchor_ratio": self.ratio, "selector": self.selector, "probe": self.probe}


FULL, DIRECT = Policy(), Policy(ratio=0.0)


@dataclass
class Score:
    """Of one policy over one group, question by question."""

    whole: list[float]
    parts: list[float]
    agreement: list[float]  # share of the answer's tokens that are those of full recompute


Scores = dict[str, dict[Policy, Score]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, model="llada-tiny")
    parser.add_argument("--task-file", type=Path, help="JSONL of questions (default: the tiny model's own)")
    parser.add_argument("--tasks", type=names, default=["hop", "kv"], help="the tiny model's tasks (default: hop,kv)")
    parser.add_argument("--questions", type=int, default=240, help="a position and task (default: %(default)s)")
    parser.add_argument("--ratios", type=numbers, default=[0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0])
    parser.add_argument("--selectors", type=names, default=SELECTORS, help=f"compared with {MAIN} (default: all)")
    parser.add_argument("--selector-ratios", type=numbers, default=[0.1, 0.2, 0.3])
    parser.add_argument(
        "--probes",
        type=names,
        default=["fused"],
        help="other probes, at the same ratios (default: fused; remembered means something with --readers over 1)",
    )
    parser.add_argument("--readers", type=int, default=1, help="the tiny model's questions over the same facts")
    parser.add_argument("--block-length", type=int, help="default: 4 for llada-tiny, else the model's")
    parser.add_argument("--threshold", type=float, help="default: one token a step for llada-tiny, else the model's")
    parser.add_argument("--new-tokens", type=int, default=256, help="where the task file says nothing")
    parser.add_argument("--clients", type=int, default=16)


def run(options: argparse.Namespace) -> int:
    if options.quick:
        options.questions, options.tasks, options.ratios = 4, ["hop"], [0.0, 0.2, 1.0]
        options.selectors, options.selector_ratios, options.probes = ["first"], [0.2], ["fused"]
    report = Report("fidelity", options.out, vars(options))
    policies = [FULL, *(Policy(ratio=ratio) for ratio in options.ratios)]
    policies += [Policy(selector, ratio) for ratio in options.selector_ratios for selector in options.selectors]
    policies += [Policy(MAIN, ratio, probe) for ratio in options.selector_ratios for probe in options.probes]
    with model_folder(options) as model:
        questions = _questions(options, model)
        flags = ["--enable-acache", "--acache-min-affix-tokens", "1", "--no-acache-discover", *options.server_flags]
        with serve(model, flags, base_url=options.base_url, threads=options.threads) as target:
            answers = asyncio.run(_ask(target.url, questions, policies, options))
    for policy, found in answers.items():
        failed = [answer for answer in found if not answer.ok]
        if failed:
            report.fail(f"{policy.label}: {len(failed)} requests failed, first: {failed[0].status} {failed[0].error}")
    scores = _score(questions, answers)
    _describe(report, scores, policies)
    return report.write()


def _questions(options: argparse.Namespace, model: str) -> list[Question]:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    tokenizer = get_tokenizer(model)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    if options.task_file is not None:
        return read_task_file(options.task_file, encode, options.new_tokens)
    return tiny_questions(options.questions, options.tasks, encode, options.seed, options.readers)


async def _ask(
    url: str, questions: list[Question], policies: list[Policy], options: argparse.Namespace
) -> dict[Policy, list[Answer]]:
    """All policies of a slice of the questions before the next slice, so that a drift of the machine meets all."""
    answers: dict[Policy, list[Answer]] = {policy: [] for policy in policies}
    async with Client(url) as client:
        with tqdm(total=len(questions) * len(policies), desc="fidelity", unit="request") as progress:
            for start in range(0, len(questions), 8 * options.clients):
                part = questions[start : start + 8 * options.clients]
                for policy in policies:
                    payloads = [_payload(question, policy, options) for question in part]
                    done = await closed_loop(client, payloads, options.clients, progress.update)
                    answers[policy] += done.answers
    return answers


def _payload(question: Question, policy: Policy, options: argparse.Namespace) -> Payload:
    custom: dict[str, Any] = {"acache": {"spans": question.spans, **policy.fields}}
    tiny = options.task_file is None
    length = options.block_length or (4 if tiny else None)
    if length is not None:
        custom["block_length"] = length
    if options.threshold is not None:
        custom["threshold"] = options.threshold
    elif tiny:
        custom["steps"] = question.new_tokens
    if question.right:
        custom["suffix_ids"] = question.right
    sampling = {"max_new_tokens": question.new_tokens, "temperature": 0.0, "custom_params": custom}
    return {"input_ids": question.left, "sampling_params": sampling}


def _score(questions: list[Question], answers: dict[Policy, list[Answer]]) -> Scores:
    groups: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        groups.setdefault(question.group, []).append(index)
    groups["all"] = list(range(len(questions)))
    return {
        group: {policy: _score_group(questions, found, answers[FULL], members) for policy, found in answers.items()}
        for group, members in groups.items()
    }


def _score_group(questions: list[Question], found: list[Answer], full: list[Answer], members: list[int]) -> Score:
    return Score(
        whole=[float(questions[i].whole(found[i].text)) for i in members],
        parts=[questions[i].part_shares(found[i].text) for i in members],
        agreement=[agreement(found[i].token_ids, full[i].token_ids) for i in members],
    )


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """Share of positions with the same token; a missing token disagrees."""
    length = max(len(tokens), len(reference))
    same = sum(a == b for a, b in zip(tokens, reference, strict=False))
    return same / length if length else 1.0


def recovery(full: Score, direct: Score, score: Score) -> Estimate:
    """Part of what direct reuse loses in question accuracy that a policy wins back; 1 = all of it. NaN where direct
    reuse loses nothing."""
    if np.mean(full.parts) <= np.mean(direct.parts):
        return Estimate(math.nan, math.nan, math.nan, len(full.parts))
    rows = np.stack([np.asarray(full.parts), np.asarray(direct.parts), np.asarray(score.parts)], axis=-1)

    def statistic(sample: np.ndarray, axis: int) -> np.ndarray:
        best, worst, mine = np.moveaxis(sample.mean(axis=axis), -1, 0)
        lost = np.maximum(best - worst, 1e-9)
        return (mine - worst) / lost

    return _bootstrap_rows(rows, statistic)


def _bootstrap_rows(rows: np.ndarray, statistic: Any) -> Estimate:
    draws = np.random.default_rng(0).integers(0, len(rows), (1000, len(rows)))
    spread = statistic(rows[draws], axis=1)
    low, high = np.quantile(spread, [0.025, 0.975])
    return Estimate(float(statistic(rows, axis=0)), float(low), float(high), len(rows))


def _describe(report: Report, scores: Scores, policies: list[Policy]) -> None:
    for group, found in scores.items():
        report.add(_table(group, found))
    report.data["scores"] = {
        group: {policy.label: asdict(score) for policy, score in found.items()} for group, found in scores.items()
    }
    main = [policy for policy in policies if policy == Policy(MAIN, policy.ratio)]
    ratios = sorted((policy for policy in main if policy.ratio is not None), key=lambda policy: policy.ratio or 0.0)
    lines, agreements = [], []
    for group, found in scores.items():
        spread = [bootstrap(found[policy].parts, np.mean) for policy in ratios]
        x = [float(policy.ratio or 0) for policy in ratios]
        lines.append(Series.of(group, x, spread, scale=100))
        agreements.append(Series(group, x, [100 * float(np.mean(found[policy].agreement)) for policy in ratios]))
    report.plots += [
        Plot("accuracy", f"Accuracy, selector {MAIN}", "anchor ratio", "questions right, %", lines),
        Plot("agreement", f"Agreement with full recompute, selector {MAIN}", "anchor ratio", "tokens, %", agreements),
    ]


def _table(group: str, found: dict[Policy, Score]) -> Table:
    table = Table(
        f"{group}, {len(found[FULL].whole)} requests",
        [
            "policy",
            "whole answers right %",
            "questions right %",
            "tokens as full recompute %",
            "recovered of the loss %",
            "questions, minus attention at the same ratio",
        ],
        note="Whole answers: Wilson intervals. The rest: bootstrap over requests. Recovered: (policy - direct reuse) / "
        "(full recompute - direct reuse), of questions right. The last column pairs question by question.",
    )
    for policy, score in found.items():
        main = found.get(Policy(MAIN, policy.ratio))
        compared = ""
        if main is not None and policy != main:
            compared = mean_difference(score.parts, main.parts).text(1, 100)
        regained = "" if DIRECT not in found else recovery(found[FULL], found[DIRECT], score).text(0, 100)
        whole = wilson(int(sum(score.whole)), len(score.whole)).text(1, 100)
        parts, same = (bootstrap(found, np.mean).text(1, 100) for found in (score.parts, score.agreement))
        table.rows.append([policy.label, whole, parts, same, regained, compared])
    return table
