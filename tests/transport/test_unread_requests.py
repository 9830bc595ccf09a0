"""A caller that is killed before its request is read: whoever was about to read it must not wait
for the next one instead, with the interpreter.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.rig.hanging_code import Place, code_with, flag_of
from tests.rig.mounts import AcpfsMount, MakeMount
from tests.rig.processes import Child

needs_fuse = pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
pytestmark = [needs_fuse, pytest.mark.clause("S510")]

BEFORE_THE_READ: Place = (
    "acpfs/transport/request_turns.py",
    "            self._called = True\n            self._standing_by.unpark()\n",
    "        kill_who_asks()\n",
)
KILL_WHO_ASKS = """

def kill_who_asks():
    import os, select, signal
    try:
        pid = int(open(FLAG).read())
        os.unlink(FLAG)
    except FileNotFoundError:
        return
    device = select.poll()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{fd}") == "/dev/fuse":
                device.register(fd, select.POLLIN)
        except FileNotFoundError:
            pass
    assert device.poll(0)
    os.kill(pid, signal.SIGKILL)
    while device.poll(0):
        pass
"""


@pytest.fixture
def mount(tmp_path: Path, make_mount: MakeMount) -> AcpfsMount:
    """Whose worker, told by `flag_of`, kills a process whose request it is about to read."""
    functions = KILL_WHO_ASKS.replace("FLAG", repr(str(flag_of(tmp_path))))
    code = code_with(tmp_path, BEFORE_THE_READ, functions)
    backing = tmp_path / "backing"
    backing.mkdir()
    return make_mount(backing, "libfuse", environment={"PYTHONPATH": str(code)})


class Victim:
    """A process that will ask, and has nothing open in the mount, so that its end asks nothing."""

    def __init__(self, path: Path) -> None:
        self._told, self._tell = os.pipe()
        self._child = Child(lambda: os.read(self._told, 1) and path.exists())

    def ask_and_be_killed(self, flag: Path) -> None:
        """`flag` tells the worker whom to kill."""
        written = flag.with_suffix(".new")
        written.write_text(str(self._child.pid))
        written.rename(flag)
        os.write(self._tell, b"x")
        with pytest.raises(RuntimeError, match="died"):
            self._child.result()
        os.close(self._told)
        os.close(self._tell)
        assert not flag.exists()


def test_control_answers_and_the_worker_stays(mount: AcpfsMount, tmp_path: Path) -> None:
    victims = [Victim(mount.path / f"nothing {number}") for number in range(3)]
    worker = mount.pid
    with open(mount.path / "open", "w") as file:
        for victim in victims:
            victim.ask_and_be_killed(flag_of(tmp_path))
            assert mount.pid == worker
        file.write("as before")
    assert (mount.path / "open").read_text() == "as before"
