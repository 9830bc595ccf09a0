"""Programs that close files of the mount by their exec, which keeps locked what the kernel tells of
them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.keeper import until
from tests.rig.mounts import MakeMount

PROGRAM = """
import os, socket, sys
other = socket.socket(fileno=int(sys.argv[2]))
own = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(own, b"mine")
os.set_inheritable(own, True)
socket.send_fds(other, [b"f"], [own])
_, (copy,), *_ = socket.recv_fds(other, 1, 1)
os.set_inheritable(copy, False)  # the exec closes it
print("ready", flush=True)
sys.stdin.readline()
os.execv("/bin/cat", ["cat"])
"""


@pytest.fixture
def connections(tmp_path: Path) -> Iterator[Path]:
    """What the kernel tells of its FUSE mounts."""
    at = tmp_path / "connections"
    at.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "none", at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


@pytest.mark.clause("S499", "S509")
@pytest.mark.transports("native-direct", "native-passthrough")
def test_two_programs_that_close_each_others_files_by_their_execs_go_on(
    transport: str, make_mount: MakeMount, tmp_path: Path, connections: Path
) -> None:
    """Each close asks what the other one, which opened the file, has of it still; neither may be
    waited for. All programs that list processes stood still with them.
    """
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, transport)
    requests = connections / str(os.minor(mount.path.stat().st_dev)) / "waiting"
    one, other = socket.socketpair()
    programs = []
    for name, end in (("f", one), ("g", other)):
        command = [sys.executable, "-c", PROGRAM, str(mount.path / name), str(end.fileno())]
        programs.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[end.fileno()],
            )
        )
        end.close()
    try:
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
        pid = mount.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            for program in programs:
                assert program.stdin is not None
                program.stdin.write("\n")
                program.stdin.flush()
            until(lambda: int(requests.read_text()) >= 2)  # nobody answers these
        finally:
            os.kill(pid, signal.SIGCONT)
        for program in programs:
            answer, _errors = program.communicate("after the exec\n", timeout=120)
            assert answer == "after the exec\n"
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert mount.pid == pid, "no other worker had to come"
    mount.flush()
    assert (backing / "f").read_bytes() == (backing / "g").read_bytes() == b"mine"
