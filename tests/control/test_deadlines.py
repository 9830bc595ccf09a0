"""Every verb and every command ends, whatever the worker does: it never answers, or says for ever
that it is at it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import click
import pytest

from acpfs.cli import ctl, umount
from acpfs.control import client, registry
from acpfs.control.registry import MountRecord, process_started
from acpfs.control.verb_table import VERBS
from acpfs.errors import AcpfsError, DeadlineError, NotMountedError

MOUNTPOINT = "/mnt/never-looked-at"
AT_IT = b'{"event": "progress", "operations": 1, "bytes": 1, "trouble": ""}\n'
SHORT_S = 0.05
ONE_PATH = f"{MOUNTPOINT}/f"
WORDS = {
    "status": [],
    "ready": [],
    "flush": ["--timeout", "0"],
    "wait": [ONE_PATH, "--timeout", "0"],
    "checkpoints": [],
    "history": [],
    "advise": ["--mtbf", "1d"],
    "ls": [],
    "verify": [],
    "doctor": [],
    "retry": [ONE_PATH],
    "reload": ["--timeout", "0"],
    "bypass": [],
    "repair": [ONE_PATH, "--timeout", "0"],
    "preload": [ONE_PATH, "--wait"],
    "pin": [ONE_PATH],
    "unpin": [ONE_PATH],
    "urgent": [ONE_PATH],
    "evict": [ONE_PATH],
    "release": ["--all"],
    "discard": [ONE_PATH],
    "nodes": ["wait", "--timeout", "0"],
    "adopt": ["lost", "--is-off", "--timeout", "0"],
    "config": [],
    "set": ["streams=1"],
    "metrics": [],
}
"""What each command is called with here."""
SHOWS_ON = {"top"}
"""Ends when its user says so; a worker that does not answer is a line on its screen."""

pytestmark = pytest.mark.clause("S442")


class Mute:
    """A worker that takes every connection and gives no result; `says`: what it says all the
    while.
    """

    def __init__(self, directory: Path, says: bytes = b"") -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        path = directory / "sockets" / "mute.sock"
        path.parent.mkdir(exist_ok=True)
        (directory / "mounts").mkdir(exist_ok=True)
        self._socket.bind(str(path))
        self._socket.listen(64)
        self._says = says
        self._over = threading.Event()
        pid = os.getpid()
        started = process_started(pid)
        self.record = MountRecord(
            MOUNTPOINT, "/b", "n", pid, started, str(path), "0", str(directory)
        )
        registry.write(self.record)
        self._thread = threading.Thread(target=self._babble)
        self._thread.start()

    def _babble(self) -> None:
        kept = []
        with suppress(OSError):
            while not self._over.is_set():
                connection, _address = self._socket.accept()
                kept.append(connection)
                with suppress(OSError):
                    while self._says and not self._over.wait(SHORT_S / 5):
                        connection.sendall(self._says)
        for connection in kept:
            connection.close()

    def close(self) -> None:
        self._over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(client, "SILENCE_S_MAX", SHORT_S)
    monkeypatch.setattr(client, "GRACE_S", SHORT_S)
    monkeypatch.setenv("ACPFS_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def mute(tmp_path: Path) -> Iterator[Mute]:
    made = Mute(tmp_path)
    yield made
    made.close()


@pytest.fixture
def _patient(_short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers may not get a turn for a while: then it is silent, and has no fault."""
    monkeypatch.setattr(client, "SILENCE_S_MAX", 600.0)


@pytest.fixture
def babbling(tmp_path: Path, _patient: None) -> Iterator[Mute]:
    made = Mute(tmp_path, AT_IT)
    yield made
    made.close()


def test_each_command_is_in_the_table() -> None:
    assert WORDS.keys() | SHOWS_ON == ctl.COMMANDS.keys()


def test_silence_of_a_process_that_is_gone_says_what_to_do(
    mute: Mute,
) -> None:
    """All were killed, and one cannot end: a call of its on the storage hangs. Its socket takes
    connections.
    """
    with pytest.raises(AcpfsError, match=r"does not answer$"):
        client.request(mute.record, "status")
    gone = replace(mute.record, pid_started=mute.record.pid_started + 1)
    registry.write(gone)
    with pytest.raises(AcpfsError, match=f"`acpfs mount /b {MOUNTPOINT}` goes on"):
        client.request(gone, "status")


@pytest.mark.clause("S620")
@pytest.mark.usefixtures("_patient")
def test_what_may_not_be_asked_twice_ends_soon_where_who_was_asked_was_killed(
    mute: Mute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one cannot end, and keeps the connection; what may be asked twice is asked again."""
    lives = iter([False])  # as the connection is made
    monkeypatch.setattr(client, "_is_killed", lambda _process: next(lives, True))
    monkeypatch.setattr(client, "SILENCE_S", SHORT_S / 5)
    monkeypatch.setattr(client, "KILLED_WAIT_S", SHORT_S)
    with pytest.raises(AcpfsError, match="was killed before it answered: see whether it was done"):
        client.request(mute.record, "reload")


@pytest.mark.parametrize("name", WORDS)
def test_a_command_ends_where_the_worker_does_not_answer(mute: Mute, name: str) -> None:
    with pytest.raises((AcpfsError, SystemExit)) as ended:
        ctl.command.main([MOUNTPOINT, name, *WORDS[name]], standalone_mode=False)
    assert not isinstance(ended.value, NotMountedError)


@pytest.mark.parametrize("name", [name for name, verb in VERBS.items() if verb.has_handler])
def test_a_verb_with_a_time_limit_ends_where_the_worker_is_at_it_for_ever(
    babbling: Mute, name: str
) -> None:
    with pytest.raises(DeadlineError):
        client.request(babbling.record, name, {"timeout_s": SHORT_S})


def test_an_unmount_ends_where_the_worker_is_at_it_for_ever(babbling: Mute) -> None:
    with pytest.raises(DeadlineError), click.Context(umount.command):
        umount.umount(MOUNTPOINT, SHORT_S, leave=False)


@pytest.mark.usefixtures("_patient")
@pytest.mark.clause("S300", "S443")
def test_a_request_goes_on_with_another_supervisor_that_has_the_mount(tmp_path: Path) -> None:
    """As after a take-over, and the death of the worker that came with it: the process that was
    asked for first is gone.
    """
    living = os.getpid()
    place = tmp_path / "sockets" / "c.sock"
    new = MountRecord(
        MOUNTPOINT, "/b", "n", living, process_started(living), str(place), "0", str(tmp_path)
    )
    for directory in ("mounts", "sockets"):
        (tmp_path / directory).mkdir()
    registry.write(new)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        dying = threading.Thread(target=_die_once, args=(listener,))
        dying.start()
        old = replace(new, pid=2**22 + 1, pid_started=5)
        assert not old.alive
        assert client.request(old, "flush", {"paths": [], "timeout_s": 60}) == {"operations": 0}
        dying.join()
    registry.remove(new)
    assert registry.as_it_is_now(old) == old, "there is none"


def _die_once(listener: socket.socket) -> None:
    for answer in (b"", b'{"result": {"operations": 0}}\n'):
        connection, _address = listener.accept()
        with connection, connection.makefile("rb") as question:
            question.readline()
            connection.sendall(answer)


@pytest.mark.usefixtures("_patient")
@pytest.mark.clause("S443")
def test_a_request_waits_for_a_socket_that_is_made_anew(tmp_path: Path) -> None:
    """Somebody has cleaned the run directory: the daemon lives, and nobody listens there for a
    moment.
    """
    living = os.getpid()
    place = tmp_path / "c.sock"
    record = MountRecord(
        MOUNTPOINT, "/b", "n", living, process_started(living), str(place), "0", str(tmp_path)
    )
    with pytest.raises(NotMountedError):
        client.request(record, "retry", {"paths": ["f"]})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listening = threading.Timer(client.NEXT_WORKER_WAIT_S, listener.listen)
        listening.start()
        answering = threading.Thread(target=_answer_when_listening, args=(listener, listening))
        answering.start()
        assert client.request(record, "status") == {"operations": 0}
        answering.join()


def _answer_when_listening(listener: socket.socket, listening: threading.Timer) -> None:
    listening.join()
    connection, _address = listener.accept()
    with connection, connection.makefile("rb") as question:
        question.readline()
        connection.sendall(b'{"result": {"operations": 0}}\n')
