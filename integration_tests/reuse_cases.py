"""Requests that reuse spans, and what the plain reference answers to them and counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import requests

from integration_tests.oracle.cached_transformer import CachedTransformer
from integration_tests.oracle.checkpoints import DREAM, CheckpointSpec
from integration_tests.oracle.reference_acache import ACacheForward, Affix
from integration_tests.oracle.reference_loop import Decoding, Result, generate, predictor_for
from integration_tests.oracle.transformers_oracle import TransformersOracle
from integration_tests.prompts import prompt_ids
from integration_tests.server import REQUEST_TIMEOUT_S, Server
from integration_tests.test_exactness import DEFAULT_RULE, END_TOKENS

CLEAR = 1e-5
"""Least margin, relative to the largest score, by which anchors must be chosen for a case to be a test: float32 sums
differ by a tenth of it. Seeds are chosen so."""

PLAIN_ACCOUNT = {
    "affix_tokens": 0,
    "anchor_tokens": 0,
    "recompute_tokens": 0,
    "recompute_tokens_saved": 0,
    "probe_ms": 0.0,
    "spans": [],
}
"""``meta_info.acache`` of a request that read no shared span, besides its forward passes."""


@dataclass(frozen=True)
class Case:
    """One request: prompt, hole and suffix; the spans it reads, as offsets in prompt + suffix; its parameters.

    ``named``: the request names its spans; otherwise the server has to find them. ``ignore_eos``: the answer has
    all its tokens (the reference knows no such thing).
    """

    left: Sequence[int]
    right: Sequence[int] = ()
    spans: tuple[Affix, ...] = ()
    new_tokens: int = 24
    params: dict[str, Any] = field(default_factory=dict)
    acache: dict[str, Any] = field(default_factory=dict)
    named: bool = True
    ignore_eos: bool = False

    @property
    def decoding(self) -> dict[str, Any]:
        schedule = {} if self.params.keys() & {"steps", "factor"} else {"threshold": 0.6}
        return {"block_length": 8, **schedule, **self.params}

    @property
    def hole(self) -> int:
        length = self.decoding["block_length"]
        return -(-self.new_tokens // length) * int(length)

    @property
    def canvas_tokens(self) -> int:
        return len(self.left) + self.hole + len(self.right)

    @property
    def affixes(self) -> list[Affix]:
        """The spans in the canvas: those after the hole moved by its length."""

        def moved(span: Affix) -> Affix:
            by = 0 if span.start < len(self.left) else self.hole
            root = None if span.root is None else span.root + by
            return Affix(span.start + by, span.stop + by, tuple(cut + by for cut in span.cuts), root)

        return [moved(span) for span in self.spans]

    def body(self, **fields: Any) -> dict[str, Any]:
        """Of ``/generate``."""
        spans = {"spans": [[span.start, span.stop] for span in self.spans]} if self.named and self.spans else {}
        custom = {**self.decoding, "acache": {**spans, **self.acache}}
        if self.right:
            custom["suffix_ids"] = list(self.right)
        sampling = {
            "max_new_tokens": self.new_tokens,
            "temperature": 0,
            "no_stop_trim": True,
            "ignore_eos": self.ignore_eos,
            "custom_params": custom,
        }
        return {"input_ids": list(self.left), "sampling_params": sampling, **fields}


@dataclass(frozen=True)
class Expected:
    """What the reference found. ``account``: of ``meta_info.acache``, all but ``probe_ms`` and the spans' details."""

    output: list[int]
    account: dict[str, int]
    margin: float


class ReuseReference:
    """The plain method over one checkpoint; answers are remembered. Tokens from ``vocab_size`` on are padding."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: tuple[int, ...], *, shift: bool = False) -> None:
        self.oracle = TransformersOracle(folder)
        self.model = CachedTransformer(self.oracle)
        self.vocab_size, self.eos_ids, self.shift = vocab_size, eos_ids, shift
        self._known: dict[str, Expected] = {}

    @classmethod
    def of_spec(cls, folder: Path, spec: CheckpointSpec) -> ReuseReference:
        """Of a random checkpoint."""
        ends = END_TOKENS[spec.architecture](spec)
        return cls(folder, spec.vocab_size, ends, shift=spec.architecture == DREAM)

    def expect(self, case: Case) -> Expected:
        key = repr(case)
        if key not in self._known:
            self._known[key] = self._compute(case)
        expected = self._known[key]
        assert expected.margin > CLEAR, f"the anchors of {case} hang on float noise: choose another seed"
        return expected

    def plain(self, case: Case) -> list[int]:
        """The answer without any reuse."""
        predictor = predictor_for(case.decoding.get("cache", "dual"), self.model, self.oracle.logits)
        return self._generate(predictor, case).output

    def _compute(self, case: Case) -> Expected:
        options = {"anchor_ratio": 0.2, "selector": "attention", "probe": "request", **case.acache}
        whole = options["anchor_ratio"] == 1 and options.get("coverage") is None
        if not case.spans or whole or not options.get("enabled", True):
            predictor = predictor_for(case.decoding.get("cache", "dual"), self.model, self.oracle.logits)
            result = self._generate(predictor, case)
            zeros = {name: 0 for name, value in PLAIN_ACCOUNT.items() if isinstance(value, int)}
            return Expected(result.output, {**zeros, "forward_passes": len(result.commits)}, float("inf"))
        acache = ACacheForward(
            self.model,
            case.affixes,
            options["anchor_ratio"],
            (len(case.left), len(case.left) + case.hole),
            selector=options["selector"],
            coverage=options.get("coverage"),
            seed=options.get("seed", 0),
            shift=self.shift,
            cache=case.decoding.get("cache", "dual"),
            fused=options["probe"] == "fused",
        )
        result = self._generate(acache, case)
        assert acache.selection is not None
        total, probe = case.canvas_tokens, acache.probe_rows
        account = {
            "affix_tokens": sum(map(len, acache.readable)),
            "anchor_tokens": len(acache.selection.anchors),
            "recompute_tokens": probe + sum(acache.starts),
            "recompute_tokens_saved": sum(total - rows for rows in acache.starts) - probe,
            "forward_passes": len(result.commits),
        }
        return Expected(result.output, account, acache.selection.margin)

    def _generate(self, predictor: Any, case: Case) -> Result:
        how = case.decoding
        return generate(
            predictor,
            case.left,
            case.new_tokens,
            Decoding(
                mask_id=self.oracle.mask_id,
                vocab_size=self.vocab_size,
                block_length=how["block_length"],
                steps=how.get("steps"),
                threshold=how.get("threshold"),
                factor=how.get("factor"),
                rule=DEFAULT_RULE["dream" if self.shift else "llada"],
                shift=self.shift,
                eos_ids=self.eos_ids,
            ),
            case.right,
        )


def ask(server: Server, case: Case, **fields: Any) -> dict[str, Any]:
    response = server.post("/generate", case.body(**fields))
    assert response.status_code == 200, f"{response.text}\n{server.log_tail()}"
    return dict(response.json())


def ask_together(server: Server, cases: Iterable[Case], **fields: Any) -> list[dict[str, Any]]:
    """All at once, each on a connection of its own."""
    wanted = list(cases)
    with ThreadPoolExecutor(len(wanted)) as pool:
        return list(pool.map(lambda case: ask(server, case, **fields), wanted))


def account_of(answer: dict[str, Any]) -> dict[str, Any]:
    (account,) = answer["meta_info"]["acache"]
    return dict(account)


def assert_as_expected(answer: dict[str, Any], expected: Expected) -> None:
    """Token for token, and every number that is told of the reuse."""
    assert answer["output_ids"] == expected.output
    account = account_of(answer)
    counted = {name: account[name] for name in expected.account}
    assert counted == expected.account, f"told {counted}, expected {expected.account}"
    assert answer["meta_info"]["cached_tokens"] == account["affix_tokens"] - account["anchor_tokens"]
    assert sum(span["length"] for span in account["spans"]) == account["affix_tokens"]


def spans_usage(server: Server) -> dict[str, int]:
    """Slots of shared spans by owner."""
    return dict(server.get("/acache/spans?limit=1").json()["usage"])


def known_spans(server: Server) -> dict[str, dict[str, Any]]:
    return {span["name"]: span for span in server.get("/acache/spans?limit=1000").json()["spans"]}


def flush(server: Server) -> None:
    """Drop all shared K/V. The server must be idle."""
    server.wait_idle()
    response = server.post("/flush_cache", {})
    assert response.status_code == 200, response.text
    assert spans_usage(server)["used"] == 0


def declare(server: Server, **fields: Any) -> None:
    response = server.post("/acache/spans", fields)
    assert response.status_code == 200, response.text


def forget(server: Server, name: str) -> None:
    response = requests.delete(f"{server.url}/acache/spans", params={"name": name}, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == 200, response.text


def document_case(document: Sequence[int], before: int, after: int, *, seed: int, **changes: Any) -> Case:
    """A request of ``before`` tokens, the document, and ``after`` tokens; it reads the document."""
    left = [*prompt_ids(before, seed=seed), *document, *prompt_ids(after, seed=seed + 1)]
    return replace(Case(left, spans=(Affix(before, before + len(document)),)), **changes)
