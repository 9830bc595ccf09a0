"""A mount that is told to end while its workers are killed: it drains first, and told again it ends
at once. Nothing is lost.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from acpfs.errors import AcpfsError, ExitCode
from acpfs.supervisor.stopping import TABLE, TOGETHER_S, Owner, Readiness, Stop, Stopping
from tests.rig.hanging_code import code_that_hangs, flag_of
from tests.rig.mounts import REPOSITORY, AcpfsMount, is_mounted, tell_again, wait_gone
from tests.rig.processes import stop_processes
from tests.supervisor.test_session_end import PATIENCE_S, in_foreground, wait_until

needs_fuse = pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
pytestmark = pytest.mark.transports("native")
DATA = os.urandom(1 << 20)
STALLED = ("--bandwidth", "1")
"""Of a byte per second: what is written stays in the RAM tier until a test says otherwise."""


@pytest.fixture
def mount(tmp_path: Path, transport: str) -> AcpfsMount:
    """Not started."""
    return AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport)


def parent_of(pid: int) -> int:
    """A worker's is the template."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def has_template(mount: AcpfsMount) -> bool:
    """Whether there is one: its supervisor heeds signals by then.

    Checks before that have processes, too.
    """
    lines = []
    for pid in mount.living():
        with contextlib.suppress(OSError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return any(b"acpfs.worker.template" in line.split(b"\0") for line in lines)


def watches(supervisor: int, pid: int) -> bool:
    """Whether a process has a pidfd of another one: it has not heard of that one's end yet."""
    texts = []
    for info in Path(f"/proc/{supervisor}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            texts.append(info.read_text())
    return any(line.split() == ["Pid:", str(pid)] for text in texts for line in text.splitlines())


def other_template(base: Path, *places: tuple[str, str]) -> Path:
    """Code whose template does something more after each of these places: the directory to import
    it from.
    """
    return other_code(
        base, *[("acpfs/worker/template.py", after, after + line) for after, line in places]
    )


def other_code(base: Path, *changes: tuple[str, str, str]) -> Path:
    """Code with other words in some files, each (file, old, new): the directory to import it
    from.
    """
    shutil.copytree(
        REPOSITORY / "acpfs", base / "code/acpfs", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, old, new in changes:
        text = (base / "code" / name).read_text()
        assert text.count(old) == 1
        (base / "code" / name).write_text(text.replace(old, new))
    return base / "code"


def wait_draining(mount: AcpfsMount, number: int) -> None:
    """Until the worker of that number has been told to end."""
    mount.wait_status(
        lambda status: status["state"] == "draining" and status["worker"]["number"] == number
    )
    assert not (mount.backing / "f").exists()


def wait_drained(mount: AcpfsMount, daemon: subprocess.Popen[bytes]) -> None:
    """Let the storage have it, and the daemon end."""
    mount.ctl("set", "bandwidth=0")
    assert daemon.wait(PATIENCE_S) == ExitCode.OK
    assert (mount.backing / "f").read_bytes() == DATA
    assert not is_mounted(mount.path)


def is_said_again(mount: AcpfsMount, times: int) -> bool:
    """Whether the worker has heard more signals than so many that it leaves to its supervisor."""
    return mount.log.read_text().count("another signal") > times


def check_kept(mount: AcpfsMount) -> None:
    """All has ended, nothing was lost: the next mount drains it."""
    assert not is_mounted(mount.path)
    assert not (mount.backing / "f").exists()
    mount.start()
    assert (mount.path / "f").read_bytes() == DATA
    mount.umount()
    assert (mount.backing / "f").read_bytes() == DATA
    assert mount.leaks() == []


def test_for_each_state_it_is_known_what_is_done() -> None:
    assert TABLE.keys() == set(itertools.product(Owner, (None, *Readiness)))


@pytest.mark.clause("S21")
def test_what_comes_with_the_first_signal_is_one_order_with_it() -> None:
    stopping = Stopping()
    for at in (100.0, 100.0, 100.0 + TOGETHER_S / 2):
        stopping.told(at)
        assert (stopping.stop, stopping.since) == (Stop.DRAIN, 100.0)
    stopping.told(100.0 + TOGETHER_S)
    assert (stopping.stop, stopping.since) == (Stop.NOW, 100.0)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21")
def test_a_worker_whose_template_dies_before_it_is_forked_is_started_again_and_drains(
    mount: AcpfsMount,
) -> None:
    with in_foreground(mount, *STALLED) as daemon:
        (mount.path / "f").write_bytes(DATA)
        worker = mount.pid
        template = parent_of(worker)
        stop_processes([template])
        os.kill(worker, signal.SIGKILL)
        wait_gone(worker)
        wait_until(
            lambda: not watches(daemon.pid, worker)
        )  # the template has the order for the next one by the next signal
        daemon.send_signal(signal.SIGTERM)
        os.kill(template, signal.SIGKILL)
        wait_draining(mount, 2)
        wait_drained(mount, daemon)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21")
@pytest.mark.transports("libfuse", "native")
def test_a_worker_that_dies_while_it_drains_is_replaced_and_the_next_one_drains(
    mount: AcpfsMount, tmp_path: Path
) -> None:
    log = tmp_path / "acpfs.log"
    with in_foreground(mount, *STALLED, "--log-file", str(log)) as daemon:
        (mount.path / "f").write_bytes(DATA)
        daemon.send_signal(signal.SIGTERM)
        for number in (1, 2):
            wait_draining(mount, number)
            wait_gone(mount.kill_worker())
        wait_draining(mount, 3)
        wait_drained(mount, daemon)
    lines = [
        json.loads(line)
        for line in log.read_text().splitlines()
        if "stopping: draining first" in line
    ]
    times = [line["timeout_s"] for line in lines]
    assert times[0] > times[1] > times[2] > 0, "they have drain_timeout_s together"


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21")
def test_who_is_told_to_end_between_two_workers_drains_first(
    mount: AcpfsMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a machine is shut down, whose RAM is lost, while workers die one after the other, and
    the next one is waited with.
    """
    monkeypatch.setenv("ACPFS_EARLY_DEATHS_MAX", "1000000")
    with in_foreground(mount, *STALLED) as daemon:
        (mount.path / "f").write_bytes(DATA)
        for _ in range(8):
            wait_gone(mount.kill_worker())
        daemon.send_signal(signal.SIGTERM)
        wait_draining(mount, mount.status()["worker"]["number"])
        wait_drained(mount, daemon)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21", "S82")
def test_a_mount_that_is_to_end_ends_where_supervisor_and_worker_die(mount: AcpfsMount) -> None:
    """The next supervisor learns from the worker that it is to end."""
    mount.backing.mkdir()
    with mount:
        mount.ctl("set", "bandwidth=1")
        (mount.path / "f").write_bytes(DATA)
        supervisor = mount.supervisor
        os.kill(supervisor, signal.SIGTERM)
        wait_draining(mount, 1)
        os.kill(supervisor, signal.SIGKILL)
        wait_until(lambda: mount.supervisor != supervisor)
        supervisor = mount.supervisor
        wait_gone(mount.kill_worker())
        wait_draining(mount, 2)
        mount.ctl("set", "bandwidth=0")
        mount.wait_ended(supervisor)
        assert (mount.backing / "f").read_bytes() == DATA
        assert mount.leaks() == []


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21", "S22")
@pytest.mark.transports("libfuse", "native")
def test_workers_that_die_of_draining_are_not_replaced_for_ever(
    mount: AcpfsMount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACPFS_EARLY_DEATHS_MAX", "3")
    log = tmp_path / "acpfs.log"
    with in_foreground(mount, *STALLED, "--log-file", str(log)) as daemon:
        (mount.path / "f").write_bytes(DATA)
        daemon.send_signal(signal.SIGTERM)
        # a death that the supervisor hears of before the signal is none of a drain
        wait_draining(mount, 1)
        killed = set()
        while daemon.poll() is None:
            with contextlib.suppress(
                AcpfsError, OSError
            ):  # the last question is asked when nobody is left
                killed.add(mount.kill_worker())
        assert daemon.wait() == ExitCode.FAILED
        assert len(killed) == 3
        last = mount.log.read_text().splitlines()[-1]
        assert (
            f"acpfs: {mount.path}: 3 workers in a row could not drain; the last one: it died; "
            "what is not persisted" in last
        )
        assert re.search(rf"stays in the RAM tier /\S+ \(operations: 1, bytes: {len(DATA)}\)", last)
        assert f"`acpfs mount {mount.backing} {mount.path}` drains it" in last
        assert f"acpfs: {json.loads(log.read_text().splitlines()[-1])['event']}" == last
        check_kept(mount)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21", "S22")
@pytest.mark.transports("libfuse", "native")
def test_who_is_told_again_between_two_workers_ends_at_once(
    mount: AcpfsMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACPFS_EARLY_DEATHS_MAX", "1000000")
    with in_foreground(mount, *STALLED) as daemon:
        (mount.path / "f").write_bytes(DATA)
        daemon.send_signal(signal.SIGTERM)
        wait_draining(mount, 1)
        for _ in range(8):
            wait_gone(mount.kill_worker())
        tell_again(daemon.pid)
        assert daemon.wait(PATIENCE_S) == ExitCode.TIMEOUT
        check_kept(mount)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21", "S22")
def test_who_is_told_again_while_the_next_worker_starts_ends_at_once(
    mount: AcpfsMount, tmp_path: Path
) -> None:
    """That worker hangs, so that it never comes to hear anything."""
    place = (
        "acpfs/ram/state.py",
        "        self.path = path\n        self.space = space\n",
        "        hang_here()\n",
    )
    with in_foreground(mount, *STALLED, code=code_that_hangs(tmp_path, place)) as daemon:
        (mount.path / "f").write_bytes(DATA)
        flag_of(tmp_path).touch()
        mount.kill_worker()
        wait_until(lambda: not flag_of(tmp_path).exists())
        tell_again(daemon.pid)
        assert daemon.wait(PATIENCE_S) == ExitCode.TIMEOUT
        check_kept(mount)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21", "S81")
def test_a_worker_whose_template_dies_right_after_the_fork_is_the_only_one(
    mount: AcpfsMount, tmp_path: Path
) -> None:
    """The template has no time to say who it is.

    Taken for one that never was, it would serve beside the next one.
    """
    dies = tmp_path / "dies"
    kill = (
        f"            if pid and os.path.exists({str(dies)!r}): os.unlink({str(dies)!r}); "
        "os.kill(os.getpid(), 9)\n"
    )
    with in_foreground(
        mount,
        *STALLED,
        code=other_template(tmp_path, ("            pid = _forked(supervisor)\n", kill)),
    ) as daemon:
        (mount.path / "f").write_bytes(DATA)
        dies.touch()
        mount.kill_worker()
        wait_until(lambda: not dies.exists())
        daemon.send_signal(signal.SIGTERM)
        wait_draining(mount, 2)
        wait_drained(mount, daemon)
        wait_until(lambda: mount.living() == [])
        assert "the supervisor is gone" not in mount.log.read_text()


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21")
def test_who_is_told_to_end_before_its_first_worker_is_forked_leaves_none(
    mount: AcpfsMount, tmp_path: Path
) -> None:
    """The template has the order already, and would carry it out when the supervisor is gone; a
    worker without one starts another.
    """
    loads = tmp_path / "loads"
    wait = f"    while os.path.exists({str(loads)!r}): select.select([], [], [], 0.02)\n"
    # the signal comes while the worker is still the template's copy, which ignores it
    late = "    select.select([], [], [], 1)\n"
    code = other_template(
        tmp_path, ("\ndef main() -> None:\n", wait), ("fds: list[int]) -> None:\n", late)
    )
    loads.touch()
    with in_foreground(mount, code=code, ready=False) as daemon:
        wait_until(lambda: has_template(mount))
        daemon.send_signal(signal.SIGTERM)
        loads.unlink()
        daemon.wait(PATIENCE_S)
        wait_until(lambda: mount.living() == [])
        assert not is_mounted(mount.path)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21")
@pytest.mark.transports("libfuse", "native")
def test_who_signals_all_processes_of_a_mount_does_not_cut_its_drain_short(
    mount: AcpfsMount,
) -> None:
    """As systemd does with `KillMode=control-group`, Slurm's scancel, and a terminal: the worker
    hears of it twice and more.
    """
    with in_foreground(mount, *STALLED) as daemon:
        (mount.path / "f").write_bytes(DATA)
        worker = mount.pid
        os.kill(worker, signal.SIGTERM)
        wait_draining(mount, 1)
        for said, (pid, number) in enumerate(
            [(worker, signal.SIGTERM), (worker, signal.SIGINT), (daemon.pid, signal.SIGTERM)]
        ):
            os.kill(pid, number)
            wait_until(
                functools.partial(is_said_again, mount, said), lambda: daemon.poll() is not None
            )
        for pid in mount.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait_draining(mount, 1)
        wait_drained(mount, daemon)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21")
def test_a_supervisor_that_is_told_twice_at_once_drains_and_told_again_it_ends(
    mount: AcpfsMount,
) -> None:
    """As by `timeout`, which signals its child, and then its group."""
    with in_foreground(mount, *STALLED) as daemon:
        (mount.path / "f").write_bytes(DATA)
        stop_processes([daemon.pid])
        daemon.send_signal(signal.SIGTERM)
        daemon.send_signal(signal.SIGINT)  # two of one number would be heard as one
        daemon.send_signal(signal.SIGCONT)
        wait_draining(mount, 1)
        tell_again(daemon.pid)
        assert daemon.wait(PATIENCE_S) == ExitCode.TIMEOUT
        check_kept(mount)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21")
def test_who_is_told_to_end_before_its_template_has_loaded_does_not_wait_for_that(
    mount: AcpfsMount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACPFS_START_TIMEOUT_S", "1000000")
    code = other_template(tmp_path, ("\ndef main() -> None:\n", "    select.select([], [], [])\n"))
    with in_foreground(mount, code=code, ready=False) as daemon:
        wait_until(lambda: has_template(mount))
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(PATIENCE_S) == ExitCode.FAILED
        wait_until(lambda: mount.living() == [])
        assert not is_mounted(mount.path)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21", "S22")
def test_who_is_told_again_while_its_template_hangs_ends_at_once(
    mount: AcpfsMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACPFS_START_TIMEOUT_S", "1000000")
    with in_foreground(mount, *STALLED) as daemon:
        (mount.path / "f").write_bytes(DATA)
        worker = mount.pid
        stop_processes([parent_of(worker)])
        os.kill(worker, signal.SIGKILL)
        wait_gone(worker)
        wait_until(lambda: not watches(daemon.pid, worker))
        daemon.send_signal(signal.SIGTERM)
        tell_again(daemon.pid)
        assert daemon.wait(PATIENCE_S) == ExitCode.TIMEOUT
        check_kept(mount)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21")
def test_a_worker_under_an_older_supervisor_is_told_again_by_a_signal(
    mount: AcpfsMount, tmp_path: Path
) -> None:
    """As after a reload: the supervisor is of the code before."""
    orders = ("acpfs/supervisor/mount_state.py", '"says_hurry": True,', "")
    code = other_code(tmp_path, orders, ("acpfs/supervisor/child.py", '{"hurry": True}', "{}"))
    with in_foreground(mount, *STALLED, code=code) as daemon:
        (mount.path / "f").write_bytes(DATA)
        daemon.send_signal(signal.SIGTERM)
        wait_draining(mount, 1)
        tell_again(daemon.pid)
        assert daemon.wait(PATIENCE_S) == ExitCode.TIMEOUT
        check_kept(mount)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21", "S445")
def test_a_worker_without_a_supervisor_is_told_again_by_a_signal(
    mount: AcpfsMount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a service manager it starts none: nobody else could say it, and the drain went on to
    its deadline.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with in_foreground(mount, *STALLED) as daemon:
            (mount.path / "f").write_bytes(DATA)
            worker = mount.pid
            daemon.kill()
            wait_until(lambda: "the supervisor is gone" in mount.log.read_text())
            os.kill(worker, signal.SIGTERM)
            wait_draining(mount, 1)
            tell_again(worker)
            monkeypatch.delenv("NOTIFY_SOCKET")
            manager.close()  # what was stored there is the manager's
            check_kept(mount)


@needs_fuse
@pytest.mark.mount
@pytest.mark.clause("S21")
def test_a_signal_while_a_worker_puts_away_what_it_has_does_not_end_it(
    mount: AcpfsMount, tmp_path: Path
) -> None:
    """Else its supervisor takes that for a death, and starts another worker for a mount that is
    gone.
    """
    after = "    finally:\n"
    code = other_code(
        tmp_path,
        ("acpfs/worker/daemon.py", after, f"{after}        os.kill(os.getpid(), signal.SIGTERM)\n"),
    )
    with in_foreground(mount, code=code) as daemon:
        (mount.path / "f").write_bytes(DATA)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(PATIENCE_S) == ExitCode.OK
        assert (mount.backing / "f").read_bytes() == DATA
        assert mount.leaks() == []
