"""How a close is told from the end of a process, and that from a kill: by what /proc said of real
ones (Linux 6.18) while they closed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from acpfs.filesystem.closing import Closing, closing_of
from acpfs.filesystem.last_close import Openers
from acpfs.processes import has_ended
from acpfs.runtime.threads import THREADS

SIGKILL = 1 << 8
SIGTERM = 1 << 14
SIGCHLD = 1 << 16


@dataclass
class Process:
    """The thread that closes is the last one."""

    threads: list[tuple[str, int]]
    pending: int = 0
    blocked: int = 0
    caught: int = 0

    def under(self, proc: Path) -> int:
        """Write what /proc shows; returns the number of the thread that closes."""
        (proc / "self").symlink_to(str(os.getpid()))
        numbers = [10 + at for at in range(len(self.threads))]
        for number in numbers:
            for task, (state, flags) in zip(numbers, self.threads, strict=True):
                (proc / str(number) / "task" / str(task)).mkdir(parents=True)
                (proc / str(number) / "task" / str(task) / "stat").write_text(
                    _stat(task, state, flags)
                )
        for number, (state, flags) in zip(numbers, self.threads, strict=True):
            (proc / str(number) / "stat").write_text(_stat(number, state, flags))
            signals = {
                "SigPnd": 0,
                "ShdPnd": self.pending,
                "SigBlk": self.blocked,
                "SigIgn": 0,
                "SigCgt": self.caught,
            }
            lines = [f"{name}:\t{bits:016x}\n" for name, bits in signals.items()]
            text = "Name:\tpy thon)\n" + "".join(lines)
            (proc / str(number) / "status").write_text(text)
            for other in numbers:
                (proc / str(other) / "task" / str(number) / "status").write_text(text)
        return numbers[-1]


def _stat(number: int, state: str, flags: int) -> str:
    return f"{number} (py thon)) {state} 1 1 1 0 -1 {flags} 0 0\n"


CASES = {
    "close": (Process([("S", 0x400100)]), Closing.CALL),
    "close, with a deadly signal on its way": (
        Process([("S", 0x400100)], pending=SIGKILL),
        Closing.CALL,
    ),
    "exit": (Process([("S", 0x40010C)]), Closing.END),
    "exit by the first of several threads": (
        Process([("Z", 0x40810C), ("S", 0x40044C)]),
        Closing.END,
    ),
    "exit by another thread, which is gone": (
        Process([("Z", 0x40850C), ("S", 0x40044C)]),
        Closing.END,
    ),
    "exit, while a harmless signal waits": (
        Process([("S", 0x40044C)], pending=SIGCHLD),
        Closing.END,
    ),
    "exit, while a blocked signal waits": (
        Process([("S", 0x40044C)], pending=SIGTERM, blocked=SIGTERM),
        Closing.END,
    ),
    "exit, while a signal waits that would be handled": (
        Process([("S", 0x40044C)], pending=SIGTERM, caught=SIGTERM),
        Closing.END,
    ),
    "kill -9": (Process([("D", 0x40050C)], pending=SIGKILL), Closing.KILL),
    "SIGTERM": (Process([("D", 0x40050C)], pending=SIGTERM), Closing.KILL),
    "kill -9 of several threads": (
        Process([("Z", 0x40850C), ("D", 0x40044C)], pending=SIGKILL),
        Closing.KILL,
    ),
    "abort": (Process([("S", 0x40070C)]), Closing.KILL),
    "abort in the first of several threads": (
        Process([("Z", 0x40870C), ("S", 0x40044C)]),
        Closing.KILL,
    ),
    "a signal to one thread: not told from exit by a thread that is gone": (
        Process([("S", 0x40050C)]),
        Closing.END,
    ),
    "it was killed and is gone, and somebody else has a copy": (
        Process([("Z", 0x40850C)], pending=SIGKILL),
        Closing.CALL,
    ),
}


@pytest.mark.clause("S181")
@pytest.mark.parametrize("name", CASES)
def test_what_proc_says(tmp_path: Path, name: str) -> None:
    process, expected = CASES[name]
    assert closing_of(process.under(tmp_path), tmp_path) is expected


OF_PROCESS = {
    "kill -9": (Process([("Z", 0x40850C), ("D", 0x40044C)], pending=SIGKILL), Closing.KILL),
    "kill -9, its first thread had ended before": (
        Process([("Z", 0x40810C), ("D", 0x40044C)], pending=SIGKILL),
        Closing.KILL,
    ),
    "exit by another thread": (
        Process([("Z", 0x40850C), ("S", 0x40010C)], pending=SIGTERM),
        Closing.END,
    ),
    "exit by another thread, its first one had ended before": (
        Process([("Z", 0x40810C), ("S", 0x40010C)]),
        Closing.END,
    ),
    "abort by another thread": (Process([("Z", 0x40850C), ("S", 0x40070C)]), Closing.KILL),
    "it was killed and is gone": (
        Process([("Z", 0x40850C), ("Z", 0x40850C)], pending=SIGKILL),
        Closing.CALL,
    ),
}


@pytest.mark.clause("S536")
@pytest.mark.parametrize("name", OF_PROCESS)
def test_what_proc_says_where_only_the_process_is_known(tmp_path: Path, name: str) -> None:
    process, expected = OF_PROCESS[name]
    last = process.under(tmp_path)
    assert closing_of(last - len(process.threads) + 1, tmp_path) is expected


@pytest.mark.clause("S536")
def test_a_process_goes_on_whose_first_thread_has_ended(tmp_path: Path) -> None:
    process = Process([("Z", 0x40810C), ("S", 0x400140)], pending=SIGKILL)
    first = process.under(tmp_path) - 1
    for number in (first, first + 1):
        status = tmp_path / str(first) / "task" / str(number) / "status"
        status.write_text("State:\tS\n" + "VmSize:\t 132 kB\n" * (number != first))
    assert closing_of(first, tmp_path) is Closing.CALL


@pytest.mark.clause("S537")
def test_a_program_s_name_is_no_line_of_its_status(tmp_path: Path) -> None:
    """The kernel escapes a line feed in it, and no other end of a line."""
    status = "Name:\ta\x0cTgid:\t1\nTgid:\t4321\n"
    (tmp_path / "self").symlink_to(str(os.getpid()))
    (tmp_path / str(1 << 30)).mkdir()
    (tmp_path / str(1 << 30) / "status").write_text(status)
    assert Openers("", THREADS, tmp_path).process_of(1 << 30) == 4321


@pytest.mark.clause("S499")
def test_who_closes_by_its_exec_is_not_asked_for_what_it_keeps_locked(tmp_path: Path) -> None:
    """Its `stat` waits for the end of the exec, which waits for the answer to this very close: all
    programs that list processes stood still until somebody ended the mount.
    """
    number = Process([("S", 0x400100)]).under(tmp_path)
    for directory in (tmp_path / str(number), tmp_path / str(number) / "task" / str(number)):
        (directory / "stat").unlink()
        os.mkfifo(directory / "stat")
        (directory / "status").write_text("Name:\ttrue\nState:\tD (disk sleep)\nVmSize:\t 132 kB\n")
    assert closing_of(number, tmp_path) is Closing.CALL
    assert not has_ended(tmp_path / str(number))


def test_what_cannot_be_told_is_a_close(tmp_path: Path) -> None:
    assert closing_of(0) is Closing.CALL, "a process of another PID namespace"
    assert closing_of(17, tmp_path) is Closing.CALL, "one that is gone, or hidden"
    Process([("D", 0x40050C)], pending=SIGKILL).under(tmp_path)
    (tmp_path / "10" / "status").write_text("?")
    assert closing_of(10, tmp_path) is Closing.CALL
