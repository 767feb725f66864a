"""Implementations by name, imported when they are first asked for."""

from importlib import import_module
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to an attribute of a module that is only imported on `get`.

    The map is the whole list of what exists: there is no registration at import time, so the valid names are
    known even where the package an implementation needs is not installed.
    """

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self._kind = kind
        self._entries = entries

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def get(self, name: str) -> T:
        """The implementation called `name`.

        Raises ValueError naming the valid names, or ImportError naming the implementation that cannot be loaded.
        """
        if name not in self._entries:
            raise ValueError(f"unknown {self._kind} {name!r}; valid names: {', '.join(self._entries)}")
        module, attribute = self._entries[name].split(":")
        try:
            return getattr(import_module(module), attribute)
        except ImportError as error:
            raise ImportError(f"the {self._kind} {name!r} cannot be loaded here: {error}") from error


def default_impl(device_type: str) -> str:
    """The implementation of the non-attention operations that suits a device: `triton` on CUDA, else `torch`."""
    return "triton" if device_type == "cuda" else "torch"
