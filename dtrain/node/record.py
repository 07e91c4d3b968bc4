"""Frozen dataclasses that cost next to nothing to define: each session makes seventy before it says a word, while somebody waits.

dataclasses writes code for every class of its own, and loads `inspect` to do so: a quarter of the time that a session takes to start.
Here all classes share their methods. What asdict, replace and fields of dataclasses look for is made when they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, TypeVar

_T = TypeVar("_T")

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool) -> Callable[[type], type]:
        assert frozen
        return _made


def replace(value: _T, **changes: Any) -> _T:
    """As dataclasses.replace, without loading it."""
    return type(value)(**{**vars(value), **changes})


def _made(cls: type) -> type:
    methods = (_init, _eq, _hash, _repr, _setattr)
    for name, member in (
        *((f"_{method.__name__}__", method) for method in methods),
        ("__match_args__", tuple(cls.__dict__.get("__annotations__", ()))),  # noqa: RUF063  that of Python 3.9 has those of a base too
        ("__dataclass_fields__", _Fields()),
    ):
        setattr(cls, name, member)
    return cls


class _Fields:
    def __get__(self, _: object, cls: type) -> Any:
        import dataclasses

        dataclasses.dataclass(init=False, repr=False, eq=False)(cls)  # puts them in this one's place
        return cls.__dict__["__dataclass_fields__"]


def _init(self: Any, *values: Any, **named: Any) -> None:
    cls = type(self)
    given = {**dict(zip(cls.__match_args__, values)), **named}
    try:
        state = {name: given.pop(name) if name in given else cls.__dict__[name] for name in cls.__match_args__}
    except KeyError as error:
        raise TypeError(f"{cls.__name__} lacks {error}") from None
    if given or len(values) + len(named) > len(cls.__match_args__):
        raise TypeError(f"{cls.__name__} takes {', '.join(cls.__match_args__)}, each once")
    self.__dict__.update(state)


def _eq(self: Any, other: object) -> bool:
    return type(self) is type(other) and vars(self) == vars(other)


def _hash(self: Any) -> int:
    return hash((type(self), *vars(self).values()))


def _repr(self: Any) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def _setattr(self: Any, name: str, value: object) -> None:
    raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")
