"""A typed name -> implementation table whose error lists the valid names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Named implementations of one interface.

    ``kind`` is the word the error uses, for example ``"cache"`` or ``"remasking"``; it is the name of the
    field or flag that selects from this registry.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str, item: T) -> T:
        if name in self._items:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._items[name] = item
        return item

    def __getitem__(self, name: str) -> T:
        """The implementation called ``name``; raises ``ValueError`` listing the valid names."""
        try:
            return self._items[name]
        except (KeyError, TypeError):
            raise ValueError(f"{self.kind} must be one of {', '.join(self.names())}; got {name!r}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def names(self) -> list[str]:
        return list(self._items)
