"""The start of a mount ends: ready, or one line that says what is wrong, whatever hangs or dies on
the way.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from acpfs.config import Settings
from acpfs.errors import DeadlineError, ExitCode, MachineError, RefusedError
from acpfs.mounting import starting
from acpfs.mounting.checks import apart, within
from acpfs.supervisor import channel
from acpfs.supervisor.child import Child, Limits
from acpfs.supervisor.supervisor import Supervisor
from acpfs.supervisor.templates import Template, Templates
from tests.rig.hanging_code import code_that_hangs, flag_of
from tests.rig.mounts import (
    LOOK_AGAIN_S,
    REPOSITORY,
    AcpfsMount,
    CommandError,
    is_mounted,
    wait_gone,
)

WAIT_S = 120.0
STEP_S = 30
"""What hangs costs a test so long; a start whose every step takes a second on a busy machine must
not hang by that.
"""
"""For a step that hangs; the others, such as to load the program, must get by with it where two
tests share each processor.
"""


def test_a_check_that_fails_by_a_bug_has_not_passed() -> None:
    with pytest.raises(ZeroDivisionError):
        within(WAIT_S, "does not answer", lambda: [1 // 0].clear())


@pytest.mark.clause("S89")
def test_a_look_from_a_process_of_its_own() -> None:
    assert apart(WAIT_S, "does not answer", lambda: [bytes(1 << 18), os.getpid()])[0] == bytes(
        1 << 18
    )
    assert apart(WAIT_S, "does not answer", os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        apart(WAIT_S, "does not answer", lambda: 1 // 0)
    with pytest.raises(RefusedError, match="in use"):
        apart(WAIT_S, "does not answer", lambda: fail(RefusedError("in use")))
    with pytest.raises(MachineError, match=r"does not answer \(waited 0.1 s\)"):
        apart(0.1, "does not answer", signal.pause)


def fail(error: Exception) -> None:
    raise error


class OneTemplate(Templates):
    """A double: that one, and no other."""

    def __init__(self, template: Template, *others: Any) -> None:
        super().__init__(*others)
        self._one = template

    def spawn(self) -> Template:
        self._watch(self._one.end, lambda: self._heard(self._one))
        return self._one


class TemplatelessSupervisor(Supervisor):
    """A double: its template is the test, at the other end of `orders`; it leaves the signals of
    this process alone.
    """

    def __init__(self, answer_fd: int = -1) -> None:
        super().__init__({}, answer_fd)
        self.orders, theirs = channel.pair()
        self.orders.settimeout(WAIT_S)
        one = Template(theirs, dead_and_buried())  # the supervisor kills its template at the end
        self._templates = OneTemplate(one, self._watch, self._forget, self._hear_template)
        self._thread = threading.Thread(target=self.run, daemon=True)

    def _heed_signals(self) -> None:
        pass

    def begin(self) -> None:
        self._thread.start()

    def wait_ended(self) -> int:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self._exit_code

    def put_away(self) -> None:
        self._ended = True
        with contextlib.suppress(OSError):
            self.orders.send(b"{}")
        self.wait_ended()
        self.orders.close()
        self._templates.end()
        if self._child is not None:
            self._forget(self._child.end)
        self._selector.close()
        for fd in (fd for fds in self._kept.values() for fd in fds):
            os.close(fd)


def dead_and_buried() -> int:
    """Number of a process that was waited for."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_worker_that_has_come_and_gone_before_the_supervisor_looks_is_heard() -> None:
    """The supervisor gets its number, its error and its end in one look, when the number is
    nobody's any more.
    """
    read_fd, write_fd = os.pipe()
    supervisor = TemplatelessSupervisor(write_fd)
    said = {"exit_code": 5, "message": "in use"}
    looks = supervisor._selector.select

    def look(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """The worker's whole life lies before the first one."""
        supervisor._selector.select = looks  # type: ignore[method-assign]
        _orders, (fd,) = channel.receive(supervisor.orders)
        channel.send(supervisor.orders, {"pid": dead_and_buried()})
        with socket.socket(fileno=fd) as worker:
            channel.send(worker, {"error": said})
        return looks(timeout)

    supervisor._selector.select = look  # type: ignore[method-assign]
    supervisor.begin()
    try:
        assert supervisor.wait_ended() == 5
        with os.fdopen(read_fd, "rb") as answers:
            assert json.loads(answers.readline()) == {"error": said}
    finally:
        supervisor.put_away()


def test_the_processes_of_a_mount_load_while_it_is_checked_and_end_if_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACPFS_RUNTIME_DIR", os.fspath(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", os.fspath(REPOSITORY))
    mount = AcpfsMount(tmp_path, tmp_path / "mnt", runtime_dir=tmp_path / "run")
    both: list[int] = []

    def refuse() -> starting.Prepared:
        until = time.monotonic() + WAIT_S
        while len(found := mount.living()) < 2 and time.monotonic() < until:
            select.select([], [], [], LOOK_AGAIN_S)
        both.extend(found)
        raise RefusedError("in use")

    with pytest.raises(RefusedError, match="in use"):
        starting.start(refuse)
    assert len(both) == 2, "supervisor and template"
    for pid in both:
        wait_gone(pid, WAIT_S)


def test_a_supervisor_that_is_stopped_ends_the_wait_for_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells one step of the start, so it has its time again, and then nothing more."""
    program = (
        'import os, sys; os.write(int(sys.argv[2]), b\'{"step": "one"}\\n\'); '
        "os.kill(os.getpid(), 19)"
    )
    monkeypatch.setattr(starting, "SUPERVISOR", (sys.executable, "-c", program))
    monkeypatch.setattr(starting, "SUPERVISOR_LATE_S", 0.0)
    monkeypatch.setenv("ACPFS_START_TIMEOUT_S", "2")
    settings = Settings(backing=tmp_path, mountpoint=tmp_path / "mnt", log_file=tmp_path / "log")
    with pytest.raises(DeadlineError, match="hangs, or was stopped") as caught:
        within(
            WAIT_S, "does not return", lambda: starting.start(lambda: starting.Prepared(settings))
        )
    pid = int(str(caught.value).partition("process ")[2].partition(")")[0])
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_the_steps_of_a_start_are_told_to_whoever_mounts() -> None:
    read_fd, write_fd = os.pipe()
    supervisor = TemplatelessSupervisor(write_fd)
    supervisor.begin()
    try:
        _orders, (fd,) = channel.receive(supervisor.orders)
        with socket.socket(fileno=fd) as worker, os.fdopen(read_fd, "rb") as answers:
            channel.send(worker, {"step": "opening the log file"})
            assert json.loads(answers.readline()) == {"step": "opening the log file"}
            channel.send(worker, {"serving": "/mnt"})
            assert json.loads(answers.readline()) == starting.READY
            assert answers.readline() == b""
    finally:
        supervisor.put_away()


@pytest.mark.clause("S82")
def test_what_a_dead_worker_handed_over_is_given_to_the_next_one() -> None:
    """The worker started a supervisor, handed the session over and was killed before that one began
    to look.
    """
    ours, theirs = channel.pair()
    session, other = channel.pair()
    with ours, session:
        state = {"facts": {"session": "token"}, "settings": {}, "workers": 1}
        channel.send(
            ours,
            {"adopt": dead_and_buried(), "keep": [["session", 1]], **state},
            [session.fileno()],
        )
    supervisor = TemplatelessSupervisor()
    try:
        supervisor.adopt(theirs)
        supervisor.begin()
        orders, fds = channel.receive(supervisor.orders)
        assert orders is not None
        assert (orders["keep"], orders["facts"], orders["workers_before"]) == (
            [["session", 1]],
            {"session": "token"},
            1,
        )
        with socket.socket(fileno=fds[0]), socket.socket(fileno=fds[1]) as given, other:
            given.send(b"it is the one")
            assert other.recv(100) == b"it is the one"
    finally:
        supervisor.put_away()


def test_each_step_of_a_start_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACPFS_START_TIMEOUT_S", "10")
    ours, theirs = channel.pair()
    with ours, theirs:
        child = Child(ours)
        limits = Limits()
        begun = child.step_at
        assert child.is_well(begun + 9, limits)
        child.heard({"step": "mounting"})
        child.step_at = begun + 9
        assert child.is_well(begun + 18, limits)
        assert child.error is None
        assert not child.is_well(begun + 19.5, limits)
        assert child.error == {
            "exit_code": ExitCode.ENVIRONMENT,
            "message": (
                "the start did not get past this step within 10 s: mounting; the stacks are in "
                "the log"
            ),
        }


PLACES = {
    "loading the program": (
        "acpfs/worker/template.py",
        "\ndef main() -> None:\n",
        "    hang_here()\n",
    ),
    "reading the state in": (
        "acpfs/ram/state.py",
        "        self.path = path\n        self.space = space\n",
        "        hang_here()\n",
    ),
    "mounting on": (
        "acpfs/transport/native/serve.py",
        '        MachineError: FUSE is not permitted here.\n    """\n',
        "    hang_here()\n",
    ),
}


@pytest.fixture
def hanging(
    tmp_path_factory: pytest.TempPathFactory, transport: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], AcpfsMount]:
    """Makes mounts, not started, of code that hangs at a step; each in a directory of its own,
    where its flag is too.
    """
    monkeypatch.setenv("ACPFS_START_TIMEOUT_S", str(STEP_S))

    def make(step: str) -> AcpfsMount:
        base = tmp_path_factory.mktemp("hanging")
        (base / "backing").mkdir()
        environment = {"PYTHONPATH": str(code_that_hangs(base, PLACES[step]))}
        words: dict[str, Any] = {"log_file": str(base / "log"), "environment": environment}
        return AcpfsMount(base / "backing", base / "mnt", transport, **words)

    return make


needs_fuse = pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S89")
@pytest.mark.transports("native")
def test_what_hangs_is_ended_when_its_time_is_up(hanging: Callable[[str], AcpfsMount]) -> None:
    """All places beside each other: each waits for the end of its time, and does nothing else."""
    cases = [
        functools.partial(a_start_that_hangs_ends_with_the_step_that_it_hangs_in, hanging, step)
        for step in PLACES
    ]
    cases.append(functools.partial(new_code_that_does_not_load_is_told, hanging))
    with ThreadPoolExecutor(len(cases)) as pool:
        ends = [pool.submit(case) for case in cases]
    for end in ends:
        end.result()


def a_start_that_hangs_ends_with_the_step_that_it_hangs_in(
    hanging: Callable[[str], AcpfsMount], step: str
) -> None:
    mount = hanging(step)
    base = mount.path.parent
    flag_of(base).touch()
    try:
        with pytest.raises(
            CommandError, match=f"did not get past this step within {STEP_S} s: {step}"
        ) as caught:
            mount.start()
        assert caught.value.code == ExitCode.ENVIRONMENT
        assert step == "loading the program" or "in hang_here" in (base / "log").read_text()
        assert not is_mounted(mount.path)
        assert [leak for leak in mount.leaks() if str(mount.runtime_dir) not in leak] == []
        mount.start()
    finally:
        mount.abort()


def new_code_that_does_not_load_is_told(hanging: Callable[[str], AcpfsMount]) -> None:
    with hanging("loading the program") as mount:
        flag_of(mount.path.parent).touch()
        with pytest.raises(CommandError, match="the new code cannot be loaded"):
            mount.ctl("reload")
        (mount.path / "f").write_text("the old code goes on")


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S81", "S89")
@pytest.mark.transports("native")
def test_a_worker_that_hangs_while_it_takes_over_is_replaced(
    hanging: Callable[[str], AcpfsMount],
) -> None:
    """Alone: whatever this process starts has a copy of the open file, and to close that waits for
    the worker, too.
    """
    with (
        hanging("reading the state in") as mount,
        open(mount.path / "f", "wb", buffering=0) as file,
    ):
        file.write(b"one ")
        flag = flag_of(mount.path.parent)
        flag.touch()
        mount.kill_worker()
        file.write(b"two")
        assert mount.status()["worker"]["last_end"] == "hung"
        assert not flag.exists()
        file.close()
        mount.flush()
        assert (mount.backing / "f").read_bytes() == b"one two"
