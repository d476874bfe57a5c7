"""Types of options, checked when they are given in Python; a command line's are checked by its parser."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, Union, get_args, get_origin, get_type_hints

from verl_lightning.faults import closest

P = ParamSpec("P")

_HINTS: dict[type, dict[str, Any]] = {}
"""Types of the fields of each class of settings, once they were asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)  # as all classes below it are: its parser asks for that
class Options:
    """Base of dataclasses of settings, which refuses values of wrong types and takes mappings for groups.

    Args:
        key: Name of the group in messages, such as ``optim``; empty where a message names the option alone.
    """

    _key = ""

    def __init_subclass__(cls, *, key: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._key = key
        inner = cls.__dict__.get("__post_init__")

        def __post_init__(self: Options) -> None:
            self.take_types()
            if inner is not None:
                inner(self)

        cls.__post_init__ = __post_init__  # type: ignore[attr-defined]

    def take_types(self) -> None:
        """Checks the types of all fields, and makes groups of mappings.

        Raises:
            TypeError: If a value is of another type.
        """
        if (hints := _HINTS.get(type(self))) is None:
            hints = _HINTS[type(self)] = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            taken = take(value, hints[field.name], f"{self._key}.{field.name}".lstrip("."))
            if taken is not value:
                object.__setattr__(self, field.name, taken)  # as dataclasses themselves do in a frozen one


def typed(group: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Returns a decorator of constructors that refuses arguments of wrong types by their full keys.

    Args:
        group: Key of the group of settings that the constructor makes, such as ``model``.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(init)

        @functools.wraps(init)
        def checked(*args: P.args, **kwargs: P.kwargs) -> None:
            names, owner = list(signature.parameters), type(args[0]).__name__
            if unknown := [name for name in kwargs if name not in names]:
                raise TypeError(f"`{group}.{unknown[0]}` is not an option of `{owner}`.{closest(unknown[0], names)}")
            bound = signature.bind_partial(*args, **kwargs)
            needed = (each.name for each in signature.parameters.values() if each.default is each.empty)
            if missing := [f"`{group}.{name}`" for name in needed if name not in bound.arguments]:
                raise TypeError(f"`{owner}` needs {' and '.join(missing)}, which you have not given.")
            hints = get_type_hints(init)
            for name, value in bound.arguments.items():
                if name in hints:
                    bound.arguments[name] = take(value, hints[name], f"{group}.{name}")
            init(*bound.args, **bound.kwargs)

        return checked

    return decorate


class Method:
    """Base of methods that a setting chooses, such as losses; theirs of this package refuse values by their full keys.

    Args:
        key: Key of the setting, such as ``model.loss``.
    """

    _key = ""

    def __init_subclass__(cls, *, key: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._key = key or cls._key
        init = cls.__dict__.get("__init__")
        if init is None or not cls.__module__.startswith("verl_lightning."):  # whose types may not be resolved
            return
        checked = typed(cls._key)(init)

        @functools.wraps(init)
        def __init__(*args: Any, **kwargs: Any) -> None:
            with within(cls._key):
                checked(*args, **kwargs)

        cls.__init__ = __init__  # type: ignore[method-assign]


def take(value: Any, hint: Any, key: str) -> Any:
    """Returns a value as its option has it: a mapping becomes a group, a path text, a list a tuple or the reverse.

    Args:
        value: Value that was given.
        hint: Type of the option.
        key: Key of the option, for the message.

    Raises:
        TypeError: If the value is of another type.
        ValueError: If it is nan, which passes any comparison with a limit.
    """
    if isinstance(value, float) and value != value:
        raise ValueError(f"`{key}` must be a number, got nan.")
    if fits(value, hint):
        return value
    if isinstance(value, os.PathLike) and fits("", hint):
        return os.fspath(value)
    for part in _parts(hint):
        if isinstance(value, Mapping) and isinstance(part, type) and dataclasses.is_dataclass(part):
            return _group(part, value, key)
        if isinstance(value, list) and get_origin(part) is tuple and fits(tuple(value), part):
            return tuple(value)
        if isinstance(value, list | tuple) and get_origin(part) is list:
            return [take(item, get_args(part)[0], f"{key}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"`{key}`: expected {readable(hint)}, got {_shown(value)}.")


def fits(value: Any, hint: Any) -> bool:
    """Tells whether a value is of a type; True for a type that is not understood."""
    if hint is Any:
        return True
    if hint in (None, NoneType):
        return value is None
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in inner)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in inner)
    if hint in (int, float):  # numbers of NumPy too
        kind = Integral if hint is int else Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if origin in (list, Sequence):
        is_list = isinstance(value, list if origin is list else Sequence) and not isinstance(value, str)
        return is_list and all(fits(item, inner[0]) for item in value)
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[1:] == (...,) and isinstance(value, tuple) else inner
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(fits, value, kinds))
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if origin is Callable or hint is Callable:
        return callable(value)
    return not isinstance(hint, type) or isinstance(value, hint)


def readable(hint: Any) -> str:
    """A type in words."""
    parts = _parts(hint)
    if len(parts) > 1:
        return " or ".join(readable(part) for part in parts)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    if get_origin(hint) is Callable:
        return "a function"
    if hint is NoneType:
        return "None"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _group(kind: type, values: Mapping[str, Any], key: str) -> Any:
    names = [field.name for field in dataclasses.fields(kind)]
    if unknown := [name for name in values if name not in names]:
        raise TypeError(f"`{key}.{unknown[0]}` is not an option of `{kind.__name__}`.{closest(unknown[0], names)}")
    needed = [field.name for field in dataclasses.fields(kind) if _is_required(field)]
    if missing := [name for name in needed if name not in values]:
        raise TypeError(f"`{key}` needs `{key}.{missing[0]}`.")
    with within(key):
        return kind(**values)


@contextmanager
def within(key: str) -> Iterator[None]:
    """Completes the key at the beginning of an error of a group that does not know where it stands.

    Args:
        key: Full key of the group, such as ``model.actor``.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        (text,) = error.args if len(error.args) == 1 else ("",)
        if isinstance(text, str) and text.startswith("`") and not text.startswith(f"`{key.partition('.')[0]}."):
            error.args = (f"`{key}.{text[1:]}",)
        raise


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:80] + '...'} ({type(value).__name__})"
