"""`dataclass`, for less at each start.

The standard one compiles six functions for every class, about half a millisecond, and a run loads a hundred and fifty
classes of which it makes few. Here `@dataclass(frozen=True, slots=True)` gives a class that behaves the same: what
compares, shows and refuses is shared by all, and the standard library writes `__init__` when the first one is made.
Every other form is the standard one's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        """Make a data class, as `dataclasses.dataclass` does."""
        if cls is None:
            return functools.partial(dataclass, **options)
        if options != {"frozen": True, "slots": True} or cls.__bases__ != (object,) or _OWN.intersection(vars(cls)):
            return dataclasses.dataclass(cls, **options)
        return _frozen(cls)


def _frozen(cls: type) -> Any:
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True)(cls)
    for name, shared in _SHARED.items():
        setattr(made, name, shared)

    def write_init(self: Any, *values: Any, **named: Any) -> None:
        init = _init_of(made)
        made.__init__ = init
        init(self, *values, **named)

    made.__init__ = write_init
    return made


def _init_of(cls: type) -> Any:
    """The `__init__` that the standard library writes for a frozen class with these fields."""
    items = [(item.name, item.type, item) for item in dataclasses.fields(cls)]
    # A class without a docstring gets its signature for one, at some cost.
    kept = {"__doc__": cls.__name__} | {name: value for name, value in vars(cls).items() if name == "__post_init__"}
    like = dataclasses.make_dataclass(cls.__name__, items, namespace=kept, repr=False, eq=False, frozen=True)
    return vars(like)["__init__"]


@functools.cache
def _compared(cls: type) -> tuple[str, ...]:
    return tuple(item.name for item in dataclasses.fields(cls) if item.compare)


def _values(record: Any) -> tuple[Any, ...]:
    return tuple([getattr(record, name) for name in _compared(record.__class__)])


def _equal(self: Any, other: object) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return _values(self) == _values(other)


def _hash(self: Any) -> int:
    return hash(_values(self))


def _repr(self: Any) -> str:
    shown = ", ".join(f"{item.name}={getattr(self, item.name)!r}" for item in dataclasses.fields(self) if item.repr)
    return f"{self.__class__.__qualname__}({shown})"


def _refuse_to_set(_self: Any, name: str, _value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(_self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, item.name) for item in dataclasses.fields(self)]


def _restore_state(self: Any, state: list[Any]) -> None:
    for item, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, item.name, value)


_SHARED = {
    "__eq__": _equal,
    "__hash__": _hash,
    "__repr__": _repr,
    "__setattr__": _refuse_to_set,
    "__delattr__": _refuse_to_delete,
    "__getstate__": _state,
    "__setstate__": _restore_state,
}
_OWN = frozenset(_SHARED) | {"__init__"}
"""A class that writes one of these itself is left to the standard library."""
