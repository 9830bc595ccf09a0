"""What a process says as it ends: nothing that goes wrong with that keeps it from ending as it was
to.

Its log may lie on a file system that is full, its reader may be gone, or the program may have put
something of its own in place of the streams.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn


def tell(text: str) -> None:
    """A line, or several, to stderr, if that is possible."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def tell_error(error: BaseException) -> None:
    """What the program would have ended with, and where, as the interpreter says it."""
    tell("".join(traceback.format_exception(error)).rstrip("\n"))


def end_process(status: int) -> NoReturn:
    """At once, with this status: threads of groups that are broken would wait for each other."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
