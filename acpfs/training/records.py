"""Frozen records to JSON and back: total, so that whatever arrives becomes a record or one clear
error.

A record is a frozen dataclass of integers, floats, strings, booleans, enums, other records, tuples
of these, mappings with plain keys, and None. Integers are counts, from 0 to 2^63 − 1. Unknown and
missing fields are errors, unless the field has a default. Pure.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from acpfs.errors import AcpfsError, unknown_version

Json = dict[str, Any]
Record = TypeVar("Record")
COUNT_MAX = (1 << 63) - 1
_SHOWN_CHARS_MAX = 60


class MalformedError(AcpfsError):
    """What arrived is not what was agreed; the message names the field."""


class NewerError(MalformedError):
    """It is of a newer acpfs, and the message says so."""


def refuse_newer(what: str, data: Json, known: int, way_out: str) -> None:
    """Look at the version of a record's form before anything else of it; none is the first.

    Raises:
        NewerError: this acpfs does not know it.
    """
    if why := unknown_version(what, data.get("version", 1), known, way_out):
        raise NewerError(why)


def to_json(record: object) -> Json:
    """A record as JSON has it; fields that have their default are left out."""
    return {
        field.name: _plain(value)
        for field in fields(record)  # type: ignore[arg-type]  # every record is a dataclass
        if (value := getattr(record, field.name)) != field.default
    }


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return to_json(value) if hasattr(value, "__dataclass_fields__") else value


def from_json(kind: type[Record], data: object, where: str = "") -> Record:
    """A record of this kind.

    Raises:
        MalformedError: it is none.
    """
    where = where or kind.__name__
    if not isinstance(data, dict):
        raise MalformedError(f"{where}: {_shown(data)} is not an object")
    known = _known(kind)  # type: ignore[arg-type]  # a type is hashable
    if unknown := data.keys() - known.keys():
        raise MalformedError(f"{where}: unknown field {_shown(min(unknown, key=str))}")
    values = {}
    for name, (hint, needed) in known.items():
        if name in data:
            values[name] = _parsed(hint, data[name], f"{where}.{name}")
        elif needed:
            raise MalformedError(f"{where}: {name} is missing")
    try:
        return kind(**values)
    except ValueError as error:
        raise MalformedError(f"{where}: {error}") from error


@functools.cache
def _known(kind: type) -> dict[str, tuple[Any, bool]]:
    """Field → what it holds, whether it must be there."""
    hints = get_type_hints(kind)
    return {
        field.name: (
            hints[field.name],
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(kind)
        if field.init
    }


def _parsed(hint: Any, data: object, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):  # the only union there is: with None
        (inner,) = (arm for arm in get_args(hint) if arm is not type(None))
        return None if data is None else _parsed(inner, data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise MalformedError(f"{where}: {_shown(data)} is not a list")
        return tuple(_parsed(get_args(hint)[0], item, where) for item in data)
    if origin is not None:
        key_hint, value_hint = get_args(hint)
        return _mapping(key_hint, value_hint, data, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(data)
        except ValueError:
            raise MalformedError(
                f"{where}: {_shown(data)} is none of {', '.join(member.value for member in hint)}"
            ) from None
    return (
        _scalar(hint, data, where)
        if hint in (int, float, str, bool)
        else from_json(hint, data, where)
    )


def _mapping(key_hint: type, value_hint: Any, data: object, where: str) -> Mapping[Any, Any]:
    if not isinstance(data, dict):
        raise MalformedError(f"{where}: {_shown(data)} is not an object")
    found: dict[Any, Any] = {}
    for key, value in data.items():
        if key_hint is int and not (key.isascii() and key.isdigit() and len(key) < 19):
            raise MalformedError(f"{where}: {_shown(key)} is not a count")
        found[key_hint(key)] = _parsed(value_hint, value, f"{where}[{_shown(key)}]")
    return found


def _scalar(hint: type, data: object, where: str) -> object:
    if hint is int and type(data) is int and 0 <= data <= COUNT_MAX:
        return data
    if hint is float and isinstance(data, int | float) and not isinstance(data, bool):
        return float(data) if abs(data) < COUNT_MAX or isinstance(data, float) else math.inf
    if hint in (str, bool) and type(data) is hint:
        return data
    names = {int: "a count", float: "a number", str: "a text", bool: "true or false"}
    raise MalformedError(f"{where}: {_shown(data)} is not {names[hint]}")


def _shown(data: object) -> str:
    text = repr(data)
    return text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…"
