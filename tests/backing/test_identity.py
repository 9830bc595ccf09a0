"""Who has a node id, when it cannot be had: a mount that lives, or one that was killed and cannot
end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.backing import identity
from acpfs.backing.directory import BackingDirectory
from acpfs.errors import ExitCode, RefusedError
from acpfs.lock_holders import holders
from acpfs.supervisor import stuck_processes
from tests.rig.faultfs import FaultFs
from tests.rig.runtime import REAL

clause = pytest.mark.clause
HOLDS = """
import os, sys, time
print(os.fstat(int(sys.argv[1])).st_ino, flush=True)
os.path.exists(sys.argv[2])
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[BackingDirectory]:
    (tmp_path / "storage").mkdir()
    directory = BackingDirectory(tmp_path / "storage", "n1", REAL)
    yield directory
    directory.disconnect()


def holder(fd: int, path: Path, *program: str) -> subprocess.Popen[str]:
    """A process that has the lock from this one, and looks at a path."""
    process = subprocess.Popen(
        [sys.executable, *(program or ("-c", HOLDS)), str(fd), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(fd,),
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@clause("S485", "S196")
def test_who_lives_and_has_the_lock_is_named(place: BackingDirectory, tmp_path: Path) -> None:
    claimed = identity.claim(place, tmp_path / "run")
    with holder(claimed.lock_fd, tmp_path) as process:
        os.close(claimed.lock_fd)
        told = refusal(place, tmp_path)
        assert "already mounted under node id n1" in told
        assert f"(process {process.pid})" in told
        process.communicate("")
    identity.claim(place, tmp_path / "run").release()


@clause("S485")
def test_the_helper_of_what_was_killed_just_now_is_waited_for(
    place: BackingDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends by itself, a moment after the worker that it helped."""
    claimed = identity.claim(place, tmp_path / "run")
    program = tmp_path / "hold_process.py"
    program.write_text(HOLDS)
    with holder(claimed.lock_fd, tmp_path, str(program)) as helper:
        os.close(claimed.lock_fd)
        waits = identity._wait_for_helpers

        def ends_meanwhile(fd: int, timeout_s: float) -> None:
            assert [one.pid for one in holders(fd, ())] in ([helper.pid], [])
            assert 0 < timeout_s <= identity.HELPER_ENDS_S
            assert helper.stdin is not None
            helper.stdin.close()
            waits(fd, timeout_s)

        with monkeypatch.context() as patched:
            patched.setattr(identity, "_wait_for_helpers", ends_meanwhile)
            identity.claim(place, tmp_path / "run").release()
    monkeypatch.setattr(identity, "HELPER_ENDS_S", 0.0)
    claimed = identity.claim(place, tmp_path / "run")
    with holder(claimed.lock_fd, tmp_path, str(program)) as helper:
        os.close(claimed.lock_fd)
        assert "already mounted" in refusal(place, tmp_path), "not for ever"
        helper.communicate("")


@clause("S485", "S83")
@pytest.mark.mount
@pytest.mark.skipif(os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root")
def test_what_was_killed_and_hangs_in_a_call_on_the_storage_is_named_as_that(
    place: BackingDirectory, tmp_path: Path, fault_fs: FaultFs
) -> None:
    """It said "already mounted", and named a process that was not there any more."""
    claimed = identity.claim(place, tmp_path / "run")
    fault_fs.freeze(["lookup"], glob="other")
    with holder(claimed.lock_fd, fault_fs.path / "other") as process:
        os.close(claimed.lock_fd)
        fault_fs.wait_frozen()
        process.kill()
        try:
            while not stuck_processes.is_stuck(process.pid):
                pass  # the kernel has it wait on for the answer, in a moment
            told = refusal(place, tmp_path)
            assert "was killed, and has not ended" in told
            assert f"process {process.pid} hangs in a call on the storage since" in told
            assert "when the storage answers" in told
        finally:
            fault_fs.thaw()
    identity.claim(place, tmp_path / "run").release()


def refusal(place: BackingDirectory, tmp_path: Path) -> str:
    with pytest.raises(RefusedError) as refused:
        identity.claim(place, tmp_path / "run")
    assert refused.value.exit_code == ExitCode.REFUSED
    return str(refused.value)
