"""Reading checkpoints: a restart from RAM, many readers of one cold file, preloading, and what
stays in RAM while a loop saves.

Usage: python -m bench.warm_reads [--gib G] [--rounds N] [--transport T] [--quick]. The limited
backing directory is a pass-through file system that lets 300 MB/s pass, caches nothing and counts
what is read from it. It takes the processors that the readers copy with, which storage does not do:
many readers are measured on a disk that the kernel throttles to the same speed, too.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench import places
from bench.clock import together
from bench.record import GIB, MB, MIB, Report, median
from bench.throttled import NoThrottleError, throttled_disk
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount

BANDWIDTH = 300 * MB
READERS = 8
FASTER = 5.0
AT_MOST = 1.3
OF_DD = 0.9
LOCAL = "local disk"
LIMITED = "limited backing directory"
THROTTLED = "throttled disk"
RETAINED = 3
SAVES = 8
SAVE_EVERY_S = 2.0


def write(path: Path, size: int) -> None:
    """A file straight on the backing directory's disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    together("write", [path], size)


def again(mount: AcpfsMount, *names: str) -> None:
    """Make files cold: out of RAM, and out of the page cache."""
    mount.flush()
    mount.ask("evict", paths=list(names))
    for name in names:
        places.forget_pages(mount.backing / name)


def restart(report: Report, limited: FaultFs, mount: AcpfsMount, size: int, rounds: int) -> None:
    """The same file read through the mount, where RAM has it, and natively from the limited backing
    directory.
    """
    together("write", [mount.path / "run/model.pt"], size)
    mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
    ram = []
    backing = []
    for _ in range(rounds):
        ram.append(size / together("read", [mount.path / "run/model.pt"], size) / MB)
        backing.append(size / together("read", [limited.path / "run/model.pt"], size) / MB)
    report.row(
        "restart: read from RAM", f"{median(ram):,.0f} MB/s", " ".join(f"{v:,.0f}" for v in ram)
    )
    report.row(
        "restart: read from the limited backing directory",
        f"{median(backing):,.0f} MB/s",
        " ".join(f"{v:,.0f}" for v in backing),
    )
    report.samples |= {"restart_ram_mb_s": ram, "restart_backing_mb_s": backing}
    ratio = median(ram) / median(backing)
    report.bar(
        f"a restart from RAM is at least {FASTER:g} times faster than from 300 MB/s",
        f"{ratio:.1f} times",
        met=ratio >= FASTER,
    )
    again(mount, "run/model.pt")


def many_readers(
    report: Report,
    mount: AcpfsMount,
    size: int,
    rounds: int,
    where: str,
    read_bytes: Callable[[], int],
) -> None:
    """Eight processes read one cold file at the same time; beside it one reads it natively.

    `read_bytes`: from the storage, ever.
    """
    native = mount.backing / "cold"
    write(native if where == THROTTLED else mount.backing.with_name("source") / "cold", size)
    subprocess.run(["sync"], check=True)
    many = []
    one = []
    read = []
    for _ in range(rounds):
        again(mount, "cold")
        before = read_bytes()
        many.append(together("read", [mount.path / "cold"] * READERS, size))
        read.append((read_bytes() - before) / size)
        places.forget_pages(native)
        one.append(together("read", [native], size))
    report.row(
        f"{READERS} readers of one cold file, {where}",
        f"{median(many):.2f} s",
        " ".join(f"{v:.2f}" for v in many),
    )
    report.row(
        f"one native read of it, {where}", f"{median(one):.2f} s", " ".join(f"{v:.2f}" for v in one)
    )
    key = where.replace(" ", "_")
    report.samples |= {
        f"many_{key}_s": many,
        f"one_native_{key}_s": one,
        f"read_below_{key}_times": read,
    }
    report.bar(
        f"it is read once, {where}", f"{max(read):.3f} times its size", met=max(read) <= 1.01
    )
    ratio = median(many) / median(one)
    report.bar(
        f"{READERS} readers take at most {AT_MOST} times one native read, {where}",
        f"{ratio:.2f} times",
        met=ratio <= AT_MOST,
    )
    again(mount, "cold")


def preload(report: Report, mount: AcpfsMount, size: int, rounds: int, where: str) -> None:
    """dd into a tmpfs against preload into the RAM tier, which is one, with checksums; who is first
    changes from round to round.
    """
    write((mount.backing if where == LOCAL else mount.backing.with_name("source")) / "big", size)
    subprocess.run(["sync"], check=True)
    took: dict[str, list[float]] = {"dd": [], "preload": []}
    with places.tmpfs(mount.backing.with_name(f"{mount.backing.name}.tmpfs")) as tmpfs:
        copy = tmpfs / "big"
        actions: dict[str, Callable[[], object]] = {
            "dd": lambda: subprocess.run(
                ["dd", f"if={mount.backing / 'big'}", f"of={copy}", "bs=1M", "status=none"],
                check=True,
            ),
            "preload": lambda: mount.ask("preload", paths=["big"], wait=True),
        }
        for number in range(rounds + 1):
            for name in sorted(actions, reverse=number % 2 == 1):
                again(mount, "big")
                took[name].append(timed(actions[name]))
                copy.unlink(missing_ok=True)
    dd, preloads = ([size / s / MB for s in took[name][1:]] for name in ("dd", "preload"))
    report.row(
        f"preload, {where}",
        f"{median(preloads):,.0f} MB/s",
        " ".join(f"{v:,.0f}" for v in preloads),
    )
    report.row(
        f"dd into a tmpfs, {where}", f"{median(dd):,.0f} MB/s", " ".join(f"{v:,.0f}" for v in dd)
    )
    key = where.replace(" ", "_")
    report.samples |= {f"preload_{key}_mb_s": preloads, f"dd_{key}_mb_s": dd}
    ratio = median(preloads) / median(dd)
    report.bar(f"preload reaches {OF_DD} of dd, {where}", f"{ratio:.2f}", met=ratio >= OF_DD)


def timed(action: Callable[[], object]) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    action()
    return time.monotonic() - began


def retained(report: Report, mount: AcpfsMount, size: int) -> None:
    """A loop that saves every two seconds; after each save, how many whole checkpoints RAM has."""
    seen = []
    for step in range(1, SAVES + 1):
        began = time.monotonic()
        directory = mount.path / "loop" / f"checkpoint-{step}"
        directory.mkdir(parents=True)
        together("write", [directory / f"shard{n}.pt" for n in range(2)], size // 2)
        mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
        held = {
            row["path"].split("/")[1]
            for row in mount.ask("ls", paths=["loop"])["items"]
            if row["tier"].startswith("ram")
        }
        seen.append(
            sum(f"checkpoint-{n}" in held for n in range(step, max(0, step - RETAINED), -1))
        )
        time.sleep(max(0.0, SAVE_EVERY_S - (time.monotonic() - began)))
    report.row(
        f"newest {RETAINED} checkpoints in RAM after each of {SAVES} saves",
        str(seen[-1]),
        " ".join(map(str, seen)),
    )
    report.bar(
        f"{RETAINED} checkpoints stay in RAM while a loop saves",
        f"at least {min(seen[RETAINED - 1 :])}",
        met=min(seen[2:]) >= RETAINED,
    )


def measure(size: int, rounds: int, transport: str) -> Report:
    """One after the other, each with its own counterpart in turn."""
    report = Report(
        "warm_reads",
        f"Reading a checkpoint of {size / GIB:g} GiB, transport {transport}",
        ["what", "median", "each"],
    )
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        limited = stack.enter_context(
            FaultFs(scratch / "source", scratch / "limited", bandwidth=BANDWIDTH, watchdog_s=3000)
        )
        (scratch / "disk").mkdir()
        ram = f"{max(256, 5 * size // MIB)}M"
        with AcpfsMount(
            limited.path, scratch / "mount", transport, ram=ram, watchdog_s=3000.0
        ) as mount:
            (mount.path / "run").mkdir()
            restart(report, limited, mount, size, rounds)
            many_readers(
                report, mount, size, rounds, LIMITED, lambda: limited.counters()["read_bytes"]
            )
            preload(report, mount, size, rounds, LIMITED)
        with contextlib.ExitStack() as throttled:
            try:
                disk, read_bytes = throttled.enter_context(throttled_disk(scratch, size, BANDWIDTH))
            except NoThrottleError as why:
                report.row(
                    f"{READERS} readers of one cold file, {THROTTLED}", "not measured", str(why)
                )
            else:
                mount = throttled.enter_context(
                    AcpfsMount(disk, scratch / "over", transport, ram=ram, watchdog_s=3000.0)
                )
                many_readers(report, mount, size, rounds, THROTTLED, read_bytes)
        with AcpfsMount(
            scratch / "disk",
            scratch / "local",
            transport,
            ram=ram,
            keep_checkpoints=RETAINED,
            watchdog_s=3000.0,
        ) as mount:
            preload(report, mount, size, rounds, LOCAL)
            retained(report, mount, size)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--quick", action="store_true", help="64 MiB, one round; nothing is kept")
    arguments = parser.parse_args()
    size, rounds = (
        (64 * MIB, 1) if arguments.quick else (int(arguments.gib * GIB), arguments.rounds)
    )
    sys.exit(measure(size, rounds, arguments.transport).finish(keep=not arguments.quick))
