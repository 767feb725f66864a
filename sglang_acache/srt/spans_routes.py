"""``POST / GET / DELETE /acache/spans`` on SGLang's HTTP server, for a server of ours only."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from collections.abc import Mapping
from typing import Any, cast, get_args

from fastapi import Request, Response
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.utils.auth import AuthLevel, auth_level
from sglang.utils import TypeBasedDispatcher

from sglang_acache.core.params import ParamError
from sglang_acache.core.spans.types import Source
from sglang_acache.srt.affix_file import check_text, parse_declaration
from sglang_acache.srt.launch import is_ours
from sglang_acache.srt.limits import vocabulary_limit
from sglang_acache.srt.spans_messages import SpanDeclareReq, SpanDeleteReq, SpanListReq, SpanReply

PATH = "/acache/spans"
MAX_BODY_BYTES = 4 << 20
MAX_LISTED = 10_000
_LISTED = 100


class HttpError(Exception):
    """An answer that is not 200: status, message, and the field that is at fault."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


def install(
    server_args: Any, tokenizer_manager: Any, template_manager: Any, port_args: Any, *args: Any, **kwargs: Any
) -> None:
    """BEFORE ``_setup_and_run_http_server``: add the route where a diffusion LLM is served; else change nothing."""
    from sglang.srt.entrypoints.http_server import app

    if tokenizer_manager is None or not is_ours(tokenizer_manager.model_config.hf_config.architectures):
        return
    endpoint = SpansEndpoint(tokenizer_manager, enabled=bool(server_args.enable_acache))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # as /flush_cache
    async def acache_spans(request: Request) -> Response:
        return await endpoint(request)

    app.add_api_route(PATH, acache_spans, methods=["GET", "POST", "DELETE"])


class SpansEndpoint:
    """Turns HTTP requests into messages for the schedulers, and their replies into responses."""

    def __init__(self, manager: Any, *, enabled: bool) -> None:
        self.manager = manager
        self.enabled = enabled
        self._encoding = asyncio.Lock()  # the copy of the tokenizer serves one thread at a time
        self._tokenizer: Any = None
        # --dp-size is refused: one group of schedulers, whose first rank replies.
        self._ask: FanOutCommunicator[Any] = FanOutCommunicator(manager._dispatch_to_scheduler, 1)
        manager._result_dispatcher += TypeBasedDispatcher([(SpanReply, self._ask.handle_recv)])

    async def __call__(self, request: Request) -> Response:
        try:
            if not self.enabled:
                raise HttpError(400, "this server reuses nothing; start it with --enable-acache")
            message = await self._message(request)
        except ParamError as error:
            return _error(400, str(error), error.field)
        except HttpError as error:
            return _error(error.status, str(error), error.field)
        self.manager.auto_create_handle_loop()
        reply: SpanReply = (await self._ask(message))[0]
        return _json(reply.status, reply.body)

    async def _message(self, request: Request) -> SpanDeclareReq | SpanListReq | SpanDeleteReq:
        if request.method == "POST":
            return await self._declaration(await read_body(request))
        query = request.query_params
        repeated = next((key for key in query if len(query.getlist(key)) > 1), None)
        if repeated is not None:
            raise ParamError(repeated, "give it once")
        return parse_delete(query) if request.method == "DELETE" else parse_list(query)

    async def _declaration(self, body: bytes) -> SpanDeclareReq:
        declaration = parse_declaration(parse_json(body))
        limit = vocabulary_limit(self.manager.tokenizer, self.manager.model_config.hf_config)
        async with self._encoding:
            tokens = await asyncio.to_thread(declaration.tokens, self._encode(), limit)
        return SpanDeclareReq(
            ids=tokens.tolist(),
            name=declaration.name,
            pinned=declaration.pinned,
            cache_salt=declaration.cache_salt,
            extra_key=declaration.extra_key,
            from_text=declaration.text is not None,
        )

    def _encode(self) -> Any:
        """Text to ids by a tokenizer of its own: a long text is encoded beside the event loop, which has the other."""
        if self.manager.tokenizer is None:
            return None
        if self._tokenizer is None:
            self._tokenizer = copy.deepcopy(self.manager.tokenizer)
        return functools.partial(self._tokenizer.encode, add_special_tokens=False)


async def read_body(request: Request) -> bytes:
    """The body. Raises HttpError 413 as soon as it is over the limit."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HttpError(413, f"the body is over {MAX_BODY_BYTES} bytes; a span is at most one prompt")
    return bytes(body)


def parse_json(body: bytes) -> Any:
    """Raises HttpError where the body is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        fix = 'send {"text": "...", "name": "..."} or {"ids": [...]}'
        raise HttpError(400, f"the body must be one JSON object ({error}); {fix}", "body") from error


def parse_list(query: Mapping[str, str]) -> SpanListReq:
    """``?limit=N&source=declared``. Raises ParamError."""
    _only(query, ("limit", "source"))
    limit, source = query.get("limit", str(_LISTED)), cast("Source | None", query.get("source"))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LISTED):
        raise ParamError("limit", f"must be an integer in [1, {MAX_LISTED}], got {limit[:40]!r}")
    if source is not None and source not in get_args(Source):
        raise ParamError("source", f"must be one of {', '.join(get_args(Source))}, got {source[:40]!r}")
    return SpanListReq(limit=int(limit), source=source)


def parse_delete(query: Mapping[str, str]) -> SpanDeleteReq:
    """``?name=NAME&cache_salt=S&extra_key=K``. Raises ParamError."""
    _only(query, ("name", "cache_salt", "extra_key"))
    if not query.get("name"):
        raise ParamError("name", f"say which span to forget: DELETE {PATH}?name=NAME")
    for key, value in query.items():
        check_text(key, value)
    return SpanDeleteReq(name=query["name"], cache_salt=query.get("cache_salt"), extra_key=query.get("extra_key"))


def _only(query: Mapping[str, str], known: tuple[str, ...]) -> None:
    for key in query:
        if key not in known:
            raise ParamError(key, f"unknown parameter; known are {', '.join(known)}")


def _error(status: int, message: str, field: str | None) -> Response:
    return _json(status, json.dumps({"error": {"message": message, "field": field}}))


def _json(status: int, body: str) -> Response:
    return Response(body, status_code=status, media_type="application/json")
