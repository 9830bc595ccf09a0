"""What a gasp costs, through a real mount: from a rank's death to the published checkpoint, and
what protection costs without one.

    ACPFS_TORCH_PYTHON=.venv/frameworks/bin/python python -m bench.gasp [--mib 1024] [--rounds 9]
    [--no-keep]

Four ranks of torch (gloo, CPU), HSDP: two copies of the state. The last rank is killed behind the
gate of update 3. Times are from the kill on: `updated`, the survivors' update 3 is done; `parked`,
all survivors out of their collectives; `settled`, all at step S; `published`, the checkpoint has
its name. Beside each large gasp in a mount stand a plain save of the same state to tmpfs in the
same job, and a gasp straight to the mount's storage. The storage takes --rate bytes per second, by
the kernel's block throttle where that can be set; where not, that gasp is not measured, and the
least that it takes is said (bytes through the rate).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import xxhash

from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from bench.disk import Disk, NoDiskError, NoThrottleError, limited
from bench.record import GIB, MB, Report, lower_quartile
from tests.rig.mounts import REPOSITORY, AcpfsMount

STEP_S = 0.1
"""The step that overhead is a share of."""
IDLE_S = 2.0
READY_TIMEOUT_S = 30.0
READY_LOOKS = 4
"""Half a second apart, all the same: no more memory is made ready."""
STEPS_ROUNDS_MAX = 5
"""Processor time of a step varies little; gasps need the machine for longer."""
JOB_TIMEOUT_S = 400.0
ROUNDS_BESIDE = 3
"""So much more than all rounds the storage has room for: the gasp straight to it, and what is being
written.
"""
Times = dict[str, Any]


class Bench:
    """Runs jobs; owns the scratch directory."""

    def __init__(self, scratch: Path, torch_python: str, mib: float) -> None:
        self._scratch = scratch
        self._python = torch_python
        self._mib = mib
        self._jobs = 0

    def job(self, directory: Path, runtime_dir: Path | None = None, **config: Any) -> Times:
        """One job."""
        self._jobs += 1
        scratch = self._scratch / f"job-{self._jobs}"
        save = directory / f"run-{self._jobs}"
        scratch.mkdir()
        wanted = {
            "directory": str(save),
            "scratch": str(scratch),
            "kind": "hsdp",
            "mib": self._mib,
            "kill": True,
            **config,
        }
        environment = {**os.environ, "ACPFS_TRAIN_COORDINATOR_PYTHON": sys.executable}
        environment |= {ENVIRONMENT_VARIABLE: str(runtime_dir)} if runtime_dir else {}
        words = [
            self._python,
            "-m",
            "bench.gasp_ranks",
            str(Path(xxhash.__file__).parents[1]),
            json.dumps(wanted),
        ]
        done = subprocess.run(
            words,
            cwd=REPOSITORY,
            env=environment,
            timeout=JOB_TIMEOUT_S,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-20000:] + done.stdout[-4000:])
        for path in (scratch, save, *([Path(config["plain"])] if "plain" in config else [])):
            shutil.rmtree(path, ignore_errors=True)
        found: Times = json.loads(done.stdout.splitlines()[-1])
        return found


@contextmanager
def storage(scratch: Path, mib: float, rate: int, rounds: int) -> Iterator[tuple[Path, str]]:
    """A directory that takes so many bytes per second, and why it does not, where it does not.

    It has room for all rounds: what a job left in the mount is removed, and the guard keeps it
    there for half an hour (S143).
    """
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(
                Disk(scratch, int((rounds + ROUNDS_BESIDE) * mib * (1 << 20)) + GIB, "gasp")
            )
            stack.enter_context(limited(disk, 0, rate))
        except (NoDiskError, NoThrottleError) as error:
            (scratch / "backing").mkdir(exist_ok=True)
            yield scratch / "backing", str(error)
            return
        yield disk.path, ""


def wait_ready(mount: AcpfsMount) -> None:
    """Until the mount makes no more memory ready: a job trains for hours before a rank dies, so
    that users find it ready.
    """
    ready = -1
    calm = 0
    deadline = time.monotonic() + READY_TIMEOUT_S
    while calm < READY_LOOKS and time.monotonic() < deadline:
        time.sleep(0.5)
        now = int(mount.status()["ram"]["prefaulted_bytes"])
        calm = calm + 1 if now == ready else 0
        ready = now


def told(samples: list[float], unit: str = "s") -> str:
    """Best and lower quartile."""
    return f"{min(samples):.3g} {unit}, {lower_quartile(samples):.3g} {unit}"


def measure(
    bench: Bench, scratch: Path, rounds: int, mib: float, rate: int
) -> tuple[dict[str, list[Times]], str]:
    """All jobs, those that are compared side by side."""
    found: dict[str, list[Times]] = {
        "small": [],
        "large": [],
        "straight": [],
        "ddp": [],
        "hsdp": [],
    }
    with storage(scratch, mib, rate, rounds) as (backing, why_not):
        options = {"ram": f"{int(3 * mib) + 512}M", "prefault": "auto"}
        with AcpfsMount(backing, scratch / "mnt", "native", watchdog_s=7200.0, **options) as mount:  # type: ignore[arg-type]
            (backing / "straight").mkdir(exist_ok=True)
            for number in range(rounds):
                found["small"].append(bench.job(mount.path, mount.runtime_dir, mib=0.01))
                wait_ready(mount)
                found["large"].append(
                    bench.job(
                        mount.path,
                        mount.runtime_dir,
                        plain=f"/dev/shm/acpfs-bench-gasp-{os.getpid()}",
                    )
                )
                if not why_not:
                    mount.flush(timeout_s=600)
                    found["straight"].append(bench.job(backing / "straight"))
                mount.flush(timeout_s=600)
                for kind in ("ddp", "hsdp") if number < STEPS_ROUNDS_MAX else ():
                    steps = {
                        "kill": False,
                        "kind": kind,
                        "mib": 0.01,
                        "steps": 300,
                        "idle_s": IDLE_S,
                    }
                    found[kind].append(bench.job(mount.path, mount.runtime_dir, **steps))
            mount.wait_status(
                lambda status: status["open_files"] == 0, JOB_TIMEOUT_S
            )  # coordinators end a moment after their ranks
    return found, why_not


def report_gasps(
    report: Report, found: dict[str, list[Times]], mib: float, rate: int, why_not: str
) -> None:
    """Rows 1 to 6 of the design's table."""
    small = found["small"]
    large = found["large"]

    def row(name: str, samples: list[float], bar: str, *, met: bool) -> None:
        report.samples[f"{name}, s"] = samples
        report.row(name, told(samples))
        report.bar(f"{name}: {bar}", f"best {min(samples):.3g} s", met=met)

    parked = [one["stopping"] for one in small]
    row("SIGKILL → all survivors parked, small state", parked, "≤ 0.3 s", met=min(parked) <= 0.3)
    parked = [one["stopping"] for one in large]
    row(f"SIGKILL → all survivors parked, {mib:g} MiB", parked, "≤ 0.3 s", met=min(parked) <= 0.3)
    report.row(
        "  … of that the survivors' own update, which is finished and not torn",
        told([one["updated"] for one in large]),
    )
    report.row("  … and from its end on", told([one["stopping"] - one["updated"] for one in large]))
    settled = [one["saving"] - one["stopping"] for one in small]
    row("parked → settled, small state", settled, "≤ 0.1 s and one update", met=min(settled) <= 0.1)
    row(
        "SIGKILL → published, small state",
        [one["published"] for one in small],
        "≤ 0.5 s",
        met=min(o["published"] for o in small) <= 0.5,
    )
    published = [one["published"] for one in large]
    plain = [one["plain"][0] for one in large]
    limit = 1 + 1.3 * min(plain)
    row(
        f"SIGKILL → published, {mib:g} MiB",
        published,
        "≤ 1 s + 1.3 × a plain save to tmpfs",
        met=min(published) <= limit,
    )
    report.row("a plain save of the same to tmpfs", told(plain))
    if why_not:
        least = large[0]["bytes"] / rate
        report.notes.append(
            f"straight to the storage: not measured, {why_not}; {large[0]['bytes'] / MB:.0f} MB "
            f"take {least:.1f} s at least"
        )
    else:
        straight = [one["published"] for one in found["straight"]]
        report.row("SIGKILL → published, straight to the storage", told(straight))
        report.samples["straight to the storage, s"] = straight
        least = min(straight)
    ratio = least / min(published)
    report.bar(
        f"in the mount against straight to {rate / MB:.0f} MB/s: ≥ 3 times sooner",
        f"{ratio:.2f} times",
        met=ratio >= 3,
    )
    lost = [one["lost"] for one in small + large + found["straight"]]
    report.bar(
        "steps lost to one rank's death: ≤ 1",
        f"{max(lost)} at most in {len(lost)} jobs",
        met=max(lost) <= 1,
    )


def report_steps(report: Report, found: dict[str, list[Times]]) -> None:
    """Rows 7 and 8: what a step costs more, as a share of one that takes a tenth of a second."""
    more = {
        kind: [one["with cpu"] - one["without cpu"] for one in found[kind]]
        for kind in ("ddp", "hsdp")
    }
    wall = {kind: [one["with"] - one["without"] for one in found[kind]] for kind in ("ddp", "hsdp")}
    idle = [one["idle"] for one in found["ddp"]]
    share = max(0.0, lower_quartile(more["ddp"])) / STEP_S + min(idle)
    report.samples |= {
        f"a step of {kind} costs more, processor s": samples for kind, samples in more.items()
    }
    report.samples |= {
        f"a step of {kind} takes longer, s": samples for kind, samples in wall.items()
    } | {"idle processor time, share": idle}
    for kind, what in (
        ("ddp", "marks, host state (DDP)"),
        ("hsdp", "the same and the explicit gate (HSDP)"),
    ):
        report.row(
            f"processor time of a step: {what}", told([1e6 * value for value in more[kind]], "us")
        )
        report.row(
            f"  and a step takes longer, waiting for the slowest included ({kind})",
            told([1e6 * value for value in wall[kind]], "us"),
        )
    report.row("processor time of the member's thread", told([100 * value for value in idle], "%"))
    report.bar(
        "overhead without faults per 100 ms step: ≤ 0.3 %",
        f"{100 * share:.3f} %",
        met=share <= 0.003,
    )
    gate = max(0.0, lower_quartile(more["hsdp"]) - max(0.0, lower_quartile(more["ddp"]))) / STEP_S
    report.bar("explicit gate per 100 ms step: ≤ 0.5 %", f"{100 * gate:.3f} %", met=gate <= 0.005)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=float, default=1024.0, help="state of the large job")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rate", type=int, default=300 * MB)
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
    report = Report(
        "gasp",
        "A rank dies: the gasp, and what protection costs without one",
        ["what", "best, lower quartile"],
    )
    with tempfile.TemporaryDirectory(prefix="acpfs-bench-gasp-") as scratch:
        before = os.getloadavg()[1]
        found, why_not = measure(
            Bench(Path(scratch), given.torch, given.mib),
            Path(scratch),
            given.rounds,
            given.mib,
            given.rate,
        )
    report_gasps(report, found, given.mib, given.rate, why_not)
    report_steps(report, found)
    report.notes.append(
        f"load average before {before:.1f}, after {os.getloadavg()[1]:.1f}, of {os.cpu_count()} "
        "processors; 4 ranks on them"
    )
    report.notes.append(
        "not measured here: replacement: bench.replace; 1,000 members: bench.gasp_members; "
        "advisor: tests/training/test_interval.py"
    )
    return report.finish(keep=not given.no_keep)


if __name__ == "__main__":
    raise SystemExit(main())
