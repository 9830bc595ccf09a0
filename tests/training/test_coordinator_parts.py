"""The store of a generation, and whose processes are exiting."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from acpfs.training.coordinator.exiting import Processes, started_at
from acpfs.training.coordinator.store import BYTES_MAX, Store
from acpfs.training.messages import StoreAnswer, StoreAsk, StoreVerb
from tests.training.gasp_job import until

V = StoreVerb


def ask(store: Store, verb: StoreVerb, *keys: str, value: str = "", expected: str = "", rank: int = 0) -> list[tuple[int, StoreAnswer]]:
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
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_that_is_killed_is_told_once(sleeper: subprocess.Popen[bytes]) -> None:
    processes = Processes()
    assert processes.watch(3, sleeper.pid, started_at(sleeper.pid))
    assert processes.exiting() == []
    sleeper.kill()
    until(lambda: processes.exiting() == [3])
    assert processes.exiting() == []


def test_another_process_of_that_number_is_not_watched() -> None:
    processes = Processes()
    assert not processes.watch(0, os.getpid(), started_at(os.getpid()) + 1)
    assert not processes.watch(0, 1 << 22, 1)
    with pytest.raises(OSError, match="No such file"):
        started_at(1 << 22)
    processes.close()
