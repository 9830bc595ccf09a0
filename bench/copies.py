"""What copies at another member cost: the stall of a save, the time and the processors that a copy
takes, and the drain of small files.

Usage: python -m bench.copies [--mib M] [--rounds N] [--files N] [--look]. As root. Both members are
on this machine and reach each other by its loopback, so they share its cores: what is compared was
measured in turns in one run, and is best and quartile of its rounds. The storage is a directory of
this machine, and nothing is drained while saves and copies are timed. `--look` keeps nothing.

Memory is warmed before each sample: a virtual machine gives pages that stay free for a while back
to its host, and the next one to touch them pays for that in the call that does. In a copy that is
the holder's pwrite, at three times the time of the write itself; a member that has held copies for
a while has such pages seldom. `native` does the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acpfs.exchange.sealed_stream import can_seal
from bench import places
from bench.record import GIB, MB, MIB, Report, lower_quartile
from tests.rig.mounts import AcpfsMount

STALL_MAX = 1.1
PLAIN_MIN = 0.8
SEALED_MIN = 0.5
PLAIN_CPU_MAX = 0.9
SEALED_CPU_MAX = 1.2
DRAIN_MAX = 1.2
SMALL_BYTES = 1000
WAIT_S = 240.0
PIECE_BYTES = MIB
SAVES = 3
"""In one round: a save takes some milliseconds, which vary by more than what is looked for."""
WARM = 3
"""So many times a file's size is warmed: the saver's, the holder's, and what carries it."""
CPUCLOCK_SCHED = 2
"""Of linux/posix-timers.h: with a pid, the clock of what its process has used."""
ALONE = "one member"
BESIDE = "two members, no copies"
"""What copies cost is measured against this: a second member alone has its price."""
ENCRYPTED = "copied, encrypted"
WITHOUT: dict[str, dict[str, object]] = {ALONE: {}, BESIDE: {"copies": 0}}
WAYS: dict[str, dict[str, object]] = {
    ENCRYPTED: {"copies": 1},
    "copied, plain": {"copies": 1, "no_peer_encryption": True},
}
WITHOUT_PACKAGE = "copied, without cryptography"
"""In TLS, where the others go in sealed pieces; with no bar, as it is the way for want of that."""


@dataclass
class Pair:
    """A member that saves, and, where there are copies, its holder."""

    saves: AcpfsMount
    holds: AcpfsMount | None
    stalls_s: list[float] = field(default_factory=list)
    copies_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    user_s: float = 0.0
    system_s: float = 0.0
    """Of all copies, counted in ticks: the parts of what `cpu_s` has exactly."""
    drains_s: list[float] = field(default_factory=list)


def without_package(directory: Path) -> str:
    """An interpreter that has all that this one has, but for the package cryptography."""
    venv.create(directory, symlinks=True)
    bases = {"base": str(directory), "platbase": str(directory)}
    packages = Path(sysconfig.get_path("purelib", vars=bases))
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith("cryptography"):
            (packages / path.name).symlink_to(path)
    return str(directory / "bin" / "python")


@contextlib.contextmanager
def pair(
    base: Path, ram_bytes: int, options: dict[str, object], python: str = sys.executable
) -> Iterator[Pair]:
    """Mounted, and the holder known."""
    (backing := base / "backing").mkdir(parents=True)
    is_alone = "copies" not in options
    has_holder = bool(options.get("copies"))
    with contextlib.ExitStack() as stack:
        made = []
        for name in ("saves",) if is_alone else ("saves", "holds"):
            settings: dict[str, Any] = {
                "heartbeat": 0.5,
                "node_id": name,
                "failure_domain": name,
                "ram": str(ram_bytes),
                "copies_ram": "90%",
                **({} if is_alone else {"exchange": "127.0.0.1"}),
                **options,
            }
            mount = AcpfsMount(
                backing, base / name, "native", watchdog_s=3600, python=python, **settings
            )
            made.append(stack.enter_context(mount))
        if has_holder:
            made[0].wait_status(lambda status: status["copies"]["state"] == "on")
        yield Pair(made[0], made[1] if has_holder else None)


@dataclass(frozen=True)
class Used:
    """Processor time."""

    exact_s: float
    user_s: float
    system_s: float
    """In ticks."""


def used(mounts: Sequence[AcpfsMount]) -> Used:
    """That all processes of the mounts have used."""
    exact_s = 0.0
    user = 0
    system = 0
    for pid in {pid for mount in mounts for pid in mount.living()}:
        with contextlib.suppress(OSError):
            exact_s += time.clock_gettime(~pid << 3 | CPUCLOCK_SCHED)
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            user += int(fields[11])
            system += int(fields[12])
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return Used(exact_s, user * tick_s, system * tick_s)


def save_s(path: Path, data: bytes) -> float:
    """Of open, write and close."""
    began = time.monotonic()
    path.write_bytes(data)
    return time.monotonic() - began


def save(one: Pair, name: str, data: bytes, warmth: Path) -> None:
    """A file, in a member of which nothing is drained; and its copy."""
    members = [one.saves, *([one.holds] if one.holds else [])]
    one.saves.ask("set", key="bandwidth", value="1")
    places.warm(warmth, WARM * len(data))
    one.stalls_s.append(save_s(one.saves.path / name, data))
    if one.holds is not None:
        saved = used(members)
        began = time.monotonic()
        one.saves.ask("wait", paths=[name], copied=True, timeout_s=WAIT_S)
        one.copies_s.append(time.monotonic() - began)
        copied = used(members)
        one.cpu_s.append(copied.exact_s - saved.exact_s)
        one.user_s += copied.user_s - saved.user_s
        one.system_s += copied.system_s - saved.system_s
    one.saves.ask("set", key="bandwidth", value="0")
    one.saves.flush()
    (one.saves.path / name).unlink()
    one.saves.flush()


def drain(one: Pair, count: int) -> None:
    """Of so many small files, closed while nothing is drained."""
    one.saves.ask("set", key="bandwidth", value="1")
    (directory := one.saves.path / "small").mkdir()
    for number in range(count):
        (directory / f"{number}").write_bytes(os.urandom(SMALL_BYTES))
    if one.holds is not None:
        one.saves.ask("wait", paths=["small"], copied=True, timeout_s=WAIT_S)
    began = time.monotonic()
    one.saves.ask("set", key="bandwidth", value="0")
    one.saves.flush()
    one.drains_s.append(time.monotonic() - began)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    one.saves.flush()


def bare_s(scratch: Path, size: int) -> float:
    """sendfile over the loopback, from memory into a file of a tmpfs: what any copy takes."""
    listener = socket.create_server(("127.0.0.1", 0))
    source = os.memfd_create("bench")
    target = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    data = os.urandom(PIECE_BYTES)
    for at in range(0, size, PIECE_BYTES):
        os.pwrite(source, data, at)

    def receive() -> None:
        connection, _peer = listener.accept()
        buffer = bytearray(PIECE_BYTES)
        at = 0
        with connection:
            while at < size:
                count = connection.recv_into(buffer)
                assert count
                os.pwrite(target, memoryview(buffer)[:count], at)
                at += count

    receiver = threading.Thread(target=receive)
    receiver.start()
    began = time.monotonic()
    with socket.create_connection(listener.getsockname()) as connection:
        at = 0
        while at < size:
            at += os.sendfile(connection.fileno(), source, at, size - at)
        receiver.join()
    took = time.monotonic() - began
    for fd in (source, target):
        os.close(fd)
    listener.close()
    scratch.unlink()
    return took


def in_turns(pairs: list[Pair], number: int) -> list[Pair]:
    """Another one first each time: what one leaves to be done is paid by the next one."""
    first = number % len(pairs)
    return pairs[first:] + pairs[:first]


def both(samples: list[float], shown: Callable[[float], str]) -> str:
    """Best, and lower quartile."""
    return f"{shown(min(samples))}, {shown(lower_quartile(samples))}" if samples else "–"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--mib", type=int, default=256)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--files", type=int, default=1000)
    options.add_argument("--look", action="store_true")
    given = options.parse_args()
    size = given.mib * MIB
    report = Report(
        "copies",
        "What copies at another member cost: best and lower quartile",
        [
            "way",
            "stall of a save, s",
            "copy, MB/s",
            "CPU s per GiB",
            "user : system",
            "drain of small files, s",
        ],
    )
    bare: list[float] = []
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="acpfs-copies-")))
        pairs = {}
        for number, (name, settings) in enumerate((WITHOUT | WAYS).items()):
            made = pair(directory / f"way{number}", 5 * size, settings)
            pairs[name] = stack.enter_context(made)
        if can_seal():
            python = without_package(directory / "python")
            less = pair(directory / "less", 5 * size, WAYS[ENCRYPTED], python)
            pairs[WITHOUT_PACKAGE] = stack.enter_context(less)
        warmth = stack.enter_context(places.tmpfs(directory / "warmth", "always")) / "warmth"
        data = os.urandom(size)
        for number in range(SAVES * given.rounds + 1):
            for one in in_turns(list(pairs.values()), number):
                save(one, f"file-{number}", data, warmth)
            places.warm(warmth, WARM * size)
            bare.append(bare_s(Path("/dev/shm") / f"acpfs-bench-{os.getpid()}", size))
        for number in range(given.rounds + 1):
            for one in in_turns(list(pairs.values()), number):
                drain(one, given.files)
        for one in pairs.values():  # the first round connects, and learns
            for kept in (one.stalls_s, one.copies_s, one.cpu_s, one.drains_s):
                del kept[:1]
        del bare[:1]
        judge(report, pairs, bare, size, given.files)
    return report.finish(keep=not given.look)


def judge(report: Report, pairs: dict[str, Pair], bare: list[float], size: int, files: int) -> None:
    """Rows and bars; ratios of quartiles."""
    for name, one in pairs.items():
        report.samples |= {
            f"{name}: {what}_s": list(samples)
            for what, samples in (
                ("stall", one.stalls_s),
                ("copy", one.copies_s),
                ("cpu", one.cpu_s),
                ("drain", one.drains_s),
            )
        }
        report.row(
            name,
            both(one.stalls_s, lambda s: f"{s:.3f}"),
            both(one.copies_s, lambda s: f"{size / s / MB:.0f}"),
            both(one.cpu_s, lambda s: f"{s * GIB / size:.2f}"),
            f"{one.user_s:.2f} : {one.system_s:.2f}" if one.cpu_s else "–",
            both(one.drains_s, lambda s: f"{s:.2f}"),
        )
    report.samples["bare_s"] = bare
    report.row("bare sendfile loop", "", both(bare, lambda s: f"{size / s / MB:.0f}"), "", "", "")
    beside = pairs[BESIDE]
    for name in WAYS:
        one = pairs[name]
        is_plain = name.endswith("plain")
        stall = lower_quartile(one.stalls_s) / lower_quartile(beside.stalls_s)
        report.bar(
            f"{name}: a save takes at most {STALL_MAX:g} times as long",
            f"{stall:.2f}",
            met=stall <= STALL_MAX,
        )
        least = PLAIN_MIN if is_plain else SEALED_MIN
        rate = lower_quartile(bare) / lower_quartile(one.copies_s)
        report.bar(
            f"{name}: at least {least:g} of a bare sendfile loop", f"{rate:.2f}", met=rate >= least
        )
        most = PLAIN_CPU_MAX if is_plain else SEALED_CPU_MAX
        cpu = lower_quartile(one.cpu_s) * GIB / size
        report.bar(
            f"{name}: at most {most:g} CPU s per GiB, both sides together",
            f"{cpu:.2f}",
            met=cpu <= most,
        )
        drained = lower_quartile(one.drains_s) / lower_quartile(beside.drains_s)
        report.bar(
            f"{name}: {files} small files are drained in at most {DRAIN_MAX:g} times the time",
            f"{drained:.2f}",
            met=drained <= DRAIN_MAX,
        )
    for name in [*WAYS, *({WITHOUT_PACKAGE} & pairs.keys())]:
        ways = sorted(set(pairs[name].saves.status()["exchange"]["ways"].values()))
        report.notes.append(f"{name}: what goes between the members is {', '.join(ways)} (S546)")
    if WITHOUT_PACKAGE in pairs:
        more_s = lower_quartile(pairs[WITHOUT_PACKAGE].cpu_s) - lower_quartile(
            pairs[ENCRYPTED].cpu_s
        )
        report.notes.append(
            f"without the package cryptography a copy takes {more_s * GIB / size:.2f} s of "
            "processors more per GiB, by quartiles"
        )
    report.notes.append(
        "a copy is timed from the close until `wait --copied` returns, with what the journal takes"
    )


if __name__ == "__main__":
    sys.exit(main())
