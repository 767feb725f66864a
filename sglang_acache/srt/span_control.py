"""The scheduler's side of ``/acache/spans``: declares, lists and forgets spans between two steps."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from sglang.utils import TypeBasedDispatcher

from sglang_acache.core.params import ParamError
from sglang_acache.core.spans import SpanInfo, SpanNameTaken
from sglang_acache.srt.affix_file import SpanDeclaration, SpanLimits
from sglang_acache.srt.affix_setup import declare
from sglang_acache.srt.affixes import Affixes
from sglang_acache.srt.spans_messages import SpanDeclareReq, SpanDeleteReq, SpanListReq, SpanReply


class SpanControl:
    """Answers control messages. Runs in every rank alike, so that all ranks know the same spans."""

    def __init__(self, affixes: Affixes, *, vocab_limit: int, context_tokens: int) -> None:
        self.affixes = affixes
        self.vocab_limit = vocab_limit
        self.context_tokens = context_tokens

    @property
    def dispatcher(self) -> TypeBasedDispatcher:
        """To be added to the scheduler's own dispatcher of incoming messages."""
        return TypeBasedDispatcher(
            [(SpanDeclareReq, self.declare), (SpanListReq, self.list_known), (SpanDeleteReq, self.forget)]
        )

    def declare(self, request: SpanDeclareReq) -> SpanReply:
        """200 with the span; 400 where it cannot be used; 409 where the name stands for other tokens."""
        declaration = SpanDeclaration(
            ids=tuple(request.ids),
            name=request.name,
            pinned=request.pinned,
            cache_salt=request.cache_salt,
            extra_key=request.extra_key,
        )
        try:
            self._limits.check(len(request.ids), from_text=request.from_text)
            name = declare(self.affixes, declaration, None, self.vocab_limit)
        except ParamError as error:
            return error_reply(400, str(error), error.field)
        except SpanNameTaken:
            taken = f"name: {request.name!r} stands for other tokens in this name space; delete it, or choose another"
            return error_reply(409, taken, "name")
        fields = ("pinned", "cache_salt", "extra_key")
        described = {field: getattr(request, field) for field in fields}
        return _reply(200, {"name": name, "length": len(request.ids), "source": "declared", **described})

    def list_known(self, request: SpanListReq) -> SpanReply:
        """200 with the spans most in use, and totals."""
        tree = self.affixes.tree
        spans = tree.spans(source=request.source, limit=request.limit)
        usage = {**asdict(tree.usage()), "max_shared_tokens": tree.ledger.max_shared_tokens}
        return _reply(200, {"spans": [describe(span) for span in spans], "usage": usage})

    def forget(self, request: SpanDeleteReq) -> SpanReply:
        """200; 404 where nothing is declared under the name."""
        namespace = namespace_of(request.cache_salt, request.extra_key)
        try:
            self.affixes.tree.remove(namespace, request.name)
        except KeyError:
            return error_reply(
                404,
                f"name: no span {request.name!r} is declared in the name space of cache_salt {request.cache_salt!r} "
                f"and extra_key {request.extra_key!r}; GET /acache/spans?source=declared lists those that are",
                "name",
            )
        return _reply(200, {"deleted": request.name})

    @property
    def _limits(self) -> SpanLimits:
        tree = self.affixes.tree
        return SpanLimits(tree.min_tokens, self.context_tokens, tree.ledger.max_shared_tokens)


def namespace_of(cache_salt: str | None, extra_key: str | None) -> str:
    return SpanDeclaration(cache_salt=cache_salt, extra_key=extra_key).namespace


def describe(span: SpanInfo) -> dict[str, Any]:
    """A span as clients see it: its name space taken apart again."""
    fields = asdict(span)
    fields["cache_salt"], fields["extra_key"] = json.loads(fields.pop("namespace"))
    return fields


def error_reply(status: int, message: str, field: str | None = None) -> SpanReply:
    return _reply(status, {"error": {"message": message, "field": field}})


def _reply(status: int, body: dict[str, Any]) -> SpanReply:
    return SpanReply(status=status, body=json.dumps(body))
