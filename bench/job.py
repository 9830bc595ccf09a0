"""A training job of two ranks (`bench.rank`), told what to save and load, one order at a time."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from acpfs.descriptors import readable
from bench.clock import ROOT, torch_python

ORDER_TIMEOUT_S = 120.0
START_TIMEOUT_S = 120.0
RANKS = 2


class OrderError(Exception):
    """A rank could not do what it was told, or did not answer."""


class Job:
    """Processes of a training job; a context manager.

    They can be restarted, as a job that begins again.
    """

    def __init__(self, scratch: Path, size: int, ranks: int = RANKS, python: str = "") -> None:
        self.size = size
        self.ranks = ranks
        self._scratch = scratch
        self._python = python or torch_python()
        self._processes: list[subprocess.Popen[str]] = []
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Job:
        self._log = open(self._scratch / "ranks.log", "ab")
        rendezvous = tempfile.mktemp(prefix="rendezvous-", dir=self._scratch)
        words = [self._python, "-u", "-m", "bench.rank"]
        try:
            for rank in range(self.ranks):
                command = [*words, str(rank), str(self.ranks), rendezvous, str(self.size)]
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=self._log,
                        text=True,
                        bufsize=1,
                    )
                )
            for rank in range(self.ranks):
                self.answer(rank, START_TIMEOUT_S)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """End all ranks, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(30)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        self._processes.clear()
        if self._log is not None:
            self._log.close()
            self._log = None

    def restart(self) -> None:
        """All ranks end and begin again, as after a failure of the job."""
        self.end()
        self.__enter__()

    def tell(self, rank: int, do: str, **words: Any) -> None:
        """Give an order; `answer` waits for its end."""
        pipe = self._processes[rank].stdin
        assert pipe is not None
        pipe.write(json.dumps({"do": do, **words}) + "\n")
        pipe.flush()

    def answer(self, rank: int, timeout_s: float = ORDER_TIMEOUT_S) -> dict[str, Any]:
        """What came of the order.

        Raises:
            OrderError: it failed, or took too long.
        """
        pipe = self._processes[rank].stdout
        assert pipe is not None
        if not readable(pipe, timeout_s) or not (line := pipe.readline()):
            raise OrderError(
                f"rank {rank} does not answer\n{(self._scratch / 'ranks.log').read_text()[-2000:]}"
            )
        found: dict[str, Any] = json.loads(line)
        if "failed" in found:
            raise OrderError(f"rank {rank}: {found['failed']}")
        return found

    def ask(
        self, rank: int, do: str, *, timeout_s: float = ORDER_TIMEOUT_S, **words: Any
    ) -> dict[str, Any]:
        """One rank alone."""
        self.tell(rank, do, **words)
        return self.answer(rank, timeout_s)

    def all(self, do: str, *, timeout_s: float = ORDER_TIMEOUT_S, **words: Any) -> dict[str, Any]:
        """All ranks together: from the first one's start to the last one's end."""
        for rank in range(self.ranks):
            self.tell(rank, do, **words)
        found = [self.answer(rank, timeout_s) for rank in range(self.ranks)]
        ends = {
            name: max(one[name] for one in found)
            for name in found[0]
            if name in ("ended", "durable")
        }
        return {"begun": min(one["begun"] for one in found), **ends}


def stall_s(answer: dict[str, Any]) -> float:
    """Seconds that training stood still."""
    return float(answer["ended"] - answer["begun"])
