"""The server's span list over HTTP: declare what the documents of a task share, and count who read it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

PATH = "/acache/spans"
TIMEOUT_S = 600.0


def name_of(text: str) -> str:
    """The same text always gets the same name, so that declaring twice changes nothing."""
    return f"evals-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def declared(url: str, texts: Iterable[str]) -> Iterator[list[str]]:
    """Declare the texts for the time of a run; the names of those the server took.

    A text that the server refuses (too short, say) is reported and left to be computed in full.
    """
    taken = []
    for text in dict.fromkeys(texts):
        try:
            _call(url, "POST", {"text": text, "name": name_of(text)})
            taken.append(name_of(text))
        except urllib.error.HTTPError as error:
            print(f"not declared: {text[:40]!r}: {error.code} {error.read().decode(errors='replace')[:300]}")
    try:
        yield taken
    finally:
        for name in taken:
            with contextlib.suppress(urllib.error.URLError):
                _call(url, "DELETE", query={"name": name})


def hits(url: str, names: Iterable[str]) -> int:
    """How many requests have read the named spans."""
    wanted = set(names)
    listed = _call(url, "GET", query={"limit": "10000", "source": "declared"})["spans"]
    return sum(span["hits"] for span in listed if span["name"] in wanted)


def _call(url: str, method: str, body: Any = None, query: dict[str, str] | None = None) -> Any:
    address = f"{url}{PATH}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, data=data, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return json.loads(response.read() or b"{}")
