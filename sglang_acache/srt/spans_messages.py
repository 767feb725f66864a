"""What travels between the HTTP server and the schedulers for ``/acache/spans``."""

# This module must not postpone its annotations: msgspec reads them.
# ruff: noqa: UP045
from typing import Optional

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

from sglang_acache.core.spans.types import Source


class SpanDeclareReq(BaseReq):
    """Declare a span whose text has already become ``ids``; ``from_text`` picks the field that errors name."""

    ids: list[int]
    name: Optional[str] = None
    pinned: bool = False
    cache_salt: Optional[str] = None
    extra_key: Optional[str] = None
    from_text: bool = False


class SpanListReq(BaseReq):
    """List at most ``limit`` spans, those with the most hits; only those of ``source`` where it is given."""

    limit: int
    source: Optional[Source] = None


class SpanDeleteReq(BaseReq):
    """Forget a declared span."""

    name: str
    cache_salt: Optional[str] = None
    extra_key: Optional[str] = None


class SpanReply(BaseReq):
    """The answer to each of them: an HTTP status and a JSON object."""

    status: int
    body: str


hook_custom_types(SpanDeclareReq, SpanListReq, SpanDeleteReq, SpanReply)
