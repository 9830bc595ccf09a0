"""Options with units: `90s`, `2h`, `30d`, `70e9`."""

from __future__ import annotations

import math
import re

import click

from acpfs.config import parse_size

_SECONDS = {
    "ms": 0.001,
    "": 1.0,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
    "y": 365.25 * 86400.0,
}
_TIME = re.compile(r"^(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([a-z]*)$", re.IGNORECASE)


def time(text: str) -> float:
    """Seconds from a number with a unit; seconds without one.

    A type of click's; its name is what help shows.
    """
    match = _TIME.match(text.strip())
    unit = _SECONDS.get(match[2].lower()) if match else None
    if match is None or unit is None or not math.isfinite(float(match[1]) * unit):
        raise click.BadParameter(f"{text!r} is not a time such as 90s, 15m, 2h, 30d or 5y")
    return float(match[1]) * unit


def size(text: str) -> int:
    """Bytes, as mount options have them. A type of click's."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def long_duration(seconds: float) -> str:
    """0.25 → `250 ms`, 100000 → `27.8 h`; `never` for infinity.

    Two or three digits: these are estimates.
    """
    if math.isinf(seconds):
        return "never"
    for unit, size in (("ms", 0.001), ("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86400.0)):
        bound = {"ms": 1.0, "s": 120.0, "min": 7200.0, "h": 172800.0}.get(unit, math.inf)
        if seconds < bound:
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError("unreachable: days have no bound")
