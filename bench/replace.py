"""What a fault costs a job that goes on, and what it costs one that is started again: from the
fault to the first good step of all ranks.

    ACPFS_TORCH_PYTHON=.venv/frameworks/bin/python python -m bench.replace [--mib 1024] [--frozen
    3072] [--rounds 20] [--minutes M]

Four ranks of torch (gloo, CPU), HSDP: two copies of the state; `acpfs-run` starts them.

* *Replaced*: a random rank is killed at a random moment, and a spare takes its place; small state,
  and --mib. Each is one job with many faults.
* *Restarted*: a random rank is killed, and all start anew and load the snapshot of step 2: out of
  the RAM tier, by a real mount, and straight from a storage that gives --rate bytes per second and
  of which nothing is in the page cache. With processes forked from one that has torch imported, as
  spares are, and a few times with new ones, most of whose time is importing. What ranks read and
  what the device gave is counted, and two steps later the state is, bit for bit, that of the same
  job before the fault.
* *Repaired*: a rank's tensors are overwritten with NaN, and it says so; the same processes go on.
* *Short steps*: replaced and restarted once more, with --frozen MiB of parameters that no step
  touches. On two processors a step with a large state takes longer than all that acpfs does; on an
  accelerator it takes a tenth of a second.
* *Coordinator*: the active one is killed; until another one commands.

With --minutes each part has its share of that time, and ends early where it needs more; `n` says
how many rounds there were. The first good step counts in all of them, and takes what it takes: `a
step by itself` is beside it, and so is `the transfer by itself`, half of the state sent from one
rank to another.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import places
from bench.disk import Disk, NoDiskError, NoThrottleError, limited
from bench.record import GIB, MB, Report, lower_quartile, median
from bench.replace_job import WORLD, Job, status_of
from tests.rig.mounts import AcpfsMount

PHASES = ("begun", "imported", "left", "entered", "grouped", "built", "restored", "step")
"""`begun`: the first line of the process that takes the place; `left`: the last survivor is out of
its loop; the others: the last rank.
"""
SPARE = "--on-fault replace --spares 1 --template-import bench.replace_imports,torch"
SMALL_MIB = 0.05
PAUSE_S = 0.3
ROUNDS_MIN = 3
PARTS = 11
SNAPSHOT_STEP = 2
"""As `replace_ranks` has it."""
REPLACED_S = 1.0
REPAIRED_S = 1.0
COMMANDS_S = 3.0
TIMES_FASTER = 3.0


@dataclass
class Found:
    """Of one kind of fault."""

    total: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    transfer_s: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    """Bytes that all ranks read from files while they restored."""
    device: list[float] = field(default_factory=list)
    """Bytes that the storage's device gave from the fault to the first good step."""

    def note(self, job: Job, fault: float, era: tuple[int, int], names: tuple[str, ...]) -> None:
        """All ranks have done a step again."""
        self.total.append(job.last("step", era) - fault)
        for name in names:
            if name in ("begun", "imported"):
                moments = [
                    event.at for event in job.events if event.name == name and event.at > fault
                ]
            elif name == "left":
                moments = [
                    event.at
                    for event in job.events
                    if event.name == name and event.at > fault and event.era < era
                ]
            else:
                moments = [job.last(name, era)]
            if moments:
                self.phases.setdefault(name, []).append(max(moments) - fault)

    def end(self, job: Job) -> None:
        """The job has ended; its states are checked."""
        self.step_s += job.step_s()
        self.transfer_s += [
            event.number / 1e6
            for event in job.events
            if event.name == "transfer" and event.rank == 0
        ]


@dataclass
class Clock:
    """Shares a time among the parts that are left; who needs less leaves more to the others."""

    ends_at: float
    parts_left: int = PARTS

    def part(self) -> float:
        """When the next part ends."""
        now = time.monotonic()
        share = (self.ends_at - now) / self.parts_left
        self.parts_left -= 1
        return now + share


@dataclass(frozen=True)
class Restarted:
    """What rows of restarts need: a whole snapshot before the first fault, and proof that it was
    loaded.
    """

    settle: Callable[[], object]
    """Return when all that was saved is on the storage: else writing it takes time from the first
    rounds.
    """
    device_bytes: Callable[[], int]
    """What the storage's device has given so far."""

    def wait(self, job: Job) -> None:
        """Until the snapshot is whole, and two more steps are done: what later eras are compared
        with.
        """
        job.until(
            lambda: (
                len(job.numbers("saved", (0, 0))) == WORLD
                and len(job.numbers("digest", (0, 0))) == WORLD
            )
        )
        self.settle()

    def loaded(self, job: Job, era: tuple[int, int]) -> int:
        """Bytes that ranks have read for their state.

        Raises:
            RuntimeError: a rank did not begin at the snapshot.
        """
        job.until(lambda: len(job.numbers("loaded", era)) == WORLD)
        if set(begun := job.numbers("restored", era).values()) != {SNAPSHOT_STEP}:
            raise RuntimeError(
                f"ranks did not begin at the snapshot of step {SNAPSHOT_STEP} but at "
                f"{sorted(begun)}"
            )
        return sum(job.numbers("loaded", era).values())


@dataclass(frozen=True)
class Bench:
    """What all jobs have."""

    scratch: Path
    python: str
    mib: float
    frozen: float
    chance: random.Random
    clock: Clock

    @property
    def state_mib(self) -> float:
        """What the largest job has."""
        return max(self.mib, self.frozen + SMALL_MIB)

    def job(
        self,
        name: str,
        directory: Path,
        options: str,
        runtime_dir: Path | None = None,
        **config: Any,
    ) -> Job:
        return Job(
            self.scratch / name, self.python, directory / name, options, runtime_dir, **config
        )

    def faults(
        self,
        job: Job,
        rounds: int,
        fault: Callable[[int], float],
        names: tuple[str, ...] = PHASES,
        restarted: Restarted | None = None,
    ) -> Found:
        """`fault(rank)` happens so often, when all have stepped in peace for a while; it says
        when.
        """
        found = Found()
        era = (-1, -1)
        ends_at = self.clock.part()
        with job:
            if restarted is not None:
                restarted.wait(job)
            for number in range(rounds):
                if number >= ROUNDS_MIN and time.monotonic() > ends_at:
                    break
                job.until(partial(job.stepped, 2, since=era))
                time.sleep(self.chance.random() * PAUSE_S)
                at = fault(self.chance.randrange(WORLD))
                given = 0 if restarted is None else restarted.device_bytes()
                era = job.until(partial(job.stepped, 1, after=at))
                found.note(job, at, era, names)
                if restarted is not None:
                    found.device.append(restarted.device_bytes() - given)
                    found.loaded.append(restarted.loaded(job, era))
            job.until(lambda: job.stepped(3))
        found.end(job)
        job.check_digests(restarted=restarted is not None)
        return found

    def killed(
        self, job: Job, before: Callable[[], object] = lambda: None
    ) -> Callable[[int], float]:
        """The fault that is a rank's death."""

        def kill(rank: int) -> float:
            before()
            at = time.monotonic()
            os.kill(job.pid_of(rank), signal.SIGKILL)
            return at

        return kill

    def hurt(self, job: Job) -> Callable[[int], float]:
        """The fault that is a device's: the rank says when."""

        def hurt(rank: int) -> float:
            count = sum(event.name == "hurt" for event in job.events)
            (job.scratch / "hurt" / str(rank)).touch()
            job.until(lambda: sum(event.name == "hurt" for event in job.events) > count)
            return max(event.at for event in job.events if event.name == "hurt")

        return hurt

    def coordinator(self, job: Job, rounds: int) -> tuple[list[float], str]:
        """From the death of the active coordinator until another one commands; and why the job
        ended badly, if it did.
        """
        found: list[float] = []
        try:
            self._coordinators_die(job, rounds, found)
        except RuntimeError as error:
            if not found:
                raise
            print(error, file=sys.stderr)
            return found, str(error).strip().splitlines()[-1]
        return found, ""

    def _coordinators_die(self, job: Job, rounds: int, found: list[float]) -> None:
        ends_at = self.clock.part()
        with job:
            job.until(lambda: job.stepped(2))
            for number in range(rounds):
                if number >= ROUNDS_MIN and time.monotonic() > ends_at:
                    break
                job.until(
                    lambda: len([one for one in job.coordinators().values() if status_of(one)]) > 1
                )
                active = next(
                    one for one in job.coordinators().values() if status_of(one).get("active")
                )
                time.sleep(self.chance.random() * PAUSE_S)
                at = time.monotonic()
                os.kill(active["pid"], signal.SIGKILL)
                job.until(partial(other_commands, job, active["pid"]))
                found.append(time.monotonic() - at)


def other_commands(job: Job, dead: int) -> bool:
    """Whether another coordinator than this process says that it is the active one."""
    return any(
        status_of(one).get("active") for one in job.coordinators().values() if one["pid"] != dead
    )


@contextmanager
def storage(scratch: Path, mib: float, rate: int) -> Iterator[tuple[Path, Disk | None, str]]:
    """A directory on a disk that gives so many bytes per second, that disk, and why there is none,
    where there is none.
    """
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(Disk(scratch, int(6 * mib * (1 << 20)) + 2 * GIB, "storage"))
            stack.enter_context(limited(disk, rate))
        except (NoDiskError, NoThrottleError) as error:
            (scratch / "backing").mkdir(exist_ok=True)
            yield scratch / "backing", None, str(error)
            return
        yield disk.path, disk, ""


def forget(directory: Path) -> None:
    """The next read of what is below comes from the storage."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            places.forget_pages(path)


def measure(
    bench: Bench, rounds: int, executed: int, rate: int
) -> tuple[dict[str, Found], tuple[list[float], str], str]:
    """Everything."""
    found: dict[str, Found] = {}
    with storage(bench.scratch, bench.state_mib, rate) as (backing, disk, why_not):
        options = {"ram": f"{int(1.5 * bench.state_mib + bench.mib) + 512}M", "prefault": "0"}
        with AcpfsMount(
            backing,
            bench.scratch / "mnt",
            "native",
            watchdog_s=7200.0,
            **options,  # type: ignore[arg-type]
        ) as mount:
            (backing / "straight").mkdir(exist_ok=True)
            job = bench.job("small", mount.path, SPARE, mount.runtime_dir, mib=SMALL_MIB)
            found["small"] = bench.faults(job, rounds, bench.killed(job))
            job = bench.job("repair", mount.path, SPARE, mount.runtime_dir, mib=SMALL_MIB)
            found["repair"] = bench.faults(
                job, rounds, bench.hurt(job), ("left", "entered", "restored")
            )
            large: dict[str, Any] = {"mib": bench.mib}
            frozen: dict[str, Any] = {"mib": SMALL_MIB, "frozen": bench.frozen}
            for key, state in (("large", large), ("frozen", frozen)):
                memory = sum(state.values()) / (
                    1 if key == "large" else 2
                )  # a step takes as much again as a rank's half of the state
                job = bench.job(
                    key,
                    mount.path,
                    f"{SPARE} --spare-memory {memory:.0f}M",
                    mount.runtime_dir,
                    **state,
                )
                found[key] = bench.faults(
                    job,
                    rounds,
                    bench.killed(job, partial(job.await_spare, int(memory * (1 << 20)))),
                )
            job = bench.job("coordinator", mount.path, SPARE, mount.runtime_dir, mib=SMALL_MIB)
            commands = bench.coordinator(job, rounds)
            kept = Restarted(
                lambda: mount.flush(timeout_s=600), (lambda: 0) if disk is None else disk.read_bytes
            )
            names = ("begun", "entered", "built", "restored")
            for key, count, state in (
                ("", rounds, large),
                ("frozen ", rounds, frozen),
                ("executed ", executed, large),
            ):
                how = f"--max-restarts {count}" + (
                    "" if key == "executed " else " --template-import bench.replace_imports,torch"
                )
                job = bench.job(
                    f"{key}ram".replace(" ", "-"),
                    mount.path,
                    how,
                    mount.runtime_dir,
                    snapshot=True,
                    **state,
                )
                found[f"{key}ram"] = bench.faults(job, count, bench.killed(job), names, kept)
                if not why_not:
                    straight = bench.job(
                        f"{key}straight".replace(" ", "-"),
                        backing / "straight",
                        how,
                        snapshot=True,
                        **state,
                    )
                    cold = bench.killed(straight, lambda: forget(backing / "straight"))
                    found[f"{key}straight"] = bench.faults(
                        straight, count, cold, names, replace(kept, settle=os.sync)
                    )
    return found, commands, why_not


TITLES = {
    "small": "replaced by a spare, small state",
    "large": "replaced by a spare, {mib:g} MiB",
    "repair": "repaired, small state",
    "ram": "all restarted by forks, {mib:g} MiB from the RAM tier",
    "straight": "all restarted by forks, {mib:g} MiB from {rate:g} MB/s",
    "frozen": "replaced by a spare, {frozen:g} MiB and short steps",
    "frozen ram": "all restarted by forks, {frozen:g} MiB and short steps, from the RAM tier",
    "frozen straight": "all restarted by forks, {frozen:g} MiB and short steps, from {rate:g} MB/s",
    "executed ram": "all restarted with new processes, from the RAM tier",
    "executed straight": "all restarted with new processes, from {rate:g} MB/s",
}


def told(samples: list[float]) -> tuple[str, str, str]:
    """Median, best, lower quartile."""
    return f"{median(samples):.3g} s", f"{min(samples):.3g} s", f"{lower_quartile(samples):.3g} s"


def report_all(
    report: Report,
    bench: Bench,
    found: dict[str, Found],
    succeeded: tuple[list[float], str],
    why_not: str,
    rate: float,
) -> None:
    """Rows and bars."""
    mib = bench.mib
    commands, ended = succeeded
    for key, one in found.items():
        title = TITLES[key].format(mib=mib, frozen=bench.frozen, rate=rate / MB)
        report.row(title, *told(one.total), len(one.total))
        report.samples[f"{title}, s"] = one.total
        for name, samples in one.phases.items():
            report.row(f"  … {name}", *told(samples), "")
        if one.loaded:
            report.notes.append(
                f"{title}: all four ranks together read {median(one.loaded) / MB:.0f} MB while "
                "they restored, "
                f"and the storage's device gave {median(one.device) / MB:.0f} MB meanwhile"
            )
        if key in ("small", "large", "frozen"):
            report.row("  a step by itself", *told(one.step_s), "")
            report.row("  the transfer by itself", *told(one.transfer_s), "")
    report.row("coordinator killed → another one commands", *told(commands), len(commands))
    report.samples["coordinator killed, s"] = commands
    small = median(found["small"].total)
    large = median(found["large"].total)
    report.notes.append(
        f"{mib:g} MiB: the spare has as much memory touched (--spare-memory) when a rank is killed"
    )
    report.bar(f"small state: ≤ {REPLACED_S:g} s", f"{small:.3g} s", met=small <= REPLACED_S)
    for key, size in (("large", mib), ("frozen", bench.frozen)):
        took = median(found[key].total)
        limit = REPLACED_S + median(found[key].transfer_s) + median(found[key].step_s)
        title = TITLES[key].format(mib=mib, frozen=size)
        report.bar(
            f"{title}: ≤ {REPLACED_S:g} s + transfer + a step",
            f"{took:.3g} s of {limit:.3g} s",
            met=took <= limit,
        )
    repaired = median(found["repair"].total)
    report.bar(f"repair: ≤ {REPAIRED_S:g} s", f"{repaired:.3g} s", met=repaired <= REPAIRED_S)
    report.bar(
        f"coordinator killed → standby commands: ≤ {COMMANDS_S:g} s",
        f"{median(commands):.3g} s",
        met=median(commands) <= COMMANDS_S,
    )
    report.bar(
        f"a job of which {len(commands)} coordinators die, one after the other, ends as its "
        "script does",
        ended or "it did",
        met=not ended,
    )
    report_ratios(report, found, why_not, large)


def report_ratios(report: Report, found: dict[str, Found], why_not: str, large: float) -> None:
    """What was measured beside what."""
    pairs = [
        ("replaced is 3 times faster than restarted from the RAM tier", large, found["ram"].total)
    ]
    if why_not:
        report.notes.append(f"straight from the storage: not measured, {why_not}")
    else:
        pairs.append(
            (
                "restarted from the RAM tier is 3 times faster than from the storage",
                median(found["ram"].total),
                found["straight"].total,
            )
        )
        loading = [
            statistics.median(
                b - a
                for a, b in zip(
                    found[key].phases["built"], found[key].phases["restored"], strict=True
                )
            )
            for key in ("ram", "straight")
        ]
        report.bar(
            f"loading alone is {TIMES_FASTER:g} times faster from the RAM tier",
            f"{loading[0]:.3g} s, {loading[1]:.3g} s from the storage: "
            f"{loading[1] / loading[0]:.2f} times",
            met=loading[1] >= TIMES_FASTER * loading[0],
        )
        begins = median(found["ram"].phases["built"])
        whole = median(found["ram"].total)
        report.notes.append(
            f"of a restart from the RAM tier {begins:.3g} of {whole:.3g} s pass before anything "
            "is loaded: "
            "where starting takes most of it, no storage can make it 3 times slower; only a "
            "larger state can"
        )
    pairs.append(
        (
            (
                "replaced is 3 times faster than restarted with new processes, as torchrun does, "
                "from the RAM tier"
            ),
            large,
            found["executed ram"].total,
        )
    )
    for promise, fast, slow in pairs:
        ratio = median(slow) / fast
        report.bar(promise, f"{ratio:.2f} times", met=ratio >= TIMES_FASTER)
    report_short_steps(report, found)
    report_restored(report, found)


def report_short_steps(report: Report, found: dict[str, Found]) -> None:
    """The same bars where a step is not most of what is measured."""
    totals = {key: median(one.total) for key, one in found.items()}
    for promise, fast, slow in (
        ("replaced is 3 times faster than restarted from the RAM tier", "frozen", "frozen ram"),
        (
            "restarted from the RAM tier is 3 times faster than from the storage",
            "frozen ram",
            "frozen straight",
        ),
    ):
        if slow in totals:
            ratio = totals[slow] / totals[fast]
            report.bar(
                f"with short steps, {promise}", f"{ratio:.2f} times", met=ratio >= TIMES_FASTER
            )


def report_restored(report: Report, found: dict[str, Found]) -> None:
    """The same without the first step: it is the script's, takes as long everywhere, and on few
    processors most of the time.
    """
    there: dict[str, float] = {
        key: median(found[key].phases["restored"])
        for key in ("large", "ram", "straight", "executed ram")
        if key in found
    }
    for promise, fast, slow in (
        ("replaced is 3 times faster than restarted from the RAM tier", "large", "ram"),
        ("restarted from the RAM tier is 3 times faster than from the storage", "ram", "straight"),
        ("replaced is 3 times faster than restarted with new processes", "large", "executed ram"),
    ):
        if slow in there:
            ratio = there[slow] / there[fast]
            report.bar(
                f"until the state is there, {promise}",
                f"{ratio:.2f} times",
                met=ratio >= TIMES_FASTER,
            )


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=float, default=1024.0, help="state of the large jobs")
    parser.add_argument(
        "--frozen",
        type=float,
        default=3072.0,
        help="MiB of parameters in the jobs with short steps",
    )
    parser.add_argument("--rounds", type=int, default=20, help="of each part")
    parser.add_argument("--restarts", type=int, default=5, help="of all ranks with new processes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for all parts together")
    parser.add_argument("--rate", type=int, default=300 * MB)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--torch",
        default=os.environ.get("ACPFS_TORCH_PYTHON", ""),
        help="an interpreter that has torch",
    )
    parser.add_argument("--no-keep", action="store_true", help="do not write bench/results")
    given = parser.parse_args()
    if not given.torch:
        parser.error("--torch or ACPFS_TORCH_PYTHON: an interpreter that has torch")
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # mounts, loop device and limits are taken back
    columns = [
        "from the fault to the first good step of all ranks",
        "median",
        "best",
        "lower quartile",
        "n",
    ]
    report = Report("replace", "A rank is lost: replaced, repaired, or all restarted", columns)
    with places.scratch() as scratch:
        before = os.getloadavg()[1]
        begun = time.monotonic()
        bench = Bench(
            scratch,
            given.torch,
            given.mib,
            given.frozen,
            random.Random(given.seed),
            Clock(begun + 60 * given.minutes),
        )
        found, succeeded, why_not = measure(bench, given.rounds, given.restarts, given.rate)
        took = time.monotonic() - begun
    report_all(report, bench, found, succeeded, why_not, given.rate)
    report.notes.append(
        f"{took:.0f} s; load average before {before:.1f}, after {os.getloadavg()[1]:.1f}, of "
        f"{os.cpu_count()} processors"
    )
    return report.finish(keep=not given.no_keep)


if __name__ == "__main__":
    raise SystemExit(main())
