"""How long torch's own save and load take, those of `acpfs.torch`, and what else there is: in a
mount and on a tmpfs, in turns.

Usage: ACPFS_TORCH_PYTHON=… python -m bench.torch_saves [--mib M] [--rounds N] [--no-keep]. As root.
Needs about four times M of memory. Ratios are to torch's own in the same place and run; the first
round teaches the mount, and is not counted. Of a loaded machine only the processor's seconds say
something, and ratios of best times a little.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench import places
from bench.clock import ROOT, torch_python
from bench.record import GIB, MIB, Report, lower_quartile
from tests.rig.mounts import AcpfsMount

SAVES = (
    *("torch.save", "acpfs.torch.save", "acpfs.torch.save, zlib", "torch.save, no checksums"),
    *("layout alone", "write(2) alone", "safetensors", "DCP, 1 thread", "DCP, 2 threads"),
    *("DCP, acpfs.torch.Writer, 1 file", "DCP, acpfs.torch.Writer, 2 files"),
)
LOADS = ("torch.load", "acpfs.torch.load", "torch.load, mapped and copied")
BARS = {"acpfs.torch.save": 1.4, "acpfs.torch.load": 1.5}
"""Times as fast as torch's own, in the mount."""


class Saver:
    """A process that saves and loads."""

    def __init__(self, mib: int) -> None:
        self._process = subprocess.Popen(
            [torch_python(), "-m", "bench.torch_saves_writer", str(mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.has_isal = self._answer() == [1.0]

    def ask(self, way: str, directory: Path) -> list[float]:
        """(seconds, seconds of processors) of one save or load."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{way}\t{directory}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> list[float]:
        assert self._process.stdout is not None
        return [float(word) for word in self._process.stdout.readline().split()]

    def end(self) -> None:
        self._process.communicate()


def rounds_of(
    saver: Saver, directories: dict[str, Path], rounds: int, settle: Callable[[], None]
) -> dict[tuple[str, str], list[list[float]]]:
    """What was answered, by (way, place)."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for number in range(rounds + 1):
        for way in (*SAVES, *LOADS):
            for place, directory in directories.items():
                took = saver.ask(way, directory)
                settle()
                if number:
                    found.setdefault((way, place), []).append(took)
                if way not in LOADS or way == LOADS[-1]:
                    for path in directory.iterdir():
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def measure(mib: int, rounds: int) -> Report:
    columns = ["way", "place", "best, s", "quartile, s", "GiB/s", "times torch's own", "quartiles"]
    columns += ["CPU, s"]
    report = Report("torch_saves", f"Saves and loads of {mib} MiB of tensors on the CPU", columns)
    with contextlib.ExitStack() as stack:
        saver = Saver(mib)
        stack.callback(saver.end)
        scratch = stack.enter_context(places.scratch())
        (backing := scratch / "backing").mkdir()
        plain = stack.enter_context(places.tmpfs(scratch / "tmpfs", huge="within_size"))
        mount = stack.enter_context(
            AcpfsMount(backing, scratch / "mnt", "native", ram=f"{3 * mib}M")
        )
        directories = {"mount": mount.path / "run", "tmpfs": plain / "run"}
        for directory in directories.values():
            directory.mkdir()
        found = rounds_of(saver, directories, rounds, mount.flush)
    for (way, place), answers in found.items():
        took = [one[0] for one in answers]
        used = [one[1] for one in answers]
        own = [one[0] for one in found["torch.save" if way in SAVES else "torch.load", place]]
        ratio = min(own) / min(took)
        steady = lower_quartile(own) / lower_quartile(took)
        speed = mib * MIB / GIB / min(took)
        cells = [f"{min(took):.3f}", f"{lower_quartile(took):.3f}"]
        cells += [f"{one:.2f}" for one in (speed, ratio, steady)]
        report.row(way, place, *cells, f"{min(used):.3f}")
        report.samples[f"{way}: {place}, s"] = took
        report.samples[f"{way}: {place}, CPU s"] = used
        if way in BARS and place == "mount":
            promise = f"{way}: {BARS[way]} times torch's own"
            report.bar(promise, f"{ratio:.2f}", met=ratio >= BARS[way])
    report.notes.append(f"isal: {'there' if saver.has_isal else 'not installed'}")
    report.notes.append("where a way makes no file of torch's, its row says what that costs")
    report.notes.append(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-keep", action="store_true", help="only look")
    arguments = parser.parse_args()
    sys.exit(measure(arguments.mib, arguments.rounds).finish(keep=not arguments.no_keep))
