"""A training job of real processes: one rank per node, each on its own mount, that save together
with torch (`torch_rank.py`).

Has what `training.Job` has. A rank whose mount is gone fails, then all give that checkpoint up, and
go on with the next one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.rig.ports import free_port

PYTHON_VARIABLE = "ACPFS_TORCH_PYTHON"
REPOSITORY = Path(__file__).parents[2]
END_WAIT_S = 240.0
QUIET = {
    "OMP_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Several ranks on few processors."""
WORKLOADS = ("dcp", "megatron")


def torch_python() -> str | None:
    """The interpreter that has torch, or None."""
    return os.environ.get(PYTHON_VARIABLE)


def environment() -> dict[str, str]:
    """For a program of this directory that needs torch."""
    return {**os.environ, **QUIET, "PYTHONPATH": str(REPOSITORY)}


class RankJob:
    """Ranks are started at once and end with `close`."""

    def __init__(self, paths: Sequence[Path], workload: str, log: Path, *, keep: int = 0) -> None:
        """`log`: where the ranks' errors go.

        `keep`: delete all but so many checkpoints; 0: delete nothing.
        """
        self.iteration = 0
        self._port = 0
        self._words = [
            [workload, str(number), str(len(paths)), str(path), str(keep)]
            for number, path in enumerate(paths)
        ]
        self._log = log
        self._ranks: list[subprocess.Popen[str]] = []
        try:
            self._ranks = [self._start(words) for words in self._words]
            self._answers(self._ranks)
        except BaseException:
            self.close()
            raise

    def _start(self, words: Sequence[str]) -> subprocess.Popen[str]:
        python = torch_python()
        assert python is not None, f"{PYTHON_VARIABLE} names no interpreter that has torch"
        command = [python, "-m", "tests.cluster.torch_rank", *words]
        pipe = subprocess.PIPE
        with open(self._log, "a", encoding="utf-8") as errors:
            return subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=errors,
                text=True,
                cwd=REPOSITORY,
                env=environment(),
            )

    def enter(self) -> None:
        """From now on work in what is mounted now.

        After a save that failed in a process group of its own; dead ranks are started again.

        Raises:
            OSError: a rank cannot.
        """
        dead = [number for number, rank in enumerate(self._ranks) if rank.poll() is not None]
        for number in dead:
            _end(self._ranks[number])
            self._ranks[number] = self._start(self._words[number])
        self._answers([self._ranks[number] for number in dead])
        self._port = self._port or free_port()
        self._all(f"enter {self._port}")

    def save(self) -> None:
        """One checkpoint; returns when rank 0 has closed the tracker.

        Raises:
            OSError: a rank cannot write.
        """
        self.iteration += 1
        self._all(f"save {self.iteration}")

    @property
    def name(self) -> str:
        """Directory of the newest checkpoint."""
        return f"iter_{self.iteration:07d}"

    def close(self) -> None:
        """End all ranks: they keep no mount busy."""
        for rank in self._ranks:
            _end(rank)
        self._ranks = []

    def _all(self, order: str) -> None:
        try:
            for rank in self._ranks:
                assert rank.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # its answer will say so
                    rank.stdin.write(order + "\n")
                    rank.stdin.flush()
            self._answers(self._ranks)
        except OSError:
            self._port = 0
            raise

    def _answers(self, of: Sequence[subprocess.Popen[str]]) -> None:
        said = []
        for rank in of:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            said.append(line.strip() if line else f"rank ended with {rank.wait(END_WAIT_S)}")
        if any(said):
            raise OSError("; ".join(filter(None, said)))


def _end(rank: subprocess.Popen[str]) -> None:
    rank.kill()
    rank.wait(END_WAIT_S)
    for pipe in (rank.stdin, rank.stdout):
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()
