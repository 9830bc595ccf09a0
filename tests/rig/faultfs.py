"""A real file system with faults, to be used as a backing directory.

`python -m tests.rig.faultfs SOURCE MOUNTPOINT --control NAME` shows SOURCE at MOUNTPOINT and takes
orders on a unix socket of that name in the abstract name space (which knows no long paths and
leaves no file): one JSON object per line, one JSON object back. `FaultFs` is the same from Python:
starts the process, gives orders, and always unmounts.

Orders: `rule` (see `faults.Rule`), `remove` (id or action; none: all), `set` (bandwidth, fsync_s,
space_left, features), `state`, `reset_counters`, `await` (frozen=n, op+count, or rule+hits).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pyfuse3
import trio

from acpfs.descriptors import readable
from tests.rig.faultfs_ops import FaultyOperations
from tests.rig.faults import Faults, Features, rule_from
from tests.rig.journal import Recorder, read_journal
from tests.rig.mounts import AcpfsMount
from tests.rig.power import PowerLog
from tests.rig.power_ops import LoggedOperations

TASKS_MAX = 2000
"""Calls that may hang at once before further ones wait in the kernel."""
DESCRIPTORS_MAX = 1 << 19
WATCHDOG_S = 600.0
START_TIMEOUT_S = 240.0
ORDER_TIMEOUT_S = 300.0
"""Longer than what an order may wait for."""
AWAIT_TIMEOUT_S = 240.0
"""What a test waits for may begin late: a job of four ranks took 25 s of a minute to its first
write, on a machine with a load of 10.
"""


class FaultFs:
    """A faulty file system in a process of its own; a context manager.

    `path` is where it can be seen.
    """

    def __init__(
        self,
        source: Path,
        path: Path,
        *,
        bandwidth: int = 0,
        fsync_s: float = 0.0,
        record: Path | None = None,
        power: Path | None = None,
        page_cache: bool = False,
        sync: bool = False,
        watchdog_s: float = WATCHDOG_S,
        python: str = sys.executable,
    ) -> None:
        """`python`: an interpreter that has pyfuse3."""
        self.source = source
        self.path = path
        self._python = python
        self.record = record
        self._control = f"acpfs-faultfs-{uuid.uuid4().hex}"
        self._args = [str(source), str(path), "--control", self._control, "--lifeline"]
        self._args += ["--bandwidth", str(bandwidth), "--fsync-s", str(fsync_s)]
        self._args += ["--record", str(record)] if record else []
        self._args += ["--power", str(power)] if power else []
        self._args += ["--page-cache"] if page_cache else []
        self._args += ["--sync"] if sync else []
        self._watchdog = threading.Timer(watchdog_s, self.abort)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FaultFs:
        self.source.mkdir(parents=True, exist_ok=True)
        if AcpfsMount.lay_backing is not None:
            AcpfsMount.lay_backing(self.source)
        self.path.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [self._python, "-m", "tests.rig.faultfs", *self._args]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        self._watchdog.daemon = True
        self._watchdog.start()
        assert self._process.stdout is not None
        if (
            not readable(self._process.stdout, START_TIMEOUT_S)
            or self._process.stdout.readline() != b"ready\n"
        ):
            self.abort()
            raise RuntimeError("the faulty file system did not start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Let hanging calls go on, unmount, end the process."""
        self._watchdog.cancel()
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.abort()
        self._finish()

    def abort(self) -> None:
        """End the process at once; whoever still waits for it gets ENOTCONN."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
        self._finish()

    def _finish(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        if is_mounted(self.path):
            subprocess.run(["umount", "-l", str(self.path)], check=False, timeout=60)

    # -- orders

    def order(self, **words: Any) -> dict[str, Any]:
        """Give one order and return the answer.

        Raises:
            ValueError: the order makes no sense.
            TimeoutError: an `await` was not met in time.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ORDER_TIMEOUT_S)
            connection.connect("\0" + self._control)
            connection.sendall(json.dumps(words).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer: dict[str, Any] = json.loads(stream.readline())
        if "error" in answer:
            raise (
                TimeoutError(answer["error"])
                if answer.get("timeout")
                else ValueError(answer["error"])
            )
        return answer

    def rule(self, action: str, **words: Any) -> int:
        """Add a rule; returns its number.

        See `faults.Rule` for the words; `errno` is a name such as "EIO".
        """
        return int(self.order(order="rule", action=action, **words)["id"])

    def journal(self) -> list[dict[str, Any]]:
        """What became visible so far."""
        assert self.record is not None
        return read_journal(self.record)

    def fail(self, error: str, ops: list[str], **words: Any) -> int:
        """Make calls fail; words: glob, nth, probability, seed, times."""
        return self.rule("fail", errno=error, ops=ops, **words)

    def slow(self, seconds: float, ops: list[str] | None = None, **words: Any) -> int:
        """Delay calls; words as for `fail`, and jitter_s."""
        return self.rule("delay", seconds=seconds, ops=ops, **words)

    def freeze(self, ops: list[str] | None = None, **words: Any) -> int:
        """Make calls hang until `thaw`; ops may be ["writes"]."""
        return self.rule("freeze", ops=ops, **words)

    def thaw(self) -> None:
        """Let all hanging calls go on."""
        self.order(order="remove", action="freeze")

    def clear(self, rule: int | None = None) -> None:
        """Take out one rule, or all."""
        self.order(order="remove", id=rule)

    def set(self, **values: Any) -> None:
        """bandwidth (bytes per second), fsync_s, space_left (bytes or None), trace (list every
        call), and features by name.
        """
        self.order(order="set", **values)

    def state(self) -> dict[str, Any]:
        """Counters, rules, how many calls hang."""
        return self.order(order="state")

    def counters(self) -> dict[str, int]:
        """How often each operation was called."""
        return dict(self.state()["counters"])

    def reset_counters(self) -> None:
        """Start counting from zero."""
        self.order(order="reset_counters")

    def wait_frozen(self, count: int = 1, timeout_s: float = AWAIT_TIMEOUT_S) -> None:
        """Wait until that many calls hang."""
        self.order(order="await", frozen=count, timeout_s=timeout_s)

    def wait_count(self, op: str, count: int, timeout_s: float = AWAIT_TIMEOUT_S) -> None:
        """Wait until an operation was called that often since the counters were reset."""
        self.order(order="await", op=op, count=count, timeout_s=timeout_s)

    def hits(self, rule: int) -> int:
        """How often a rule was met so far."""
        return next(int(found["hits"]) for found in self.state()["rules"] if found["id"] == rule)

    def wait_hits(self, rule: int, hits: int = 1, timeout_s: float = AWAIT_TIMEOUT_S) -> None:
        """Wait until a rule was met that often."""
        self.order(order="await", rule=rule, hits=hits, timeout_s=timeout_s)


def is_mounted(path: Path) -> bool:
    """Whether something is mounted at exactly this path; asks the kernel's table, never the
    mount.
    """
    wanted = os.fsencode(path.absolute())
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    return any(line.split()[4].replace(b"\\040", b" ") == wanted for line in lines)


# -- the process


class Control:
    """Answers orders."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    async def serve(self, stream: trio.SocketStream) -> None:
        """One connection: an order per line."""
        pending = b""
        with contextlib.suppress(trio.BrokenResourceError):
            async for data in stream:
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    await stream.send_all(json.dumps(await self.answer(line)).encode() + b"\n")

    async def answer(self, line: bytes) -> dict[str, Any]:
        """Carry out an order."""
        try:
            words = json.loads(line)
            return await getattr(self, "_" + words.pop("order"))(**words) or {}
        except trio.TooSlowError:
            return {
                "error": f"not met in time: {line.decode()}",
                "timeout": True,
                "state": self._faults.state(),
            }
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    async def _rule(self, **words: Any) -> dict[str, Any]:
        return {"id": self._faults.add(rule_from(words))}

    async def _remove(self, id: int | None = None, action: str | None = None) -> None:
        self._faults.remove(id, action)

    async def _set(self, **values: Any) -> None:
        for name, value in values.items():
            if name in Features.__dataclass_fields__:
                setattr(self._faults.features, name, value)
            elif name in ("bandwidth", "fsync_s", "space_left", "trace"):
                setattr(self._faults, name, value)
            else:
                raise ValueError(f"unknown setting {name}")

    async def _state(self) -> dict[str, Any]:
        return self._faults.state()

    async def _reset_counters(self) -> None:
        self._faults.counters.clear()

    async def _await(self, timeout_s: float, **words: Any) -> None:
        faults = self._faults
        with trio.fail_after(timeout_s):
            if "frozen" in words:
                await faults.wait_until(lambda: faults.frozen >= words["frozen"])
            elif "op" in words:
                await faults.wait_until(lambda: faults.counters[words["op"]] >= words["count"])
            else:
                await faults.wait_until(
                    lambda: any(
                        r.id == words["rule"] and r.hits >= words["hits"] for r in faults.rules
                    )
                )


async def _serve(args: argparse.Namespace, faults: Faults, announce: Iterator[None]) -> None:
    listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await listening.bind("\0" + args.control)
    listening.listen(16)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            trio.serve_listeners, Control(faults).serve, [trio.SocketListener(listening)]
        )
        nursery.start_soon(_end_on_signal, nursery.cancel_scope)
        if args.lifeline:
            nursery.start_soon(_end_with_parent, nursery.cancel_scope)
        next(announce)
        await pyfuse3.main(max_tasks=TASKS_MAX)
        nursery.cancel_scope.cancel()


async def _end_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _number in signals:
            scope.cancel()


async def _end_with_parent(scope: trio.CancelScope) -> None:
    """The parent holds the other end of stdin; when it is gone, so are we."""
    async with trio.lowlevel.FdStream(os.dup(0)) as stream:
        while await stream.receive_some():
            pass
    scope.cancel()


def _announce() -> Iterator[None]:
    yield print("ready", flush=True)


def _allow_descriptors() -> None:
    """A descriptor for every inode that the kernel knows: as many as this user may have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS_MAX, max(hard, DESCRIPTORS_MAX)))
    except (ValueError, PermissionError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="faultfs", description="A passthrough file system with faults."
    )
    parser.add_argument("source")
    parser.add_argument("mountpoint")
    parser.add_argument(
        "--control", required=True, help="abstract name of the unix socket that takes orders"
    )
    parser.add_argument(
        "--bandwidth",
        type=int,
        default=0,
        help="bytes per second that all readers and writers share; 0: no limit",
    )
    parser.add_argument(
        "--fsync-s", type=float, default=0.0, help="seconds that each fsync takes, in parallel"
    )
    parser.add_argument("--record", help="journal of all that becomes visible")
    parser.add_argument(
        "--power", help="log of all that a power loss could take away; see tests/rig/power.py"
    )
    parser.add_argument(
        "--page-cache",
        action="store_true",
        help="let the kernel cache open files, which mmap needs",
    )
    parser.add_argument("--sync", action="store_true", help="really flush the source on fsync")
    parser.add_argument("--lifeline", action="store_true", help="end when stdin is closed")
    return parser.parse_args(argv)


def _operations(
    args: argparse.Namespace, faults: Faults, recorder: Recorder | None
) -> FaultyOperations:
    kind = (
        functools.partial(LoggedOperations, log=PowerLog(Path(args.power)))
        if args.power
        else FaultyOperations
    )
    return kind(args.source, faults, recorder, page_cache=args.page_cache, sync=args.sync)


def main(argv: list[str]) -> None:
    """Mount, serve until told to end, unmount."""
    args = _parse(argv)
    os.umask(0)
    _allow_descriptors()
    faults = Faults()
    faults.bandwidth = args.bandwidth
    faults.fsync_s = args.fsync_s
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open(args.record, "a", encoding="ascii")) if args.record else None
        recorder = Recorder(os.path.realpath(args.source), out) if out else None
        operations = _operations(args, faults, recorder)
        options = {"default_permissions", "allow_other", "fsname=faultfs", "subtype=faultfs"}
        pyfuse3.init(operations, args.mountpoint, options)
        stack.callback(pyfuse3.close, unmount=True)
        trio.run(_serve, args, faults, _announce())


if __name__ == "__main__":
    main(sys.argv[1:])
