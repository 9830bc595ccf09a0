"""What a process says as it ends never decides how it ends."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from acpfs.training import last_words

STATUS = 75
FULL = "/dev/full"


class Hostile(io.StringIO):
    """In place of a stream."""

    def write(self, _text: str, /) -> int:
        raise RuntimeError("nobody reads")

    def flush(self) -> None:
        raise RuntimeError("nobody reads")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def full() -> io.TextIOWrapper:
    stream = os.fdopen(os.open(FULL, os.O_WRONLY), "w")
    stream.write("before")
    return stream


STREAMS: dict[str, Callable[[], Any]] = {
    "full": full,
    "closed": closed,
    "hostile": Hostile,
    "none": lambda: None,
}


@pytest.mark.clause("T235")
@pytest.mark.parametrize("kind", STREAMS)
def test_a_process_ends_as_it_was_to(kind: str) -> None:
    pid = os.fork()
    if not pid:
        try:
            stream = STREAMS[kind]()
            sys.stdout = stream
            sys.stderr = stream
            last_words.tell_error(ValueError("why"))
            last_words.end_process(STATUS)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == STATUS


@pytest.mark.clause("T235")
def test_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    try:
        raise ValueError("the reason")
    except ValueError as error:
        last_words.tell_error(error)
    lines = said.getvalue().splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: the reason"
