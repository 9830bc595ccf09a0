"""Runs worker processes together and times them: from the first one's start to the last one's
end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKER_TIMEOUT_S = 300.0


def torch_python() -> str:
    """The interpreter that has torch: ACPFS_TORCH_PYTHON, else the one that tools/test makes, else
    this one.
    """
    made = ROOT / ".venv/frameworks/bin/python"
    return os.environ.get("ACPFS_TORCH_PYTHON", str(made) if made.exists() else sys.executable)


def together(
    operation: str, paths: list[Path], size: int, before: Callable[[], None] | None = None
) -> float:
    """Seconds that all workers needed; one worker per path, `size` bytes each.

    `before` is called when all are ready, before they begin.
    """
    start, end = span(operation, paths, size, before)
    return end - start


def span(
    operation: str, paths: list[Path], size: int, before: Callable[[], None] | None = None
) -> tuple[float, float]:
    """When the first worker started and the last one had closed its file, by `time.monotonic`."""
    python = torch_python() if operation in ("save", "load", "load_mapped") else sys.executable
    command = [python, "-m", "bench.worker", operation]
    workers = [
        subprocess.Popen(
            [*command, str(path), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for path in paths
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            if worker.stdout.readline() != "ready\n":
                raise RuntimeError(f"{operation} did not start")
        if before is not None:
            before()
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        times = [
            [float(word) for word in worker.communicate(timeout=WORKER_TIMEOUT_S)[0].split()]
            for worker in workers
        ]
        if any(worker.returncode for worker in workers):
            raise RuntimeError(f"{operation} failed")
        return min(start for start, _ in times), max(end for _, end in times)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
