"""acpfs mounts for tests: started through the command line like a user's, watched, always taken
down.

Knows the command line, the control socket's JSON and the kernel's mount table; never touches a
mount point from the thread that cleans up. A watchdog in a process of its own (`lifeline.py`)
aborts the kernel's FUSE connection after a while, so that a test that hangs in a system call ends
with an error, and takes everything down when the test's own process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from acpfs.control import client, registry
from acpfs.control.socket_messages import RemoteError
from acpfs.descriptors import readable
from acpfs.errors import ExitCode, NotMountedError
from acpfs.processes import PROC, tasks_in_calls
from tests.rig import lifeline

REPOSITORY = Path(__file__).parents[2]
MOUNT_TIMEOUT_S = 240.0
WATCHDOG_S = 600.0
UNMOUNT_TIMEOUT_S = 240.0
CONTAINERS_END_S = 240.0
"""As long as a test may take on a machine in heavy use: with 60 s this failed while a container's
test was busy for longer.
"""
LEAVES_WITHIN_S = 60.0
"""Who is still there then is a leak: a machine may stand still for ten seconds."""
LOOK_AGAIN_S = 0.02
LOG_LINES_SHOWN = 60
ENVIRONMENTS = {
    "auto": {},
    "libfuse": {},
    "native": {},
    "native-direct": {"ACPFS_FUSE_FEATURE_MASK": hex(((1 << 64) - 1) & ~(1 << 37))},
    "native-passthrough": {"ACPFS_EXPECTED_BYTES": "0"},
}
"""What a mount is tested on: a transport as users get it, or one held to a lane (a kernel without
passthrough; all writers admitted).
"""
Known = tuple[int, str]
"""A process: its number, and when it began.

A number alone is another process' within minutes, where few are given (pid_max of 32768).
"""
LEFT_OUT = ("durations", "features")
REST_CHARACTERS = 4000
"""Shown of what was not looked at: a whole status would be most of a log that is cut short."""
_COMMANDS = {"acpfs": "acpfs.cli.main", "acpfs-ctl": "acpfs.cli.ctl"}


class CommandError(Exception):
    """A command ended with another exit code than 0."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        super().__init__(f"{done.args[4:]} → {done.returncode}\n{done.stdout}\n{done.stderr}")
        self.code = done.returncode
        self.stdout = done.stdout
        self.stderr = done.stderr


class LookedAt(dict[str, Any]):
    """A status that knows which of its parts were looked at: those are told first."""

    def __init__(self, status: dict[str, Any]) -> None:
        super().__init__(status)
        self.looked_at: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.looked_at.add(key)
        return super().__getitem__(key)

    def told(self) -> str:
        """In two lines."""
        seen = {key: value for key, value in self.items() if key in self.looked_at}
        rest = {key: value for key, value in self.items() if key not in (*seen, *LEFT_OUT)}
        return f"{json.dumps(seen)}\nbeside it: {json.dumps(rest)[:REST_CHARACTERS]}"


class AcpfsMount:
    """One mount; a context manager. `path` is the mount point, `backing` the backing directory."""

    lay_backing: Callable[[Path], None] | None = None
    """What is done to a backing directory before a mount; the option --backing sets it for all."""

    def __init__(
        self,
        backing: Path,
        path: Path,
        transport: str = "libfuse",
        *,
        runtime_dir: Path | None = None,
        watchdog_s: float = WATCHDOG_S,
        environment: dict[str, str] | None = None,
        python: str = sys.executable,
        **options: object,
    ) -> None:
        """`options` are settings as the command line has them: `ram="64M"`, `attr_timeout=0.1`,
        `fsync="durable"`.
        """
        self.backing = backing
        self.path = path
        self.transport = transport
        self.runtime_dir = runtime_dir or path.with_name(path.name + ".run")
        self.log = self.runtime_dir.with_suffix(".log")
        self.options: dict[str, object] = {"ram": "512M", "prefault": "0", **options}
        self._environment = {"PYTHONPATH": str(REPOSITORY), **(environment or {})}
        self._watchdog_s = watchdog_s
        self._python = python
        self._pids: set[Known] = set()

    def __enter__(self) -> AcpfsMount:
        try:
            self.start()
        except BaseException:
            self.abort()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and is_mounted(self.path):
                self.umount()
            elif value is not None:
                self._show_what_failed(value)
        finally:
            self.abort()

    def _show_what_failed(self, error: BaseException) -> None:
        """What is gone a moment later: what the daemon said beside its message, and its log file.

        A failure by chance has to tell all that it can the first time.
        """
        if isinstance(error, RemoteError):
            print(f"{self.path}: {error}: {json.dumps(error.details)}", file=sys.stderr)
        self.show_logs()

    def show_logs(self) -> None:
        """Their ends, where pytest has what a test printed."""
        for log in sorted(self.runtime_dir.rglob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            print(f"{log}, its end:", *lines[-LOG_LINES_SHOWN:], sep="\n", file=sys.stderr)

    # -- life

    def start(self, **changed: object) -> None:
        """Mount; returns when the mount is ready. `changed` options hold from now on.

        Raises:
            CommandError: acpfs refused.
        """
        self.options.update(changed)
        if AcpfsMount.lay_backing is not None:
            AcpfsMount.lay_backing(self.backing)
        with contextlib.suppress(FileExistsError):
            # exist_ok would ask a dead mount what it is, which answers only while the kernel
            # remembers
            self.path.mkdir(parents=True)
        self.runtime_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.watch()
        words = [str(self.backing), str(self.path), "--transport", self.transport.partition("-")[0]]
        for name, value in self.options.items():
            option = "--" + name.replace("_", "-")
            words += [option] if value is True else [option, str(value)]
        self.run("acpfs", "mount", *words, timeout_s=MOUNT_TIMEOUT_S)
        self.note_worker()

    @property
    def pid(self) -> int:
        """Process that serves the mount."""
        return int(self.status()["worker"]["pid"])

    def note_worker(self) -> None:
        """From now on its present worker is known to belong to it, whatever its environment
        says.
        """
        pid = self.pid
        self._pids.add((pid, began(pid)))

    def umount(self, timeout_s: float = UNMOUNT_TIMEOUT_S) -> None:
        """Drain and unmount through the command.

        Raises:
            CommandError: not drained in time, or busy.
        """
        words = ("umount", str(self.path), "--timeout", str(timeout_s))
        deadline = time.monotonic() + CONTAINERS_END_S
        while True:
            done = self.run("acpfs", *words, timeout_s=timeout_s + 60, check=False)
            is_elsewhere = "in another mount namespace" in done.stderr
            if done.returncode != ExitCode.REFUSED or not is_elsewhere:
                break
            if not is_mounted(self.path):
                self._wait_for_containers()
                self._unwatch()
                return
            assert time.monotonic() < deadline  # a container of a test beside this one has it
        if done.returncode != 0:
            raise CommandError(done)
        self._unwatch()

    def _wait_for_containers(self) -> None:
        """A container of a test that runs beside this one has all mounts that it found, for as long
        as it lives.
        """
        with contextlib.suppress(NotMountedError):  # it is gone by now
            wait_gone(self.supervisor, CONTAINERS_END_S)

    @property
    def supervisor(self) -> int:
        """Process that keeps the mount."""
        return registry.find(
            registry.normalised(str(self.path)), registry.records([self.runtime_dir])
        ).pid

    def kill(self) -> None:
        """kill -9 of all that serves and keeps the mount, and away with the dead mount; the RAM
        tier stays.
        """
        self.kill_processes()
        self.detach()

    def detach(self) -> None:
        """Away with the dead mount, and no more."""
        _detach(self.path)

    def kill_worker(self) -> int:
        """kill -9 of the worker, and no more: the next one takes over.

        Returns the process number it had.
        """
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_processes(self) -> None:
        """kill -9 of all processes of the mount."""
        _kill_processes(self.runtime_dir, self._pids)

    def terminate(self, timeout_s: float = UNMOUNT_TIMEOUT_S) -> None:
        """SIGTERM, then wait for the end of the process."""
        pid = self.supervisor
        os.kill(pid, signal.SIGTERM)
        self.wait_ended(pid, timeout_s)

    def wait_unmounted(self, timeout_s: float = 240.0) -> None:
        """Wait until the kernel's table does not have the mount any more."""
        with open("/proc/self/mounts", "rb") as table:
            changes = (
                select.poll()
            )  # takes descriptors beyond 1023, which a process of many tests has
            changes.register(table, select.POLLPRI)
            deadline = time.monotonic() + timeout_s
            while is_mounted(self.path):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.path} is still mounted")
                changes.poll(1000)

    def wait_ended(self, pid: int, timeout_s: float = UNMOUNT_TIMEOUT_S) -> None:
        """Wait for the end of the daemon's process `pid`, and of the others that belong to it."""
        wait_gone(pid, timeout_s)
        for other in self.living():
            wait_gone(other, timeout_s)
        self._unwatch()

    def abort(self) -> None:
        """End everything that this mount started, whatever its state, and remove the RAM tier."""
        take_down(self.path, self.runtime_dir, self._pids)
        self._unwatch()

    def leaks(self) -> list[str]:
        """What an unmounted acpfs has left behind that it should not have."""
        for pid in self.living():
            with contextlib.suppress(
                TimeoutError
            ):  # the template ends with the supervisor, a moment later
                wait_gone(pid, LEAVES_WITHIN_S)
        found = [f"mount {self.path}"] if is_mounted(self.path) else []
        found += [f"process {pid}" for pid in self.living()]
        found += [f"mount {mounted}" for mounted in mounts_below(self.runtime_dir)]
        found += [f"staging file {path}" for path in staging_files(self.backing)]
        return found

    def living(self) -> list[int]:
        """Processes that this mount started."""
        return _living(self.runtime_dir, self._pids)

    def watch(self) -> None:
        """From now on it may stay for as long as the watchdog allows, and no longer than this
        process.
        """
        lifeline.arm(self.path, self.runtime_dir, self._watchdog_s)

    def _unwatch(self) -> None:
        lifeline.disarm(self.path)

    # -- commands

    def run(
        self, command: str, *words: str, timeout_s: float = 240.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run `acpfs` or `acpfs-ctl` as a user would; output goes through files because a daemon
        may keep a pipe open.
        """
        program = (
            f"import sys; from {_COMMANDS[command]} import main; sys.argv[0] = {command!r}; "
            "sys.exit(main())"
        )
        env = {
            **os.environ,
            **ENVIRONMENTS[self.transport],
            "ACPFS_RUNTIME_DIR": str(self.runtime_dir),
        }
        env |= {"COLUMNS": "200", **self._environment}
        with (
            open(self.log, "a+", encoding="utf-8") as err,
            open(self.log.with_suffix(".out"), "w+", encoding="utf-8") as out,
        ):
            err_start = err.seek(0, os.SEEK_END)
            arguments = [self._python, "-X", "faulthandler", "-c", program, *words]
            done = subprocess.run(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                timeout=timeout_s,
                check=False,
            )
            out.seek(0)
            err.seek(err_start)
            result = subprocess.CompletedProcess(
                [command, "", "", "", *words], done.returncode, out.read(), err.read()
            )
        if check and result.returncode != 0:
            raise CommandError(result)
        return result

    def ctl(self, *words: str, check: bool = True, timeout_s: float = 240.0) -> Any:
        """`acpfs-ctl MOUNTPOINT … --json`, decoded; None where it printed nothing."""
        done = self.run(
            "acpfs-ctl", str(self.path), *words, "--json", check=check, timeout_s=timeout_s
        )
        return json.loads(done.stdout) if done.stdout.strip() else None

    def ask(self, verb: str, **args: Any) -> Any:
        """One question over the control socket, without a process: forking closes copies of open
        files, and that is a close.

        Raises:
            AcpfsError: as the command would have ended.
        """
        known = registry.records([self.runtime_dir])
        return client.request(registry.find(registry.normalised(str(self.path)), known), verb, args)

    def status(self) -> dict[str, Any]:
        """What `acpfs-ctl status --json` prints."""
        answer: dict[str, Any] = self.ask("status")
        return answer

    def flush(self, *paths: str, timeout_s: float = 240.0) -> None:
        """Return when all (or what lies at `paths`, below the mount point) that was written until
        now is persisted.
        """
        self.ask("flush", paths=list(paths), timeout_s=timeout_s)

    def wait_drained(self, timeout_s: float = 240.0) -> None:
        """Wait for the end of what is queued; unlike `flush` this fixes the content of no open
        file.
        """
        self.wait_status(lambda status: status["queue_length"] == 0, timeout_s)

    def wait_status(self, condition: Any, timeout_s: float = 240.0) -> dict[str, Any]:
        """Ask for the status until `condition(status)` holds.

        Raises:
            TimeoutError: it never did; with what the condition looked at, and the rest in short.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            status = LookedAt(self.status())
            if condition(status):
                return dict(status)
            if time.monotonic() > deadline:
                raise TimeoutError(f"status never came so far: {status.told()}")
            self._pause()

    def _pause(self) -> None:
        """Between two looks at something that nobody announces."""
        threading.Event().wait(LOOK_AGAIN_S)


MakeMount = Callable[..., AcpfsMount]
"""What the fixture `make_mount` is."""


# -- taking it down


def take_down(path: Path, runtime_dir: Path, pids: Iterable[Known] = ()) -> None:
    """End all that belongs to the acpfs at `path`, whatever its state, and remove its RAM tier;
    `pids` are known to belong to it.
    """
    for number in connections_at(path):
        with contextlib.suppress(OSError):
            Path(f"/sys/fs/fuse/connections/{number}/abort").write_text("1")
    for _ in range(2):  # one that was stuck in the mount may have started another before its end
        _kill_processes(runtime_dir, pids)
        _detach(path)
    for mounted in mounts_below(runtime_dir):
        subprocess.run(["umount", "-l", str(mounted)], check=False, timeout=60)
    shutil.rmtree(runtime_dir, ignore_errors=True)


def _kill_processes(runtime_dir: Path, pids: Iterable[Known], timeout_s: float = 240.0) -> None:
    """A worker whose supervisor dies starts another one, so until nobody is left.

    But for who is in a call on the mount that the worker had begun: where a keeper has the session,
    only the next worker answers it.
    """
    deadline = time.monotonic() + timeout_s
    hanging: set[int] = set()
    empty_looks = 0
    while empty_looks < 2:  # who is in an exec has no environment for a moment
        living = [pid for pid in _living(runtime_dir, pids) if pid not in hanging]
        empty_looks = 0 if living else empty_looks + 1
        if time.monotonic() > deadline:
            return
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in living:
            try:
                wait_gone(pid, 5)
            except TimeoutError:
                if _is_in_a_call(pid):
                    hanging.add(pid)


def _is_in_a_call(pid: int) -> bool:
    """Whether a thread of it waits in the kernel, and does not listen to signals."""
    with contextlib.suppress(OSError):
        return bool(tasks_in_calls(PROC / str(pid)))
    return False


def _living(runtime_dir: Path, pids: Iterable[Known]) -> list[int]:
    """Processes that carry a runtime directory in their environment, and those of `pids`."""
    marker = f"ACPFS_RUNTIME_DIR={runtime_dir}".encode()
    found = {pid for pid, since in pids if since and began(pid) == since}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return sorted(found)


def _detach(path: Path) -> None:
    while is_mounted(path):
        subprocess.run(["umount", "-l", str(path)], check=False, timeout=60)


# -- the kernel's view


def _mountinfo() -> Iterator[tuple[str, Path, str]]:
    """(device number, mount point, kind) of every mount; asks the table, never a mount."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields = line.split()
        kind = fields[fields.index(b"-") + 1].decode()
        yield fields[2].decode(), Path(os.fsdecode(fields[4].replace(b"\\040", b" "))), kind


def is_mounted(path: Path) -> bool:
    """Whether something is mounted at exactly this path."""
    return any(mounted == path for _device, mounted, _kind in _mountinfo())


def kinds_at(path: Path) -> list[str]:
    """File system types of the mounts at a path, the topmost last."""
    return [kind for _device, mounted, kind in _mountinfo() if mounted == path]


def mounts_below(path: Path) -> list[Path]:
    """Mount points at or below a path, innermost first."""
    return sorted(
        (m for _device, m, _kind in _mountinfo() if m == path or path in m.parents), reverse=True
    )


def connections_at(path: Path) -> list[int]:
    """Numbers of the FUSE connections mounted at a path."""
    return [
        int(device.partition(":")[2])
        for device, mounted, kind in _mountinfo()
        if mounted == path and kind == "fuse.acpfs"
    ]


def began(pid: int) -> str:
    """When a process began, in the kernel's ticks; "": it is gone."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def wait_gone(pid: int, timeout_s: float = 240.0) -> None:
    """Wait for the end of a process that is not our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not readable(fd, timeout_s):
            raise TimeoutError(f"process {pid} did not end within {timeout_s} s")
    finally:
        os.close(fd)


def tell_again(supervisor: int) -> None:
    """SIGTERM, the second order to end: until the process has ended, because what comes right after
    the first is one order with it.
    """
    deadline = time.monotonic() + UNMOUNT_TIMEOUT_S
    while began(supervisor):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {supervisor} did not end")
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGTERM)
        threading.Event().wait(LOOK_AGAIN_S)


def staging_files(backing: Path) -> list[Path]:
    """Staging files in a backing directory."""
    return [p for p in (backing / ".acpfs").rglob("*") if p.is_file() and "staging" in p.parts]
