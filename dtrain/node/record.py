"""Frozen dataclasses at a third of the price: each session makes sixty of them before it says a word, and somebody waits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool) -> Callable[[type], type]:
        """Writes code for `__init__` alone; that nobody assigns to a field is the type checker's to see."""
        assert frozen
        return _made


def _made(cls: type) -> type:
    for name, method in (("__eq__", _eq), ("__hash__", _hash), ("__repr__", _repr)):
        setattr(cls, name, method)
    cls.__doc__ = cls.__doc__ or cls.__name__  # dataclasses would write a signature
    return dataclasses.dataclass(eq=False, repr=False)(cls)


def _eq(self: Any, other: object) -> bool:
    return type(self) is type(other) and vars(self) == vars(other)


def _hash(self: Any) -> int:
    return hash((type(self), *vars(self).values()))


def _repr(self: Any) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
