"""`acpfs-ctl adopt`, beside another one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from acpfs.cli.verbs import adopt
from acpfs.control import client
from acpfs.control.registry import MountRecord, adopting_lock
from acpfs.errors import AcpfsError, DeadlineError, ExitCode, NotMountedError, RefusedError
from acpfs.runtime.file_locks import locked, locked_until
from tests.rig.storage.servers import until

clause = pytest.mark.clause


def adopts(tmp_path: Path, *words: str) -> Result:
    target = SimpleNamespace(record=lambda: SimpleNamespace(runtime_dir=str(tmp_path)))
    return CliRunner().invoke(adopt.command, ["../n1", "--is-off", *words], obj=target)


@clause("S615")
def test_one_command_at_a_time_adopts_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would mount one log at the same place."""
    lock = adopting_lock(tmp_path, "../n1")
    assert lock.parent == tmp_path / "adopting"
    began = threading.Event()
    happened: list[str] = []

    def ask(*_words: object, **_more: object) -> object:
        with locked(lock, may_wait=False) as is_had:
            happened.append("asks, beside others" if is_had else "asks alone")
        raise RefusedError("nothing is held")

    @contextmanager
    def waits(file: Path, deadline: float, tell: object) -> Iterator[bool]:
        def told(owner: str) -> None:
            assert callable(tell)
            tell(owner)
            began.set()

        with locked_until(file, deadline, told) as is_had:
            yield is_had

    monkeypatch.setattr(adopt, "ask", ask)
    monkeypatch.setattr(adopt, "locked_until", waits)
    second = threading.Thread(target=lambda: adopts(tmp_path), daemon=True)
    with locked(lock, may_wait=False) as is_first:
        assert is_first
        second.start()
        assert began.wait(60)
        happened.append("the first one ends")
    second.join(60)
    assert happened == ["the first one ends", "asks alone"]


HAS_IT = """
import sys
from pathlib import Path
from acpfs.runtime.file_locks import locked

with locked(Path(sys.argv[1]), may_wait=False) as is_had:
    print(is_had, flush=True)
    sys.stdin.read()
"""


@clause("S617")
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--timeout", "0"], ExitCode.TIMEOUT, "waiting for that"),
        (["--timeout", "0.2"], ExitCode.TIMEOUT, "waiting for that"),
        (["--alone"], ExitCode.REFUSED, ""),
    ],
)
def test_a_command_that_comes_second_says_who_has_the_node_and_keeps_its_deadline(
    tmp_path: Path, words: list[str], code: ExitCode, says: str
) -> None:
    """Another process has it, which does not end."""
    lock = adopting_lock(tmp_path, "../n1")
    lock.write_text("of one that died, and had a longer name\n")
    first = subprocess.Popen(
        [sys.executable, "-c", HAS_IT, os.fspath(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == "True\n"
        done = adopts(tmp_path, *words)
        assert first.stdin is not None
        first.stdin.close()
    owner = f"../n1 is being adopted here by process {first.pid} on {socket.gethostname()}"
    assert isinstance(done.exception, DeadlineError | RefusedError)
    assert done.exception.exit_code == code
    assert str(done.exception).startswith(owner)
    assert done.stderr == (f"{owner}: {says}\n" if says else "")


@clause("S617")
def test_what_is_no_name_of_whoever_has_it_is_not_said(tmp_path: Path) -> None:
    """The file is somebody else's text."""
    heard: list[str] = []
    with locked(tmp_path / "lock", may_wait=False):
        (tmp_path / "lock").write_bytes(json.dumps("process 1 on \x1b[2J").encode())
        with locked_until(tmp_path / "lock", 0.0, heard.append) as is_had:
            assert not is_had
    assert heard == [""]


NEVER_READY = """#!/bin/sh
trap {signal} INT
echo $$ > {pid}
while :; do sleep 0.05; done
"""


@clause("S617")
@pytest.mark.parametrize("ends", ["at the signal", "never"])
def test_a_mount_that_does_not_begin_in_time_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The storage hangs, or a claim beside it: the command waited for ever."""
    pid = tmp_path / "pid"
    program = tmp_path / "never-ready"
    program.write_text(NEVER_READY.format(signal="-" if ends != "never" else "''", pid=pid))
    program.chmod(0o755)
    patience: dict[str, float | None] = {}
    umounted: list[bool] = []

    def ask(_record: object, verb: str, *_words: object, **more: float | None) -> dict[str, str]:
        patience[verb] = more["patience_s"]
        names = ("backing", "node", "by", "spill", "volume")
        return {"runtime_dir": str(tmp_path), **dict.fromkeys(names, "n1")}

    def umount(*_words: object, **_more: object) -> None:
        umounted.append(True)
        raise NotMountedError("there is none")

    left_s = adopt._left_s

    def left_when_it_runs(deadline: float) -> float | None:
        """The time that it has is over when it has begun, not before."""
        if umounted:
            until(lambda: pid.exists() and pid.read_text() != "", "it runs")
        return left_s(deadline)

    monkeypatch.setattr(adopt, "ENDS_S", 0.2)
    monkeypatch.setattr(adopt, "_left_s", left_when_it_runs)
    monkeypatch.setattr(adopt, "ask", ask)
    monkeypatch.setattr(adopt, "umount", umount)
    monkeypatch.setattr(adopt, "_is_mounted", lambda _place: False)
    monkeypatch.setattr(sys, "executable", os.fspath(program))
    done = adopts(tmp_path, "--timeout", "1")
    assert isinstance(done.exception, DeadlineError)
    assert done.exception.exit_code == ExitCode.TIMEOUT
    assert str(done.exception) == (
        "the mount that adopts n1 did not begin in time: `acpfs-ctl adopt n1` tries again"
    )
    asked = patience["adopt"]
    assert asked is not None
    assert asked <= 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@clause("S617")
def test_a_daemon_that_does_not_answer_in_time_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(os.fspath(tmp_path / "socket"))
        silent.listen()
        at = os.fspath(tmp_path / "socket")
        record = MountRecord("/mnt", "/backing", "n2", os.getpid(), 0, at, "1", str(tmp_path))
        with pytest.raises(DeadlineError, match="has not answered in time"):
            client.request(record, "adopt", {"node": "n1"}, patience_s=0.2)


@clause("S616")
def test_what_waits_for_a_pointer_that_another_node_withholds_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the drill: the others withheld theirs because the lost node was missing."""
    waits = {"path": "run/latest", "withheld": True, "waits_for": {"n2": "withheld"}}
    lost = {**waits, "waits_for": {"n2": "withheld", "n3": "lost"}}
    statuses = [[waits], [waits], [lost]]
    tries: list[str] = []

    def umount(place: str, _timeout_s: float | None, *, leave: bool) -> None:
        assert not leave
        tries.append(place)
        if len(tries) <= len(statuses):
            raise AcpfsError("pointer files are withheld")

    def status(*_words: object) -> dict[str, object]:
        return {"cluster": {"waiting": statuses[len(tries) - 1]}}

    place = tmp_path / "adopting" / "../n1"
    monkeypatch.setattr(adopt, "AGAIN_S", 0.0)
    monkeypatch.setattr(adopt, "umount", umount)
    monkeypatch.setattr(adopt, "_is_mounted", lambda _place: True)
    monkeypatch.setattr("acpfs.control.client.request", status)
    monkeypatch.setattr("acpfs.control.registry.find", lambda _place: None)
    monkeypatch.setattr(adopt, "ask", lambda *_words, **_more: {"runtime_dir": str(tmp_path)})
    done = adopts(tmp_path)
    assert tries == [str(place)] * 3
    assert done.stderr.count("waiting for run/latest, since node n2 WITHHOLDS") == 1
    assert isinstance(done.exception, AcpfsError)
    assert "`acpfs-ctl nodes forget n3`" in str(done.exception)
    place.mkdir(parents=True)
    assert adopts(tmp_path).exit_code == 0
