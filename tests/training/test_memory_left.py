"""What a process leaves to the next one: kept by a child of it, until somebody has it, or nobody is
left who could come.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.training.memory_left import GoneError, Left, name_of
from tests.training.gasp_job import ROOT, until

pytestmark = pytest.mark.clause("T159")
LEAVES = """
import ctypes, os, sys
from acpfs.training import memory_left
from acpfs.training.memory_left import Span, end_soon, leave
memory_left.END_S = 120.0  # how long it may take is for ranks: these may not get a turn for a while
memory_left.READY_S = 60.0
end_soon()
kept = [ctypes.create_string_buffer(bytes([number]) * 3_000_000, 3_000_000) for number in (1, 2)]
spans = [Span(ctypes.addressof(one), len(one)) for one in kept]
print(leave(sys.argv[1], sys.argv[2].encode(), spans), flush=True)
os._exit(77)
"""


@pytest.fixture
def name(tmp_path: Path) -> Iterator[str]:
    """Whoever keeps something there ends with the test."""
    found = name_of(tmp_path, "job", 3)
    yield found
    if (left := Left.ask(found)) is not None:
        left.taken()


def leaves(name: str, head: str = "head") -> int:
    """A process that leaves something, and has ended; who keeps it."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, name, head],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 77
    return int(done.stdout)


def asked(name: str, head: bytes = b"head") -> Left:
    left = Left.ask(name)
    assert left is not None
    assert left.head == head
    return left


def test_the_next_process_has_it_and_another_one_where_that_dies(name: str) -> None:
    assert Left.ask(name) is None
    keeper = leaves(name)
    first = asked(name)
    found = bytearray(3_000_000)
    first.read(1, memoryview(found))
    first.close()  # as if it had died
    second = asked(name)
    second.read(0, memoryview(found))
    assert found == bytes([1]) * 3_000_000
    second.read(1, memoryview(found))
    assert found == bytes([2]) * 3_000_000
    assert not Path(f"/proc/{keeper}/cwd").samefile(ROOT)
    second.taken()
    until(lambda: Left.ask(name) is None)


def test_who_dies_while_it_keeps_it_is_told_of(name: str) -> None:
    keeper = leaves(name)
    left = asked(name)
    os.kill(keeper, 9)
    with pytest.raises(GoneError):
        left.read(0, memoryview(bytearray(3_000_000)))
    left.close()


def test_who_keeps_it_ends_with_the_launcher(name: str) -> None:
    launcher = (
        "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], "
        "stdout=sys.stderr); print(flush=True); input()"
    )
    words = [sys.executable, "-c", launcher, "-c", LEAVES, name, "head"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        asked(name).close()
        process.stdin.close()
    until(lambda: Left.ask(name) is None)


def test_what_a_later_process_leaves_takes_the_place_of_what_an_earlier_one_has_left(
    name: str,
) -> None:
    """It has a state of its own, and nobody has told the first one's child so: the connection to it
    broke.
    """
    leaves(name, "first")
    leaves(name, "second")
    left = asked(name, b"second")
    found = bytearray(3_000_000)
    left.read(1, memoryview(found))
    assert found == bytes([2]) * 3_000_000
    left.close()


STUCK = """
import signal, sys
from acpfs.training import memory_left
memory_left._keep = lambda *_: signal.pause()
memory_left.READY_S = 0.1
try:
    memory_left.leave(sys.argv[1], b"", [])
except OSError as error:
    print(error)
"""


def is_free(name: str) -> bool:
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            listening.bind("\0" + name)
        except OSError:
            return False
    return True


def test_a_child_that_does_not_answer_does_not_stay(name: str) -> None:
    """It was forked while something held what it needs."""
    done = subprocess.run(
        [sys.executable, "-c", STUCK, name], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "does not answer" in done.stdout
    until(lambda: is_free(name))


def test_a_name_is_of_one_job_in_one_directory() -> None:
    one = name_of(Path("/a"), "job", 1)
    assert (
        len(
            {
                one,
                name_of(Path("/b"), "job", 1),
                name_of(Path("/a"), "other", 1),
                name_of(Path("/a"), "job", 2),
            }
        )
        == 4
    )
    assert name_of(Path("/a/."), "job", 1) == one
