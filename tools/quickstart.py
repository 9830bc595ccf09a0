"""The demonstration that tools/quickstart runs: the same torch.save straight to slow shared storage, and through acpfs.

The slow storage is the tests' pass-through file system with a bandwidth limit. Everything lies in the directory that it is given, which
the caller removes. Times are those of plain torch.save and torch.load; nothing is done to them.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount

T = TypeVar("T")
State = dict[str, Any]
MB, MIB = 1_000_000, 1024**2
BANDWIDTH = 300 * MB
BYTES_MAX, BYTES_MIN = 1536 * MIB, 48 * MIB
SHARE_OF_MEMORY = 10
"""The demonstration holds its bytes up to six times: tensors, RAM tier, loaded twice, and twice on disk, which may be a tmpfs."""
SHARE_OF_DISK = 4
DRAIN_TIMEOUT_S = 300.0

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


@dataclass
class Outcome:
    """What was found for one file; seconds."""

    name: str
    size: int
    straight_s: float
    mount_s: float
    persisted_s: float = 0.0
    checksum: str = ""
    load_ram_s: float = 0.0
    load_backing_s: float = 0.0
    equal: bool = False


def free_memory() -> int:
    """Bytes that may be used, by the kernel's estimate and the control group's limit."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    found = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        found = min(found, int(text) - int(used.read_text()))
    return found


def demonstration_bytes(directory: Path) -> int:
    """How much to save: what is asked for, else what this machine bears."""
    if "ACPFS_QUICKSTART_BYTES" in os.environ:
        return int(os.environ["ACPFS_QUICKSTART_BYTES"])
    bearable = min(free_memory() // SHARE_OF_MEMORY, shutil.disk_usage(directory).free // SHARE_OF_DISK)
    return max(BYTES_MIN, min(BYTES_MAX, bearable))


def tensors(size: int, count: int, seed: int) -> State:
    """Random tensors of `size` bytes in all."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{n}": torch.rand(size // count // 4, generator=generator) for n in range(count)}


def equal(a: State, b: State) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds and result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def step(text: str) -> None:
    """Say what happens."""
    console.print(f"[bold]•[/] {text}")


def save_both(states: dict[str, State], straight: Path, mount: AcpfsMount) -> list[Outcome]:
    """torch.save of each state, first straight to the slow storage, then through the mount; then wait for the drain."""
    step(f"torch.save straight to the slow storage: {straight}")
    straight_s = {name: timed(lambda: torch.save(state, straight / name))[0] for name, state in states.items()}  # noqa: B023
    step(f"the same torch.save through acpfs: {mount.path}")
    outcomes, closed_at = [], {}
    for name, state in states.items():
        seconds, _ = timed(lambda: torch.save(state, mount.path / name))  # noqa: B023
        closed_at[name] = time.perf_counter()
        outcomes.append(Outcome(name, (mount.path / name).stat().st_size, straight_s[name], seconds))
    step("training could go on here; acpfs drains to the slow storage meanwhile (acpfs-ctl wait)")
    for outcome in outcomes:
        mount.run("acpfs-ctl", str(mount.path), "wait", str(mount.path / outcome.name), "--timeout", str(DRAIN_TIMEOUT_S), timeout_s=600)
        outcome.persisted_s = time.perf_counter() - closed_at[outcome.name]
    return outcomes


def read_both(states: dict[str, State], backing: Path, mount: AcpfsMount, outcomes: list[Outcome]) -> None:
    """Checksums, then torch.load from RAM and from the slow storage."""
    step("acpfs-ctl verify: reads the slow storage again and compares it with the checksums taken while saving")
    for outcome in outcomes:
        done = mount.run("acpfs-ctl", str(mount.path), "verify", str(mount.path / outcome.name), check=False)
        outcome.checksum = "verified" if done.returncode == 0 else "DIFFERS"
    step("torch.load through acpfs (from RAM), and from the slow storage")
    for outcome in outcomes:
        outcome.load_ram_s, loaded = timed(lambda: torch.load(mount.path / outcome.name))  # noqa: B023
        outcome.equal = equal(loaded, states[outcome.name])
        outcome.load_backing_s, loaded = timed(lambda: torch.load(backing / outcome.name))  # noqa: B023
        outcome.equal = outcome.equal and equal(loaded, states[outcome.name])
        del loaded


def show(outcomes: list[Outcome]) -> None:
    """The table at the end."""
    table = Table(title="torch.save and torch.load, unmodified")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.name, justify="right")
    speed = f"{BANDWIDTH // MB} MB/s"
    rows: list[tuple[str, Callable[[Outcome], str]]] = [
        ("bytes", lambda o: f"{o.size:,}"),
        (f"torch.save straight to the backing directory ({speed})", lambda o: f"{o.straight_s:.2f} s"),
        ("torch.save through acpfs: how long training stands still", lambda o: f"[bold]{o.mount_s:.2f} s[/]"),
        ("… that is faster by", lambda o: f"[bold]{o.straight_s / o.mount_s:.1f} times[/]"),
        ("then, in the background: until persisted", lambda o: f"{o.persisted_s:.2f} s"),
        ("checksum of what lies there", lambda o: o.checksum),
        ("torch.load from the backing directory", lambda o: f"{o.load_backing_s:.2f} s"),
        ("torch.load through acpfs, from RAM", lambda o: f"[bold]{o.load_ram_s:.2f} s[/]"),
        ("tensors equal, bit for bit", lambda o: "yes" if o.equal else "NO"),
    ]
    for label, cell in rows:
        table.add_row(label, *(cell(outcome) for outcome in outcomes))
    console.print(table)


def demonstrate(base: Path) -> bool:
    """Everything between the temporary directory's first and last moment; whether all went well."""
    size = demonstration_bytes(base)
    step(f"a model and its optimizer state, {size / MIB:,.0f} MiB in all (from the free memory of this machine)")
    states = {"model.pt": tensors(size // 3, 12, 1), "optimizer.pt": tensors(size * 2 // 3, 24, 2)}
    step(f"slow shared storage: {base / 'shared'}, limited to {BANDWIDTH // MB} MB/s, a typical share for one node")
    with FaultFs(base / "disk", base / "shared", bandwidth=BANDWIDTH, watchdog_s=1800) as shared:
        straight, backing = shared.path / "straight", shared.path / "checkpoints"
        straight.mkdir()
        backing.mkdir()
        mount = AcpfsMount(backing, base / "mnt", "auto", ram=str(size + size // 4 + 64 * MIB), watchdog_s=1800)
        console.print(f"  [dim]$ acpfs mount {backing} {mount.path}[/]")
        with mount:
            outcomes = save_both(states, straight, mount)
            read_both(states, backing, mount, outcomes)
            console.print(f"  [dim]$ acpfs umount {mount.path}[/]")
    show(outcomes)
    return all(outcome.equal and outcome.checksum == "verified" for outcome in outcomes)


def main(base: Path) -> int:
    """Run in an empty directory; an interruption ends it in good order."""
    interrupted = False

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        good = demonstrate(base)
    except (Exception, KeyboardInterrupt):
        if not interrupted:  # else it may be torch's own error about the file that it could not end
            raise
        console.print("interrupted")
        return 130
    if good:
        console.print("Everything was unmounted and is removed. To use it:  acpfs mount BACKING MOUNTPOINT   (README.md)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
