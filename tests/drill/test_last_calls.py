"""The last call before a daemon's death: at each step of it the checker knows what may be left, and
its helpers notice what they must.

A library's save is one entry of the journal and several calls, of which the last is a close: what
dies inside that leaves a half (S181).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from acpfs.descriptors import readable
from tests.drill import points
from tests.drill.calls import CallError, Calls
from tests.drill.faults import Outcome, come_back
from tests.drill.history import History
from tests.drill.large import LargeGuardStand, LargeStand
from tests.drill.spec import Call, JournalReader, JournalWriter, digest
from tests.drill.stand import Stand
from tests.drill.verdict import check_mount, check_published
from tests.drill.watch import Watch
from tests.rig.processes import stop_processes

pytestmark = pytest.mark.timeout(600)
OLD = b"net-1.ckpt"
NEW = b"net-2.ckpt"
TRACKER = "latest_checkpointed_iteration.txt"


def called(*words: object, errno: int | None = 0) -> Call:
    return Call(1, words, 1.0, errno, 2.0 if errno == 0 else 0.0)


def held_against(history: History, **files: bytes) -> list[str]:
    return check_published(
        history,
        {name: ("file", digest(what)) for name, what in files.items()},
        9.0,
        "backing directory",
    )


def test_a_save_without_an_answer_may_have_left_a_half() -> None:
    """Its bytes are in the mount, and its close is what nobody heard an answer to."""
    history = History({"t": ("file", digest(OLD))})
    history.follow([called("store", "t", digest(NEW), errno=None)])
    history, losses = check_mount(history, {"t": ("file", digest(NEW))}, {"t": NEW})
    history.lose_writers()
    assert losses == []
    assert history.unsure == {"t": ("file", digest(OLD))}
    assert held_against(history, t=OLD) == []
    assert held_against(history, t=NEW) == []
    assert held_against(history, t=b"")


def test_a_new_file_that_a_library_had_only_opened_may_be_published() -> None:
    history = History()
    history.follow([called("store", "t", digest(NEW), errno=None)])
    history, losses = check_mount(history, {"t": ("file", digest(b""))}, {"t": b""})
    history.lose_writers()
    assert losses == []
    assert held_against(history) == []
    assert held_against(history, t=b"") == []
    assert held_against(history, t=NEW)


def test_beside_a_save_in_doubt_a_file_that_was_only_opened_may_be_published() -> None:
    history = History({"t": ("file", digest(OLD))})
    history.follow(
        [called("open", "other", 0, True), called("store", "t", digest(NEW), errno=None)]
    )
    history, _losses = check_mount(
        history,
        {"t": ("file", digest(NEW)), "other": ("file", digest(b""))},
        {"t": NEW, "other": b""},
    )
    history.lose_writers()
    for files in ({"t": OLD}, {"t": OLD, "other": b""}, {"t": NEW, "other": b""}):
        assert held_against(history, **files) == []


def test_an_empty_pointer_names_nothing(tmp_path: Path) -> None:
    (tmp_path / TRACKER).touch()
    watch = Watch(tmp_path)
    for _ in range(2):
        watch.look_around()
    assert watch.take() == [(TRACKER, ("file", digest(b"")))] * 2


def test_an_observer_that_died_is_a_loss(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    at_work = threading.Event()

    def fail() -> None:
        at_work.set()
        raise OSError("the directory is gone")

    watch.look_around = fail  # type: ignore[method-assign]
    watch.start()
    assert at_work.wait(60)
    watch.stop()
    (loss,) = watch.judge(History())
    assert "the directory is gone" in loss


class StartsAnew(Stand):
    """At most looks another process of the mount has been started; one look misses it, as it is
    executing another program.
    """

    def __init__(self, base: Path) -> None:
        super().__init__(base, "overwrite", "native", 1)
        self.started: list[subprocess.Popen[bytes]] = []
        self._finds = iter([True, True, True, False, True])

    def processes(self) -> list[int]:
        if not next(self._finds, False):
            return []
        self.started.append(subprocess.Popen(["sleep", "1000"]))
        return [self.started[-1].pid]


def test_whatever_starts_anew_is_killed_too(tmp_path: Path) -> None:
    stand = StartsAnew(tmp_path / "s")
    stand.kill_all()
    assert [process.wait(60) for process in stand.started] == [-signal.SIGKILL] * 4


def point(name: str) -> int:
    return next(number for number in range(len(points.POINTS)) if points.label(number)[3:] == name)


def write(path: Path, body: bytes) -> None:
    path.write_bytes(body)


DEATHS = {
    "before version saved": (point("before log: version saved"), 1),
    "after version saved": (point("after log: version saved"), 1),
    **{f"commit {passes}": (point("before state: commit"), passes) for passes in (1, 2, 3)},
}


def die_in(stand: Stand, death: tuple[int, int], call: Callable[[], None]) -> None:
    """The daemon dies during a call, at that point if the call passes it; nobody brings a worker
    back meanwhile.
    """
    worker = stand.mount.pid
    stop_processes(pid for pid in stand.processes() if pid != worker)
    stand.charge(*death)

    def make() -> None:
        with contextlib.suppress(CallError):
            call()

    caller = threading.Thread(target=make, daemon=True)
    caller.start()
    fd = os.pidfd_open(worker)
    try:
        while caller.is_alive() and not readable(fd, 0.1):
            pass
    finally:
        os.close(fd)
    stand.kill_all()
    caller.join(60)
    assert not caller.is_alive()


@pytest.mark.mount
@pytest.mark.long
@pytest.mark.clause("S181")
@pytest.mark.parametrize("tracker_before", [True, False], ids=["over an older one", "a new one"])
@pytest.mark.parametrize("kind", [LargeStand, LargeGuardStand])
def test_a_tracker_whose_writer_lost_its_daemon_in_the_middle(
    kind: type[LargeStand], tracker_before: bool, tmp_path: Path
) -> None:
    """A deletion that the guard holds is there as well, as in the one case that the drill once took
    for a loss.
    """
    with kind(tmp_path / "s", "large beside", "native-direct", 1) as stand:
        for number, (name, death) in enumerate(DEATHS.items()):
            journal = JournalWriter(tmp_path / f"journal.{number}")
            calls = Calls(stand.mount.path, journal, stand.mount.runtime_dir)
            calls.paths = dict.fromkeys(stand.history.now(), False)

            def store(text: str, calls: Calls = calls) -> None:
                body = text.encode()
                calls.store(TRACKER, digest(body), lambda path: write(path, body))

            if tracker_before:
                store(f"older {number}")
            elif TRACKER in calls.paths:
                calls.unlink(TRACKER)
            for part in range(3):
                calls.save(f"net-{number}_{part}.ckpt", number, 2_000_000, pieces=3)
            calls.unlink(f"net-{number}_0.ckpt")
            stand.mount.flush()
            die_in(stand, death, lambda: store("newer"))
            journal.close()
            stand.history.follow(JournalReader(tmp_path / f"journal.{number}").calls())
            assert stand.history.doubt is None or stand.history.doubt.words[0] == "store"
            outcome = Outcome()
            come_back(stand, outcome)
            assert outcome.losses == [], name
