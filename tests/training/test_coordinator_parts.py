"""The store of a generation, whose processes are exiting, and whose work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.training.coordinator.exiting import Processes, started_at
from acpfs.training.coordinator.store import BYTES_MAX, Store
from acpfs.training.coordinator.working import BUSY_S, IDLE_S, SHARE, TICKS_PER_S, Working
from acpfs.training.messages import StoreAnswer, StoreAsk, StoreVerb
from tests.rig.processes import stop_processes
from tests.training.gasp_job import until

clause = pytest.mark.clause
V = StoreVerb


def ask(
    store: Store, verb: StoreVerb, *keys: str, value: str = "", expected: str = "", rank: int = 0
) -> list[tuple[int, StoreAnswer]]:
    return store.ask(rank, StoreAsk(7, verb, keys, value, expected, 10.0), 100.0)


def test_get_waits_until_the_key_is_there() -> None:
    store = Store()
    assert ask(store, V.GET, "a", rank=1) == []
    assert ask(store, V.WAIT, "a", "b", rank=2) == []
    assert ask(store, V.SET, "a", value="ff") == [(0, StoreAnswer(7)), (1, StoreAnswer(7, "ff"))]
    assert ask(store, V.ADD, "b", value="3") == [(0, StoreAnswer(7, "3")), (2, StoreAnswer(7))]
    assert ask(store, V.ADD, "b", value="-1") == [(0, StoreAnswer(7, "2"))]
    assert ask(store, V.GET, "b") == [(0, StoreAnswer(7, b"2".hex()))]


def test_who_waits_too_long_or_beyond_the_generation_is_told() -> None:
    store = Store()
    ask(store, V.GET, "a", rank=1)
    assert store.late(109.0) == []
    assert store.late(110.0) == [(1, StoreAnswer(7, late=True))]
    ask(store, V.GET, "a", rank=2)
    assert store.end() == [(2, StoreAnswer(7, late=True))]


def test_compare_set_check_and_delete() -> None:
    store = Store()
    assert ask(store, V.COMPARE_SET, "a", value="01", expected="") == [(0, StoreAnswer(7, "01"))]
    assert ask(store, V.COMPARE_SET, "a", value="02", expected="03") == [(0, StoreAnswer(7, "01"))]
    assert ask(store, V.CHECK, "a", "b") == [(0, StoreAnswer(7, "0"))]
    assert ask(store, V.DELETE, "a") == [(0, StoreAnswer(7, "1"))]
    assert ask(store, V.DELETE, "a") == [(0, StoreAnswer(7, "0"))]


def test_the_store_is_bounded() -> None:
    store = Store()
    big = "00" * (BYTES_MAX // 4)
    for key in "abc":
        ask(store, V.SET, key, value=big)
    assert ask(store, V.CHECK, "a", "b") == [(0, StoreAnswer(7, "1"))]
    assert ask(store, V.CHECK, "c") == [(0, StoreAnswer(7, "0"))]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_that_is_killed_is_told_once(sleeper: subprocess.Popen[bytes]) -> None:
    processes = Processes()
    assert processes.watch(3, sleeper.pid, started_at(sleeper.pid))
    assert processes.exiting() == []
    sleeper.kill()
    until(lambda: processes.exiting() == [3])
    assert processes.exiting() == []


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@clause("T152")
def test_a_process_that_only_waits_works_for_a_minute_and_one_that_is_stopped_does_not(
    sleeper: subprocess.Popen[bytes],
) -> None:
    processes = Processes()
    working = Working(processes)
    assert working.at_work([0], 0.0) == []  # not of this node
    processes.watch(0, sleeper.pid, started_at(sleeper.pid))
    until(lambda: state_of(sleeper.pid) == "S")
    assert working.at_work([0], 0.0) == [0]
    assert (working.at_work([0], IDLE_S), working.at_work([0], IDLE_S + 1)) == ([0], [])
    assert working.at_work([], IDLE_S + 2) == []  # it has spoken, and is silent again
    assert working.at_work([0], IDLE_S + 3) == [0]
    stop_processes([sleeper.pid])
    assert working.at_work([0], IDLE_S + 4) == []
    sleeper.send_signal(signal.SIGCONT)
    until(lambda: state_of(sleeper.pid) != "T")
    assert working.at_work([0], IDLE_S + 5) == [0]
    sleeper.kill()
    until(lambda: working.at_work([0], IDLE_S + 6) == [])
    processes.close()


@clause("T152")
def test_a_process_that_computes_works() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        processes = Processes()
        processes.watch(0, process.pid, started_at(process.pid))
        working = Working(processes)
        assert working.at_work([0], 0.0) == [0]
        used = (
            (processes.ticks(0) or 0) + int(10 * TICKS_PER_S * SHARE) + 1
        )  # what threads take that wait for a lock is less
        until(lambda: (processes.ticks(0) or 0) > used)
        assert working.at_work([0], 10.0) == [0]
        assert working.at_work([0], 10.0 + IDLE_S) == [0]
        process.kill()
        processes.close()


@clause("T152")
def test_a_process_that_moves_bytes_works_for_ten_minutes() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys\nfor _ in sys.stdin: pass"], stdin=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        processes = Processes()
        processes.watch(0, process.pid, started_at(process.pid))
        working = Working(processes)
        io = Path(f"/proc/{process.pid}/io")
        for now in range(0, int(BUSY_S) + 1, 50):
            before = io.read_bytes()
            process.stdin.write(b"\n")
            process.stdin.flush()
            until(lambda before=before: io.read_bytes() != before)  # type: ignore[misc]
            assert working.at_work([0], float(now)) == [0]
        assert working.at_work([0], BUSY_S + 1) == []
        process.kill()
        processes.close()


def test_another_process_of_that_number_is_not_watched() -> None:
    processes = Processes()
    assert not processes.watch(0, os.getpid(), started_at(os.getpid()) + 1)
    assert not processes.watch(0, 1 << 22, 1)
    with pytest.raises(OSError, match="No such file"):
        started_at(1 << 22)
    processes.close()
