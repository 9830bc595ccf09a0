"""Programs that close files of the mount by their exec, which keeps locked what the kernel tells of
them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.supervisor.child import HANG_VARIABLE
from tests.rig.mounts import AcpfsMount, MakeMount
from tests.rig.processes import stop_processes
from tests.rig.storage.servers import until

NEVER_S = "100000"
"""The worker stands still, and no other one takes its place for that."""
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


class Programs:
    """Each has opened a file, and has a copy of the other's, which its exec closes."""

    def __init__(self, mount: AcpfsMount) -> None:
        self._programs: list[subprocess.Popen[str]] = []
        one, other = socket.socketpair()
        for name, end in (("f", one), ("g", other)):
            command = [sys.executable, "-c", PROGRAM, str(mount.path / name), str(end.fileno())]
            self._programs.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    pass_fds=[end.fileno()],
                )
            )
            end.close()

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_error: object) -> None:
        for program in self._programs:
            program.kill()
            program.communicate()

    def wait_ready(self) -> None:
        """They have all that they are to have."""
        for program in self._programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"

    def begin_exec(self) -> None:
        """Both at the same time."""
        for program in self._programs:
            assert program.stdin is not None
            program.stdin.write("\n")
            program.stdin.flush()

    def check_go_on(self) -> None:
        """Their execs have ended."""
        for program in self._programs:
            answer, _errors = program.communicate("after the exec\n", timeout=120)
            assert answer == "after the exec\n"


@pytest.mark.clause("S499", "S509")
@pytest.mark.transports("native-direct", "native-passthrough")
@pytest.mark.parametrize("is_replaced", [False, True])
def test_two_programs_that_close_each_others_files_by_their_execs_go_on(
    transport: str,
    make_mount: MakeMount,
    tmp_path: Path,
    connections: Path,
    is_replaced: bool,
) -> None:
    """Each close asks what the other one, which opened the file, has of it still; neither may be
    waited for. All programs that list processes stood still with them. Nor does the next worker
    wait, which gets both closes again.
    """
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, transport, environment={HANG_VARIABLE: NEVER_S})
    requests = connections / str(os.minor(mount.path.stat().st_dev)) / "waiting"
    with Programs(mount) as programs:
        programs.wait_ready()
        pid = mount.pid
        stop_processes([pid])
        try:
            programs.begin_exec()
            # nobody answers these
            until(lambda: int(requests.read_text()) >= 2, "both programs wait for the worker")
            if is_replaced:
                os.kill(pid, signal.SIGKILL)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        programs.check_go_on()
    assert (mount.pid != pid) == is_replaced
    mount.flush()
    assert (backing / "f").read_bytes() == (backing / "g").read_bytes() == b"mine"
