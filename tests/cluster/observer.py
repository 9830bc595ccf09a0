"""The observer as a process of its own: reads the shared directory without acpfs while a test goes
on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster import ranks

END_WAIT_S = 240.0


class Observer:
    """A context manager; afterwards `looks`, `violations` and the like say what was seen."""

    def __init__(self, backing: Path, tmp: Path, workload: str = "files", nodes: int = 0) -> None:
        """`workload`, and on how many nodes: what checkpoints look like."""
        self._stop = tmp / "observer.stop"
        self._result = tmp / "observer.json"
        self._violated = tmp / "observer.violated"
        python = sys.executable if workload == "files" else ranks.torch_python() or sys.executable
        words = [
            python,
            "-m",
            "tests.cluster.look",
            workload,
            str(nodes),
            str(backing),
            str(self._stop),
            str(self._result),
            str(self._violated),
        ]
        self._process = subprocess.Popen(
            words, cwd=ranks.REPOSITORY, env=ranks.environment(), stdout=subprocess.PIPE
        )
        self.looks = 0
        self.count = 0
        self.violations: list[str] = []
        self.arrivals: dict[str, tuple[float, float]] = {}
        """Checkpoint → when its last shard and its pointer came, on this machine's monotonic
        clock.
        """
        self.end = ""
        """What is wrong with the last checkpoint; "" when nothing is."""

    def __enter__(self) -> Observer:
        """Returns when it looks."""
        assert self._process.stdout is not None
        with self._process.stdout:
            self._process.stdout.readline()
        return self

    def complains(self) -> bool:
        """Whether it has seen a violation already."""
        return self._violated.exists()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.touch()
        try:
            self._process.wait(END_WAIT_S)
        finally:
            self._process.kill()
            self._process.wait()
        if kind is None:
            found: dict[str, Any] = json.loads(self._result.read_text(encoding="utf-8"))
            self.looks = found["looks"]
            self.violations = found["violations"]
            self.count = found["count"]
            self.arrivals = {
                name: (shards, pointer) for name, (shards, pointer) in found["arrivals"].items()
            }
            self.end = found["end"]
