"""A roll-out while a job saves: each round another daemon takes the mount over in the middle of a
torch.save of --mib.

    ACPFS_TORCH_PYTHON=.venv/frameworks/bin/python python -m bench.rolling [--mib 2048] [--rounds
    20] [--no-keep]

Every daemon runs as in a pod: in the foreground, in a mount name space of its own that propagates
both ways, with an instance of its own, and is ended by SIGTERM when the next one has the mount. The
job runs in a mount name space that only receives, in a PID name space and in a memory control group
of its own. What a job sees is the longest of its small writes while a save is under way; `pause` is
how long nobody served. The next save begins when the storage has the last one, as in a training
that saves no more often than the storage can take: each take-over has what was being copied copied
again, so one every few seconds would fill RAM, and the writes would wait for room. Whoever waits
for room all the same is counted, and fails the bar. At the end every byte is compared: by the job
with what it saved, and the backing directory with the job's checksums.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from acpfs.control import client, registry
from acpfs.errors import AcpfsError
from bench.record import Report
from bench.rolling_saver import sum_of
from tests.rig import mounts

WAIT_S = 120.0
MEMORY_GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
PAUSE_BAR_S = 1.0


class RoundError(Exception):
    """A round went wrong; the text says how."""


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what nobody announces."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RoundError(what)
        time.sleep(0.02)


@contextmanager
def shared_directory(scratch: Path) -> Iterator[Path]:
    """A directory whose mounts propagate, as the kubelet has it."""
    subprocess.run(["mount", "--bind", scratch, scratch], check=True)
    subprocess.run(["mount", "--make-shared", scratch], check=True)
    try:
        yield scratch
    finally:
        subprocess.run(["umount", "-R", "-l", scratch], check=False)


@contextmanager
def memory_group() -> Iterator[Path | None]:
    """A memory control group of its own for the job; None where none can be made."""
    parent = next((one for one in MEMORY_GROUPS if (one / "cgroup.procs").exists()), None)
    group = parent / f"acpfs-rolling-{os.getpid()}" if parent else None
    if group is not None:
        group.mkdir()
    try:
        yield group
    finally:
        if group is not None:
            until(lambda: not (group / "cgroup.procs").read_text().strip(), "the job did not end")
            group.rmdir()


class Pods:
    """The daemons, one after the other."""

    def __init__(self, scratch: Path, ram: str) -> None:
        self.scratch = scratch
        self._ram = ram
        self._number = 0
        self.mountpoint = scratch / "mnt"
        self.backing = scratch / "backing"
        self.runtime = scratch / "run"
        self.current: subprocess.Popen[bytes] | None = None

    @property
    def supervisor(self) -> int:
        try:
            return registry.find(str(self.mountpoint), registry.records([self.runtime])).pid
        except AcpfsError:
            return 0

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = client.request(
            registry.find(str(self.mountpoint), registry.records([self.runtime])), "status", {}
        )
        return status

    def roll(self) -> float:
        """Another daemon takes over, and the old one is ended; how long nobody served."""
        self._number += 1
        program = (
            "import sys; from acpfs.cli.main import main; sys.argv[0] = 'acpfs'; sys.exit(main())"
        )
        words = [
            "mount",
            str(self.backing),
            str(self.mountpoint),
            "--foreground",
            "--take-over",
            "--instance",
            f"pod-{self._number}",
        ]
        words += ["--transport", "native", "--ram", self._ram, "--prefault", "0"]
        environment = {
            **os.environ,
            "ACPFS_RUNTIME_DIR": str(self.runtime),
            "PYTHONPATH": str(mounts.REPOSITORY),
        }
        command = [
            "unshare",
            "--mount",
            "--propagation",
            "shared",
            sys.executable,
            "-c",
            program,
            *words,
        ]
        with open(self.scratch / "log", "ab") as log:
            new = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        old = self.current
        self.current = new
        until(
            lambda: new.poll() is not None or self.supervisor == new.pid,
            "the new daemon does not serve",
        )
        if new.poll() is not None:
            raise RoundError(
                f"the new daemon ended with {new.returncode}: "
                f"{(self.scratch / 'log').read_text()[-2000:]}"
            )
        if old is not None:
            old.terminate()
            if old.wait(WAIT_S):
                raise RoundError(f"the old daemon ended with {old.returncode}")
        return float(self.status()["worker"]["pause_s"])

    def end(self) -> None:
        """Drained and unmounted by SIGTERM."""
        if self.current is not None:
            self.current.terminate()
            if self.current.wait(600):
                raise RoundError(f"the last daemon ended with {self.current.returncode}")


class Job:
    """The training process in its container."""

    def __init__(self, directory: Path, torch_python: str, mib: int, group: Path | None) -> None:
        enter = f"echo $$ > {group}/cgroup.procs; " if group else ""
        command = [
            "unshare",
            "--mount",
            "--propagation",
            "slave",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
        ]
        command += [
            "sh",
            "-c",
            f'{enter}exec "$@"',
            "sh",
            torch_python,
            "-m",
            "bench.rolling_saver",
            str(directory),
            str(mib),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=mounts.REPOSITORY
        )

    def line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise RoundError(f"the job ended with {self._process.wait(60)}")
        line: dict[str, Any] = json.loads(text)
        return line

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)

    def end(self) -> dict[str, Any]:
        """Its verdict."""
        self.tell("end")
        verdict = self.line()
        self._process.wait(60)
        return verdict

    def kill(self) -> None:
        with self._process:  # its pipes are closed, too
            self._process.kill()


class RoomWatch:
    """Looks who waits for room in RAM, in a thread, from `with` to its end."""

    LOOK_S = 0.1

    def __init__(self, pods: Pods) -> None:
        self.seen: set[str] = set()
        """What they wrote to."""
        self._pods = pods
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="room")

    def __enter__(self) -> RoomWatch:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(self.LOOK_S):
            with suppress(AcpfsError, OSError):  # nobody answers just now
                self.seen |= {one["path"] for one in self._pods.status()["waiting"]}


def one_round(pods: Pods, job: Job, mib: int) -> tuple[float, dict[str, Any]]:
    """A save, and a take-over when a quarter of it is in RAM; how long nobody served, and what the
    job says of the save.
    """
    until(lambda: pods.status()["queue_bytes"] == 0, "what was saved before is not persisted")
    before = pods.status()["ram"]["dirty_bytes"]
    job.tell("save")
    until(lambda: pods.status()["ram"]["dirty_bytes"] - before > mib << 18, "the job does not save")
    return pods.roll(), job.line()


def run(report: Report, torch_python: str, mib: int, rounds: int) -> int:
    """All rounds; how many of them went right."""
    with ExitStack() as stack:
        scratch = stack.enter_context(
            shared_directory(
                Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rolling-")))
            )
        )
        group = stack.enter_context(memory_group())
        pods = Pods(scratch, f"{4 * mib + 512}M")
        for directory in (pods.mountpoint, pods.backing, pods.runtime):
            directory.mkdir(mode=0o755)
        stack.callback(mounts.take_down, pods.mountpoint, pods.runtime)
        pods.roll()
        job = Job(pods.mountpoint, torch_python, mib, group)
        stack.callback(job.kill)
        pauses = []
        lines = []
        waited = set()
        for number in range(rounds):
            with RoomWatch(pods) as room:
                pause, line = one_round(pods, job, mib)
            pauses.append(pause)
            lines.append(line)
            waited |= room.seen
            report.row(number + 1, f"{pause:.3f}", f"{line['longest_s']:.3f}")
        verdict = job.end()
        pods.end()
        stored = {path.name: sum_of(path) for path in sorted(pods.backing.glob("step-*.pt"))}
        right = (
            bool(verdict["right"])
            and stored == verdict["sums"]
            and (pods.backing / "ticks").stat().st_size == verdict["ticks"]
        )
    seen = [line["longest_s"] for line in lines]
    report.samples |= {
        "pause_s": pauses,
        "longest_write_s": seen,
        "save_s": [line["s"] for line in lines],
    }
    report.bar(
        "no error, and the bytes are right",
        f"{rounds} take-overs, {verdict['saves']} saves: {'right' if right else 'WRONG'}",
        met=right,
    )
    report.bar(
        f"pause < {PAUSE_BAR_S:g} s in each",
        f"longest {max(pauses):.3f} s",
        met=max(pauses) < PAUSE_BAR_S,
    )
    report.bar(
        f"a job's longest write < {PAUSE_BAR_S:g} s",
        f"{max(seen):.3f} s",
        met=max(seen) < PAUSE_BAR_S,
    )
    report.bar(
        "no write waits for room in RAM", ", ".join(sorted(waited)) or "none did", met=not waited
    )
    return rounds if right else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-keep", action="store_true")
    options = parser.parse_args()
    torch_python = os.environ.get("ACPFS_TORCH_PYTHON", ".venv/frameworks/bin/python")
    title = f"take-overs in the middle of torch.save of {options.mib} MiB in another container"
    report = Report("rolling", title, ["round", "nobody served (s)", "longest write (s)"])
    run(report, torch_python, options.mib, options.rounds)
    return report.finish(keep=not options.no_keep)


if __name__ == "__main__":
    sys.exit(main())
