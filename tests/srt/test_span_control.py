"""The scheduler's answers to ``/acache/spans``, and what the HTTP side refuses before it asks."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang_acache.core.params import ParamError
from sglang_acache.core.spans import Discovery, ListSlotPool, SpanTree
from sglang_acache.srt.affix_file import MAX_LABEL_CHARACTERS, parse_declaration
from sglang_acache.srt.affixes import AffixCounters, Affixes
from sglang_acache.srt.span_control import SpanControl
from sglang_acache.srt.spans_messages import SpanDeclareReq, SpanDeleteReq, SpanListReq, SpanReply
from sglang_acache.srt.spans_routes import MAX_LISTED, HttpError, parse_delete, parse_json, parse_list

IDS = list(range(100, 150))


def affixes() -> Affixes:
    """Spans without a device: nothing here forwards."""
    tree = SpanTree(ListSlotPool(500), min_tokens=16, max_shared_tokens=200)
    discovery = Discovery(min_tokens=16)
    fake = SimpleNamespace(tree=tree, discovery=discovery, counters=AffixCounters(), seed=discovery.seed)
    return cast(Affixes, fake)


@pytest.fixture
def control() -> SpanControl:
    return SpanControl(affixes(), vocab_limit=1000, context_tokens=400)


def body(reply: SpanReply) -> dict[str, Any]:
    return dict(json.loads(reply.body))


class TestDeclare:
    def test_listed(self, control: SpanControl) -> None:
        reply = control.declare(SpanDeclareReq(ids=IDS, name="doc", pinned=True, cache_salt="a", extra_key=""))
        assert reply.status == 200
        assert body(reply)["length"] == 50
        (span,) = body(control.list_known(SpanListReq(limit=10)))["spans"]
        assert span == {
            "name": "doc",
            "source": "declared",
            "length": 50,
            "pinned": True,
            "readers": 0,
            "hits": 0,
            "placements": 0,
            "encoded_tokens": 0,
            "slots": 0,
            "cache_salt": "a",
            "extra_key": None,
        }

    def test_name_taken(self, control: SpanControl) -> None:
        control.declare(SpanDeclareReq(ids=IDS, name="doc"))
        assert control.declare(SpanDeclareReq(ids=IDS, name="doc")).status == 200
        reply = control.declare(SpanDeclareReq(ids=IDS[:20], name="doc"))
        assert (reply.status, body(reply)["error"]["field"]) == (409, "name")
        assert control.declare(SpanDeclareReq(ids=IDS[:20], name="doc", extra_key="k")).status == 200

    @pytest.mark.parametrize(
        ("ids", "from_text", "field", "fix"),
        [
            (IDS[:15], False, "ids", "--acache-min-affix-tokens"),
            (IDS[:15], True, "text", "make it longer"),
            (IDS * 8, False, "ids", "no request of 400"),
            (IDS * 5, False, "ids", "--acache-max-shared-tokens"),
            ([*IDS, 1000], False, "ids", "[0, 1000)"),
        ],
    )
    def test_refused(self, control: SpanControl, ids: list[int], from_text: bool, field: str, fix: str) -> None:
        reply = control.declare(SpanDeclareReq(ids=ids, from_text=from_text))
        error = body(reply)["error"]
        assert (reply.status, error["field"]) == (400, field)
        assert error["message"].startswith(f"{field}: ")
        assert fix in error["message"]
        assert control.affixes.tree.usage().spans == 0


class TestForget:
    def test_only_in_its_name_space(self, control: SpanControl) -> None:
        control.declare(SpanDeclareReq(ids=IDS, name="doc", cache_salt="a"))
        for unknown in (SpanDeleteReq(name="doc"), SpanDeleteReq(name="dog", cache_salt="a")):
            reply = control.forget(unknown)
            assert (reply.status, body(reply)["error"]["field"]) == (404, "name")
        assert control.forget(SpanDeleteReq(name="doc", cache_salt="a", extra_key="")).status == 200
        assert body(control.list_known(SpanListReq(limit=10)))["spans"] == []


class TestList:
    def test_most_used_first(self, control: SpanControl) -> None:
        tree = control.affixes.tree
        for first in range(4):
            control.declare(SpanDeclareReq(ids=[first, *IDS], name=f"s{first}"))
        tree.insert("[null, null]", [9, *IDS])
        for times, first in ((1, 2), (2, 3)):
            for _ in range(times):
                match = tree.locate("[null, null]", [first, *IDS])
                assert match is not None
                handle = tree.acquire(match)
                assert handle is not None
                tree.release(handle)
        listed = body(control.list_known(SpanListReq(limit=2)))
        assert [span["name"] for span in listed["spans"]] == ["s3", "s2"]
        assert (listed["usage"]["spans"], listed["usage"]["max_shared_tokens"]) == (5, 200)
        (found,) = body(control.list_known(SpanListReq(limit=9, source="discovered")))["spans"]
        assert found["length"] == 51

    def test_dispatched(self, control: SpanControl) -> None:
        assert control.dispatcher(SpanListReq(limit=1)).status == 200
        assert control.dispatcher(SpanDeleteReq(name="x")).status == 404


class TestQueries:
    def test_list(self) -> None:
        assert parse_list({}) == SpanListReq(limit=100)
        assert parse_list({"limit": "7", "source": "declared"}) == SpanListReq(limit=7, source="declared")

    @pytest.mark.parametrize("limit", ["0", "-1", "1.5", "x", "", "²", str(MAX_LISTED + 1), "1" * 5000])
    def test_limit_refused(self, limit: str) -> None:
        with pytest.raises(ParamError, match="limit: must be an integer in"):
            parse_list({"limit": limit})

    def test_delete(self) -> None:
        assert parse_delete({"name": "doc", "cache_salt": "a"}) == SpanDeleteReq(name="doc", cache_salt="a")

    @pytest.mark.parametrize("query", [{}, {"name": ""}, {"name": "a", "salt": "b"}, {"name": "x" * 513}])
    def test_delete_refused(self, query: dict[str, str]) -> None:
        with pytest.raises(ParamError):
            parse_delete(query)

    @pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
    def test_body_refused(self, data: bytes) -> None:
        with pytest.raises(HttpError) as refused:
            parse_json(data)
        assert refused.value.status == 400


class TestDeclaration:
    @pytest.mark.parametrize(
        ("values", "field"),
        [
            ({"text": "\udc00"}, "text"),
            ({"text": ""}, "text"),
            ({"text": 1}, "text"),
            ({"ids": [1], "name": "x" * (MAX_LABEL_CHARACTERS + 1)}, "name"),
            ({"ids": [1], "cache_salt": "\ud800"}, "cache_salt"),
            ({"ids": [True]}, "ids"),
            ({"ids": [1], "pinned": 1}, "pinned"),
        ],
    )
    def test_refused(self, values: dict[str, Any], field: str) -> None:
        with pytest.raises(ParamError) as refused:
            parse_declaration(values)
        assert refused.value.field == field

    def test_empty_labels_are_none(self) -> None:
        """As SGLang reads them in a request."""
        assert parse_declaration({"ids": [1], "cache_salt": "", "extra_key": ""}).namespace == "[null, null]"
