"""Servers of a distributed file system in network, process and mount name spaces of their own.

Owns the first process of those name spaces: it holds a pipe from this process, and when that closes
(at the end of the stand, or because this process was killed) the kernel kills every server and
client with it. What the host has of a stand is client mounts, removed by `__exit__`, and the files
below `base`. Must not know acpfs.
"""

from __future__ import annotations

import abc
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.rig.mounts import wait_gone
from tests.rig.processes import stop_processes

ADDRESS = "10.77.0.1"
"""Of all servers, on the loopback device of a network that nobody else sees; both file systems
refuse 127.0.0.1.
"""
TIMEOUT_S = 60.0
LOOK_AGAIN_S = 0.05
# Copies of other tests' mounts would keep those alive when they are unmounted: their sessions would
# never end. With SIGCHLD ignored, what has no parent any more is reaped by the kernel: glusterd
# takes a brick that is a zombie for a living one.
_FIRST_PROCESS = f"""
sed -nE 's/^([^ ]+ ){{4}}([^ ]+) .* - (fuse|tmpfs acpfs-ram).*/\\2/p' \\
    /proc/self/mountinfo | sort -r |
while read -r at; do umount -l "$at"; done
mount -t tmpfs none /run && mkdir -p /run/gluster || exit 1
ip link set lo up && ip addr add {ADDRESS}/24 dev lo || exit 1
echo ready
exec env --ignore-signal=CHLD cat
"""


class Servers:
    """Name spaces, and what runs in them."""

    def __init__(self, base: Path) -> None:
        """`base`: where output goes, as NAME.log."""
        self._base = base
        self._starter: subprocess.Popen[bytes] | None = None
        words = [
            "unshare",
            "--net",
            "--pid",
            "--mount",
            "--fork",
            "--kill-child=KILL",
            "--mount-proc",
            "sh",
            "-c",
            _FIRST_PROCESS,
        ]
        self._holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            self.close()
            raise RuntimeError("no name spaces for the servers: root is needed, and `ip`")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self._first = children.split()[0]
        self._space = os.readlink(f"/proc/{self._first}/ns/pid")
        reaped = ["env", "--ignore-signal=CHLD", "sh"]
        self._starter = subprocess.Popen(
            self._words(reaped, hosts_mounts=False), stdin=subprocess.PIPE
        )

    def close(self) -> None:
        """End all that runs there."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._holder.wait(5)
        self._holder.kill()
        self._holder.wait()
        self._holder.stdout.close()
        if self._starter is not None:  # dead with all the others
            assert self._starter.stdin is not None
            self._starter.stdin.close()
            self._starter.wait()

    def _words(self, words: Iterable[str], *, hosts_mounts: bool) -> list[str]:
        spaces = ["--net", "--pid"] if hosts_mounts else ["--net", "--pid", "--mount"]
        return ["nsenter", "-t", self._first, *spaces, *words]

    def run(
        self, *words: str, check: bool = True, hosts_mounts: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; with `hosts_mounts` what it mounts is there for all of this
        machine.

        Raises:
            RuntimeError: another exit code than 0, with what it said.
        """
        with open(
            self._base / "out", "w+", encoding="utf-8"
        ) as out:  # a daemon may keep a pipe open
            command = self._words(words, hosts_mounts=hosts_mounts)
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                timeout=TIMEOUT_S,
                check=False,
            )
            out.seek(0)
            said = out.read()
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)} → {done.returncode}: {said}")
        return subprocess.CompletedProcess(done.args, done.returncode, said, "")

    def start(self, name: str, *words: str) -> None:
        """Start a server that stays in the foreground.

        Not as a child of this process: its fork would close files that are open on this very
        storage, and wait for the servers.
        """
        assert self._starter is not None
        assert self._starter.stdin is not None
        log = shlex.quote(str(self._base / f"{name}.log"))
        self._starter.stdin.write(f"{shlex.join(words)} >>{log} 2>&1 </dev/null &\n".encode())
        self._starter.stdin.flush()

    def pids(self, *parts: str) -> list[int]:
        """Processes of these name spaces, as the host numbers them, whose command line has all of
        `parts`.
        """
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.readlink(entry / "ns" / "pid") == self._space and all(
                        p in _command(entry) for p in parts
                    ):
                        found.append(int(entry.name))
        return sorted(found)


def _command(process: Path) -> str:
    return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def until(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Look until something holds that nobody announces.

    Raises:
        TimeoutError: it does not.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"still not: {what}")
        threading.Event().wait(LOOK_AGAIN_S)


def kill(pids: Iterable[int]) -> None:
    """kill -9, and wait for the end."""
    gone = list(pids)
    for pid in gone:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in gone:
        wait_gone(pid)


@contextlib.contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """SIGSTOP for as long as the block runs: everybody who asks them hangs."""
    held = list(pids)
    stop_processes(held)
    try:
        yield
    finally:
        for pid in held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class Storage(abc.ABC):
    """One file system: its servers, and clients that are mounts of the host's. A context
    manager.
    """

    name: str
    data_servers: int
    """How many servers hold the bytes."""

    def __init__(self, base: Path, server_bytes: int | None = None) -> None:
        """`base`: a directory that does not exist yet, on this machine's disk; `server_bytes`: keep
        the bytes in RAM, so much for each.
        """
        self.base = base
        self.server_bytes = server_bytes
        self._clients: dict[Path, tuple[str, ...]] = {}

    def __enter__(self) -> Storage:
        self.base.mkdir(parents=True)
        self.servers = Servers(self.base)
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for path in list(self._clients):
                self.unmount(path)
        finally:
            self.servers.close()
            shutil.rmtree(self.base, ignore_errors=True)

    # -- clients

    def client(self, name: str, *options: str) -> Path:
        """Mount it once more, as another node would."""
        path = self.base / name
        path.mkdir()
        self._mount(path, *options)
        self._clients[path] = options
        return path

    def unmount(self, path: Path) -> None:
        """Away from the host's table, whoever uses it, and its process ends."""
        subprocess.run(
            ["umount", "-l", str(path)], check=False, timeout=120, stderr=subprocess.DEVNULL
        )
        kill(self.client_pids(path))

    def remount(self, path: Path) -> None:
        """Mount a client that was unmounted, or whose process is dead, as it was."""
        self.unmount(path)
        self._mount(path, *self._clients[path])

    def client_pids(self, path: Path) -> list[int]:
        """The process behind a client mount."""
        return self.servers.pids(str(path))

    def free_bytes(self, client: Path) -> int:
        """How much content there is room for."""
        space = os.statvfs(client)
        return space.f_bavail * space.f_frsize

    # -- what each kind is

    @abc.abstractmethod
    def start(self) -> None:
        """All servers, ready to store."""

    @abc.abstractmethod
    def _mount(self, path: Path, *options: str) -> None: ...

    @abc.abstractmethod
    def servers_of_data(self) -> list[int]:
        """Processes that hold the bytes: bricks, chunk servers."""

    @abc.abstractmethod
    def server(self, number: int) -> list[int]:
        """The process of one of them, if it lives."""

    @abc.abstractmethod
    def restart(self) -> None:
        """Start those servers again that are gone; returns when all live."""
