"""Tries what `acpfs.training` takes for granted of an accelerator: `tools/train-accelerator-check`
says how it is called.

Each check says what it saw in one line; none of them needs a mount, or more than two devices, and
only the last ones need acpfs: four ranks that share one GPU, or a double of a device. Nobody has
run it on a device yet: on a processor it does what can be done there, and says what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

BACKENDS = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}
COPY_BYTES = 256 << 20
ALONE_S = 3.0
OUT_S = 30.0
"""So long a rank waits in a collective to which nobody comes; so long it may take to be out of
it.
"""


@dataclass
class Found:
    """What was seen."""

    lines: list[tuple[str, str, str]] = field(default_factory=list)
    failed: bool = False

    def check(self, what: str, tried: Callable[[], str]) -> None:
        """One row; an exception is a row, too."""
        try:
            seen = tried()
            verdict = "yes"
        except Exception as error:  # noqa: BLE001  # whatever it is belongs into the report
            seen = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            verdict = "NO"
            self.failed = True
        self.lines.append((what, verdict, seen))
        print(f"{verdict:>3}  {what}: {seen}", flush=True)

    def add(self, what: str, *, holds: bool, seen: str) -> None:
        """A row that another process has tried."""
        self.failed = self.failed or not holds
        verdict = "yes" if holds else "NO"
        self.lines.append((what, verdict, seen))
        print(f"{verdict:>3}  {what}: {seen}", flush=True)

    def leave(self, what: str, why: str) -> None:
        """Not tried."""
        self.lines.append((what, "not run", why))
        print(f"  -  {what}: not run, {why}", flush=True)

    def page(self, head: str) -> str:
        """To be pasted."""
        rows = "\n".join(f"| {what} | {verdict} | {seen} |" for what, verdict, seen in self.lines)
        return (
            f"### train-accelerator-check\n\n{head}\n\n| what | holds | seen |\n|---|---|---|\n"
            f"{rows}\n"
        )


class Device:
    """torch's module for one kind of device."""

    def __init__(self, torch: Any, kind: str) -> None:
        self.torch = torch
        self.kind = kind
        self.module: Any = getattr(torch, kind) if kind != "cpu" else None

    @property
    def count(self) -> int:
        return int(self.module.device_count()) if self.module is not None else 0

    def name(self) -> str:
        return (
            str(self.module.get_device_name(0))
            if self.module is not None
            else platform.processor() or platform.machine()
        )

    def wait(self) -> None:
        if self.module is not None:
            self.module.synchronize()

    def copies(self) -> str:
        """The rate of a gasp's first half."""
        there = self.torch.ones(COPY_BYTES, dtype=self.torch.uint8, device=self.kind)
        self.wait()
        begun = time.perf_counter()
        there.to("cpu", copy=True)
        seconds = time.perf_counter() - begun
        return (
            f"{COPY_BYTES / seconds / 1e9:.2f} GB/s to the host, for `acpfs-train plan "
            "--device-rate`"
        )

    def runs_behind(self) -> str:
        """Marks are set by the host: they may say that an update is done that the device has not
        begun.
        """
        model = self.torch.nn.Linear(4096, 4096, device=self.kind)
        optimizer = self.torch.optim.Adam(model.parameters())
        begun = 0.0
        said = 0.0
        for _ in range(2):
            model(self.torch.ones(512, 4096, device=self.kind)).sum().backward()
            self.wait()
            begun = time.perf_counter()
            optimizer.step()
            said = time.perf_counter() - begun
            self.wait()
        return (
            f"step() came back after {1e3 * said:.2f} ms, its update was done after "
            f"{1e3 * (time.perf_counter() - begun):.2f} ms"
        )

    def restarts(self) -> str:
        """torch_npu's two calls, and whether it computes behind them."""
        self.module.stop_device(0)
        self.module.restart_device(0)
        found = float(self.torch.ones(8, device=self.kind).sum().item())
        if found != 8:
            raise RuntimeError(f"the sum of eight ones is {found}")
        return "stop_device and restart_device, and it computes"


def rank(number: int, kind: str, directory: str) -> None:
    """Two ranks: a collective together; then one to which only rank 0 comes, and which another
    thread has to end.
    """
    torch: Any = _torch(kind)
    dist = torch.distributed
    if kind != "cpu":
        getattr(torch, kind).set_device(number)
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group(
        BACKENDS[kind], store=store, rank=number, world_size=2, timeout=timedelta(seconds=120)
    )
    value = torch.ones(1, device=f"{kind}:{number}" if kind != "cpu" else "cpu")
    dist.all_reduce(value)
    told = f"all-reduce gave {value.item():g}"
    if number == 0:
        ended = []

        def abort() -> None:
            time.sleep(ALONE_S)
            ended.append(time.monotonic())
            # torch has no public name for it
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001

        threading.Thread(target=abort, daemon=True).start()
        try:
            dist.all_reduce(value)
            value.item()
            told += "; the collective that nobody joined ENDED IN ORDER"
        except Exception as error:  # noqa: BLE001  # which one it is, is what is asked
            told += (
                f"; out of a collective {time.monotonic() - ended[0]:.2f} s after abort, by "
                f"{type(error).__name__}"
                if ended
                else f"; {error}"
            )
        Path(directory, "told").write_text(told, encoding="utf-8")
        os._exit(0)
    while not Path(directory, "told").exists():
        time.sleep(0.05)
    os._exit(0)


def together(torch: Any, kind: str) -> str:
    """`rank` in two processes; what rank 0 saw."""
    directory = mkdtemp(prefix="acpfs-accelerator-")
    context = torch.multiprocessing.spawn(rank, args=(kind, directory), nprocs=2, join=False)
    deadline = time.monotonic() + 120 + OUT_S
    told = Path(directory, "told")
    while (
        not told.exists()
        and time.monotonic() < deadline
        and any(process.is_alive() for process in context.processes)
    ):
        time.sleep(0.1)
    for process in context.processes:
        process.kill()
    if not told.exists():
        raise RuntimeError("rank 0 is in its collective still: nothing brings it out")
    return told.read_text(encoding="utf-8")


def ranks(found: Found, given: argparse.Namespace) -> None:
    """Four ranks on one device: in a process of its own, which nothing was done on a device in."""
    words = ["--kills", str(given.kills), "--seconds", str(given.seconds)]
    for name in ("seed", "libraries"):
        if (value := getattr(given, name)) is not None:
            words += [f"--{name}", str(value)]
    command = [sys.executable, "-m", "tests.training.ranks.accelerator", *words]
    if given.double:
        command.append("--double")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            try:
                row = json.loads(line)
            except ValueError:  # what a rank says
                continue
            found.add(row["what"], holds=row["holds"], seen=row["seen"])
    if running.returncode not in (0, 1):
        found.add("four ranks on one device", holds=False, seen=f"status {running.returncode}")


def _torch(kind: str) -> Any:
    import torch  # in a process of its own as well

    if kind == "npu":
        import torch_npu  # noqa: F401
    return torch


def kind_here(torch: Any) -> str:
    """What there is."""
    if torch.cuda.is_available():
        return "cuda"
    try:
        import torch_npu  # noqa: F401
    except ImportError:
        return "cpu"
    return "npu"


def _given() -> argparse.Namespace:
    """What the command was called with."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "npu", "cpu"))
    parser.add_argument("--double", action="store_true", help="four ranks on a double of a device")
    parser.add_argument("--kills", type=int, default=20, help="of ranks; 20")
    parser.add_argument("--seconds", type=float, default=240.0, help="for these, at most; 240")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--libraries", help="where what acpfs depends on is, if not here")
    parser.add_argument("--record", type=Path, help="file that gets what is to be pasted")
    return parser.parse_args()


def main() -> int:
    """Entry point."""
    given = _given()
    try:
        import torch
    except ImportError:
        sys.stderr.write("this interpreter has no torch: ACPFS_TORCH_PYTHON names one that has\n")
        return 2
    kind = given.device or kind_here(torch)
    _torch(kind)
    device = Device(torch, kind)
    found = Found()
    if given.double or kind == "cuda":
        ranks(found, given)
    else:
        found.leave("four ranks on one device", "a GPU is needed, or --double")
    found.check("memory is read by the host", device.copies)
    found.check("how far the host is ahead of the device", device.runs_behind)
    if kind == "cpu":
        found.leave(
            "nccl, hccl: out of a collective by abort",
            "there is no accelerator here; gloo's abort does nothing, and its sockets are shut "
            "down",
        )
    elif device.count < 2:
        found.leave(f"{BACKENDS[kind]}: out of a collective by abort", "two devices are needed")
    else:
        found.check(
            f"{BACKENDS[kind]}: out of a collective by abort", lambda: together(torch, kind)
        )
    if kind == "npu":
        found.check("stop_device, restart_device", device.restarts)
    else:
        found.leave("stop_device, restart_device", "no NPU with torch_npu here")
    found.leave(
        "what an uncorrectable memory error says",
        "nobody can make one: if you have met one, paste its text",
    )
    head = (
        f"{device.name()} × {device.count or os.cpu_count()}, torch {torch.__version__}, "
        f"{platform.system()} {platform.release()}"
    )
    print(f"\nPaste this:\n\n{found.page(head)}")
    if given.record is not None:
        given.record.write_text(found.page(head), encoding="utf-8")
    if given.double:
        return int(found.failed)
    if kind == "cpu":
        print(
            "No accelerator was found: torch.cuda.is_available() is false, and torch_npu cannot "
            "be imported."
        )
        return 2
    return int(found.failed)


if __name__ == "__main__":
    raise SystemExit(main())
