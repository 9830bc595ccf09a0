"""The application: a process that does rounds of a workload in a mount, journals every call, and
can be killed at any time.

`python -m tests.drill.application MOUNT JOURNAL RUNTIME_DIR WORKLOAD SEED`. On standard input one
JSON line per order: `{"go": {path: is a directory}, "round": n}`; it then does rounds until the
next line (any) comes, and answers `{"paused": rounds}`, or `{"failed": "…"}` as soon as a call
fails, and waits for the next order.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from acpfs.descriptors import readable
from tests.drill.calls import CallError, Calls
from tests.drill.spec import JournalWriter
from tests.drill.workloads import GUARDED, LARGE, WORKLOADS, Workload


class Orders:
    """Lines on standard input, read without read-ahead, so that `waiting` knows."""

    def __init__(self) -> None:
        self._rest = b""

    def waiting(self) -> bool:
        """Whether there is something to read."""
        return bool(self._rest) or readable(0, 0)

    def next(self) -> dict[str, Any] | None:
        """The next order; None at the end."""
        while b"\n" not in self._rest:
            read = os.read(0, 1 << 16)
            if not read:
                return None
            self._rest += read
        line, _newline, self._rest = self._rest.partition(b"\n")
        order: dict[str, Any] = json.loads(line)
        return order


def rounds(workload: Workload, orders: Orders) -> dict[str, object]:
    """Until told otherwise, or a call fails."""
    while not orders.waiting():
        workload.number += 1
        try:
            workload.round()
        except CallError as error:
            workload.calls.drop_all()
            return {"failed": str(error), "round": workload.number}
    orders.next()
    return {"paused": True, "round": workload.number}


def main() -> None:
    mount, journal, runtime_dir, name, seed = sys.argv[1:]
    calls = Calls(Path(mount), JournalWriter(Path(journal)), Path(runtime_dir))
    workload = (WORKLOADS | GUARDED | LARGE)[name](calls, int(seed))
    orders = Orders()
    print(json.dumps({"ready": name}), flush=True)
    while (order := orders.next()) is not None:
        if "go" in order:  # a pause that came too late, after a failure, means nothing any more
            calls.paths = dict(order["go"])
            workload.number = order["round"]
            print(json.dumps(rounds(workload, orders)), flush=True)


if __name__ == "__main__":
    main()
