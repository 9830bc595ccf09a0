"""The process behind `lifeline.py`: `python -m tests.rig.watcher PID` watches process PID and takes
its orders, JSON lines on stdin.

Waits for three things: orders, the nearest deadline, the end of the process. At a deadline it takes
down what it stands for, at the end of the process all that is still armed, acpfs first: a
supervisor that lives would mount again.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rig.mounts import mounts_below, take_down


@dataclass
class Armed:
    """Something that must not stay."""

    path: Path
    runtime_dir: Path | None
    deadline: float

    def clear(self) -> None:
        """Take it down, whatever its state."""
        if self.runtime_dir is not None:
            take_down(self.path, self.runtime_dir)
        else:
            for mounted in mounts_below(self.path):
                subprocess.run(["umount", "-l", str(mounted)], check=False, timeout=60)


@dataclass
class Watcher:
    """What is armed, and the process it is armed for."""

    process: int
    armed: dict[str, Armed] = field(default_factory=dict)

    def run(self) -> None:
        """Until the process has ended; then clear all that is armed."""
        orders = sys.stdin.fileno()
        waiting = select.poll()
        waiting.register(orders, select.POLLIN)
        waiting.register(self.process, select.POLLIN)
        unread = b""
        while True:
            ready = dict(waiting.poll(self._left_ms()))
            self._clear(lambda armed: armed.deadline <= time.monotonic())
            if orders in ready:
                data = os.read(orders, 1 << 16)
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
                if not data:
                    waiting.unregister(orders)
            elif self.process in ready:  # and everything it said was read
                break
        self._clear(lambda armed: armed.runtime_dir is not None)
        self._clear(lambda armed: True)

    def _left_ms(self) -> int | None:
        nearest = min((armed.deadline for armed in self.armed.values()), default=float("inf"))
        return (
            None
            if nearest == float("inf")
            else max(0, round(1000 * (nearest - time.monotonic())) + 1)
        )

    def _obey(self, order: dict[str, Any]) -> None:
        if "disarm" in order:
            self.armed.pop(order["disarm"], None)
            return
        path = order["arm"]
        runtime_dir = order["runtime_dir"]
        deadline_s = order["deadline_s"]
        deadline = float("inf") if deadline_s is None else time.monotonic() + deadline_s
        self.armed[path] = Armed(Path(path), Path(runtime_dir) if runtime_dir else None, deadline)

    def _clear(self, which: Any) -> None:
        for path, armed in [(path, armed) for path, armed in self.armed.items() if which(armed)]:
            del self.armed[path]
            try:
                armed.clear()
            except (OSError, subprocess.SubprocessError) as error:
                print(f"watcher: {path}: {error}", file=sys.stderr)


def main(pid: int) -> None:
    """Watch; ends after the process."""
    process = os.pidfd_open(pid)
    if os.getppid() != pid:
        raise SystemExit("the process to watch has ended already")
    print("ready", flush=True)
    Watcher(process).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
