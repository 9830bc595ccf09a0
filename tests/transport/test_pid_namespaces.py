"""Callers that the daemon cannot see: it runs in a PID namespace of its own, and the kernel reports
them by the number 0.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.descriptors import readable
from acpfs.processes import has_ended
from acpfs.transport.native.negotiate import Negotiated
from acpfs.transport.native.protocol import InitFlag, Opcode
from tests.rig.namespaces import namespace
from tests.rig.processes import Child
from tests.rig.storage.servers import until
from tests.transport.mounted import NativeMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]

HANGING = "hangs"
NESTED = namespace(options=("--pid", "--fork", "--kill-child", "--mount-proc"))
DIES_WITHIN_S = 120.0
"""Far more than the patience that the server is given."""


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[NativeMount]:
    (tmp_path / "backing").mkdir()
    (
        tmp_path / "backing" / HANGING
    ).touch()  # of a name that the first listing has not, nobody waits for news
    with NativeMount(
        tmp_path, "--hang", HANGING, "--unseen-patience", "0.1", "--count", under=NESTED
    ) as made:
        yield made
        with contextlib.suppress(
            OSError, ValueError, subprocess.CalledProcessError
        ):  # a server that was killed, or dies just now
            unmount_inside(made, "-l")


def server_of(mount: NativeMount) -> int:
    """The server's number outside."""
    return int(Path(f"/proc/{mount.pid}/task/{mount.pid}/children").read_text())


def seen_from_outside(mount: NativeMount) -> Path:
    """The mount is made in the nested mount namespace."""
    return Path(f"/proc/{server_of(mount)}/root{mount.path}")


def unmount_inside(mount: NativeMount, *flags: str) -> None:
    """One outside does not reach it."""
    server = server_of(mount)
    nested = [
        "nsenter",
        f"--target={server}",
        "--pid",
        "--mount",
    ]  # umount -l looks into its /proc/self
    command = [*nested, "umount", *flags, str(mount.path)]

    def is_done() -> bool:
        done = subprocess.run(command, check=False, timeout=120)
        # The server is the first process there: when it ends, as nothing is mounted any more, the
        # kernel kills umount, which may not have come to its own end.
        return done.returncode == 0 or is_gone(server)

    # whoever looks into all mount namespaces, such as another test's umount, has it for a moment
    until(is_done, "unmounted in the namespace")


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return has_ended(Path(f"/proc/{pid}"))
    except OSError:
        return True


@pytest.mark.clause("S242")
def test_a_waiting_process_of_another_namespace_can_be_killed(mount: NativeMount) -> None:
    path = seen_from_outside(mount) / HANGING
    child = Child(path.lstat)
    assert child.running()
    pidfd = os.pidfd_open(child.pid)
    os.kill(child.pid, 9)
    has_ended = readable(pidfd, DIES_WITHIN_S)
    os.close(pidfd)
    if not has_ended:
        mount.kill_server()  # its call fails with the session
    child.kill()
    assert has_ended


@pytest.mark.clause("S246")
def test_a_call_of_a_process_that_lives_ends_with_eintr(mount: NativeMount) -> None:
    path = seen_from_outside(mount) / HANGING

    def look() -> int:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        try:
            path.lstat()
        except OSError as error:
            return error.errno or 0
        return 0

    assert Child(look).result() == errno.EINTR


@pytest.mark.clause("S243")
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_only_a_writer_whose_control_group_is_known_writes_past_the_daemon(
    mount: NativeMount, where: str
) -> None:
    if not Negotiated.from_record(mount.negotiated).has(InitFlag.PASSTHROUGH):
        pytest.skip("this kernel has no passthrough")
    server = server_of(mount)
    if where == "inside":
        write = (
            "import os, sys; os.write(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), bytes(1 << "
            "20))"
        )
        nested = ["nsenter", f"--target={server}", "--pid", "--mount"]
        subprocess.run(
            [*nested, sys.executable, "-c", write, str(mount.path / "file")],
            check=True,
            timeout=120,
        )
    else:
        (seen_from_outside(mount) / "file").write_bytes(bytes(1 << 20))
    unmount_inside(mount)
    mount.wait_for_server()
    came_by_the_daemon = re.search(rf"opcode {int(Opcode.WRITE)} came", mount.log())
    assert bool(came_by_the_daemon) is (where == "outside")
