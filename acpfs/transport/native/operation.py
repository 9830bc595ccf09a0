"""How one opcode is handled: decoding the request, encoding the answer, and what gives back what an answer that was not taken carried.

Only the record; the table is in `calls`. By itself so that `calls`, `dispatch` and `continuations` all know it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from acpfs.filesystem.steps import Call
from acpfs.transport.native.request import Request


class Operation(NamedTuple):
    """How one opcode is handled."""

    decode: Callable[[Request], Call[Any]]
    encode: Callable[[Request, Any], bytes | memoryview]
    undo: Callable[[Any], None] | None = None
    """Gives back what the call took, when the kernel did not get the reply."""
    at_once: Callable[[Request], Any | int | None] | None = None
    """The value, or an errno, where that needs no call; None: make the call."""
