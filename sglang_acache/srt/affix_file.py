"""Declared spans: the entries of ``--acache-affix-file`` and of ``POST /acache/spans``, checked the same way."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_acache.core.params import ParamError
from sglang_acache.core.spans import stable_interior
from sglang_acache.core.spans.types import as_tokens

MAX_LABEL_CHARACTERS = 512
_FIELDS = ("text", "ids", "name", "pinned", "cache_salt", "extra_key")
_LABELS = ("name", "cache_salt", "extra_key")


@dataclass(frozen=True, slots=True)
class SpanDeclaration:
    """One span to declare. Exactly one of ``text`` and ``ids``; the name space is that of requests with the same
    ``cache_salt`` and ``extra_key``."""

    text: str | None = None
    ids: tuple[int, ...] | None = None
    name: str | None = None
    pinned: bool = False
    cache_salt: str | None = None
    extra_key: str | None = None

    @property
    def namespace(self) -> str:
        return json.dumps([self.cache_salt or None, self.extra_key or None])

    def tokens(self, encode: Callable[[str], list[int]] | None, vocab_limit: int) -> np.ndarray:
        """int32 ids; of a text, the interior that tokenizes the same in every context.

        Raises ParamError where nothing remains or an id is out of range.
        """
        if self.ids is not None:
            if any(not 0 <= i < vocab_limit for i in self.ids):
                raise ParamError("ids", f"must be token ids in [0, {vocab_limit})")
            return as_tokens(self.ids)
        if encode is None:
            raise ParamError("text", "this server has no tokenizer; give ids")
        interior = stable_interior(encode, self.text or "")
        if not len(interior):
            raise ParamError("text", "has no tokens that do not depend on what stands around it; make it longer")
        return interior


@dataclass(frozen=True, slots=True)
class SpanLimits:
    """What a declared span must keep to for any request to read it. ``max_shared_tokens`` None: not known yet."""

    min_tokens: int
    context_tokens: int
    max_shared_tokens: int | None = None

    def check(self, tokens: int, *, from_text: bool) -> None:
        """Raise ParamError where no request could ever read a span of ``tokens``."""
        field = "text" if from_text else "ids"
        what = "has, besides tokens that depend on what stands around it," if from_text else "has"
        if tokens < self.min_tokens:
            raise ParamError(
                field,
                f"{what} {tokens} tokens, fewer than are ever reused ({self.min_tokens}); make it longer, or start "
                f"the server with a smaller --acache-min-affix-tokens",
            )
        if tokens >= self.context_tokens:
            raise ParamError(field, f"{what} {tokens} tokens; no request of {self.context_tokens} can hold it")
        if self.max_shared_tokens is not None and tokens > self.max_shared_tokens:
            raise ParamError(
                field,
                f"{what} {tokens} tokens, more than may be shared ({self.max_shared_tokens}); "
                f"raise --acache-max-shared-tokens",
            )


def plain_encoder(tokenizer: Any) -> Callable[[str], list[int]] | None:
    """Text to ids without special tokens; None where there is no tokenizer."""
    return None if tokenizer is None else functools.partial(tokenizer.encode, add_special_tokens=False)


class DeclarationChecker:
    """Checks declarations one after the other as far as can be done before there is a server."""

    def __init__(self, encode: Callable[[str], list[int]] | None, vocab_limit: int, limits: SpanLimits) -> None:
        self.encode = encode
        self.vocab_limit = vocab_limit
        self.limits = limits
        self._named: dict[tuple[str, str], bytes] = {}

    def __call__(self, declaration: SpanDeclaration) -> None:
        """Raise ParamError that names the field and the fix."""
        tokens = declaration.tokens(self.encode, self.vocab_limit)
        self.limits.check(len(tokens), from_text=declaration.text is not None)
        if declaration.name is not None:
            key = (declaration.namespace, declaration.name)
            if self._named.setdefault(key, tokens.tobytes()) != tokens.tobytes():
                raise ParamError("name", f"{declaration.name!r} stands for other tokens above; choose another")


def parse_declaration(values: Any) -> SpanDeclaration:
    """A declaration from its JSON object. Raises ParamError that names the field and the fix."""
    if not isinstance(values, Mapping):
        raise ParamError("span", f"must be an object with {', '.join(_FIELDS)}, got {values!r}")
    for key in values:
        if key not in _FIELDS:
            raise ParamError(str(key), f"unknown field of a span; known are {', '.join(_FIELDS)}")
    text, ids = values.get("text"), values.get("ids")
    if (text is None) == (ids is None):
        raise ParamError("text", "give exactly one of text and ids")
    if text == "":
        raise ParamError("text", "must be a non-empty string")
    if ids is not None and not (isinstance(ids, list) and ids and all(type(i) is int for i in ids)):
        raise ParamError("ids", "must be a non-empty list of token ids")
    for key in ("text", *_LABELS):
        if values.get(key) is not None:
            check_text(key, values[key])
    if not isinstance(values.get("pinned", False), bool):
        raise ParamError("pinned", f"must be true or false, got {values['pinned']!r}")
    return SpanDeclaration(**{**values, "ids": None if ids is None else tuple(ids)})


def check_text(field: str, value: Any) -> None:
    """Raise ParamError where ``value`` is no text of that field: not a string, not Unicode, or a label too long."""
    if not isinstance(value, str):
        raise ParamError(field, f"must be a string, got {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ParamError(field, "has half of a surrogate pair; send valid Unicode") from error
    if field in _LABELS and len(value) > MAX_LABEL_CHARACTERS:
        raise ParamError(field, f"has {len(value)} characters; at most {MAX_LABEL_CHARACTERS} are allowed")


def read_affix_file(
    path: str, check: Callable[[SpanDeclaration], None] = lambda declaration: None
) -> list[SpanDeclaration]:
    """The declarations of a JSONL file. Raises ParamError that names the file, the line and the fix.

    ``check`` may refuse a declaration by raising ParamError.
    """
    field = "acache_affix_file"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParamError(field, f"cannot read {path}: {error}") from error
    declarations = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            declarations.append(parse_declaration(json.loads(line)))
            check(declarations[-1])
        except (json.JSONDecodeError, RecursionError, ParamError) as error:
            raise ParamError(field, f"{path}, line {number}: {error}") from error
    return declarations
