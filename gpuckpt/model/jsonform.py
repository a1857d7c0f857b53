"""The one place that turns dataclasses into JSON and back.

`from_json` reads hostile input: every value is checked against the annotated type, a missing or
wrong one raises FormError naming its place. Unknown keys are ignored: a newer writer announces what
must not be ignored as a required feature. Paths are text with surrogateescape, so that any byte
survives.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


class FormError(ValueError):
    """A JSON value does not have the form its dataclass asks for."""


def to_json(value: Any) -> Any:
    """Dataclasses, tuples and mappings as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    return value


def from_json(cls: type[T], data: Any, place: str = "$") -> T:
    """Build `cls` from a JSON object, raising FormError on the first value that does not fit."""
    if not isinstance(data, dict):
        raise FormError(f"{place}: expected an object, found {type(data).__name__}")
    hints = _hints(typing.cast("typing.Hashable", cls))
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        if item.name in data:
            values[item.name] = _convert(hints[item.name], data[item.name], f"{place}.{item.name}")
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise FormError(f"{place}.{item.name}: missing")
    return cls(**values)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _convert(hint: Any, data: Any, place: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        return _convert_union(hint, data, place)
    if origin is typing.Literal:
        if data not in typing.get_args(hint):
            raise FormError(f"{place}: {data!r} is none of {', '.join(map(str, typing.get_args(hint)))}")
        return data
    if origin is tuple:
        return _convert_tuple(typing.get_args(hint), data, place)
    if origin is dict:
        return _convert_dict(typing.get_args(hint), data, place)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast("type[Any]", hint), data, place)
    return _convert_scalar(hint, data, place)


def _convert_union(hint: Any, data: Any, place: str) -> Any:
    options = [option for option in typing.get_args(hint) if option is not types.NoneType]
    if data is None:
        if len(options) == len(typing.get_args(hint)):
            raise FormError(f"{place}: null is not allowed")
        return None
    if len(options) != 1:
        raise TypeError(f"{place}: only optional types are supported, not {hint}")
    return _convert(options[0], data, place)


def _convert_tuple(args: tuple[Any, ...], data: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise FormError(f"{place}: expected a list, found {type(data).__name__}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(args[0], item, f"{place}[{index}]") for index, item in enumerate(data))
    if len(data) != len(args):
        raise FormError(f"{place}: expected {len(args)} values, found {len(data)}")
    return tuple(_convert(arg, item, f"{place}[{i}]") for i, (arg, item) in enumerate(zip(args, data, strict=True)))


def _convert_dict(args: tuple[Any, ...], data: Any, place: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise FormError(f"{place}: expected an object, found {type(data).__name__}")
    return {key: _convert(args[1], item, f"{place}.{key}") for key, item in data.items()}


def _convert_scalar(hint: Any, data: Any, place: str) -> Any:
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError:
            raise FormError(f"{place}: no number is so large") from None
    # bool is a subclass of int, and true is no size.
    if not isinstance(data, hint) or (hint is int and isinstance(data, bool)):
        raise FormError(f"{place}: expected {hint.__name__}, found {type(data).__name__}")
    return data
