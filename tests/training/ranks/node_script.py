"""A script for launchers of several nodes: LIBRARIES DIRECTORY.

In update 5 rank 0 kills its node: launcher, coordinator, ranks, itself.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

sys.path.append(sys.argv[1])  # behind its own: only what is missing there comes from here
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

from acpfs.training import resilient
from tests.training.ranks.replaced import Plan, train

DIRECTORY = Path(sys.argv[2])


def lose_the_node(_: object) -> None:
    launcher = os.getppid()
    processes = [
        int(word) for word in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ]
    (announced,) = (DIRECTORY / "run" / ".acpfs-job").glob("*/coordinator-0")
    for pid in (
        launcher,
        json.loads(announced.read_text())["pid"],
        *(pid for pid in processes if pid != os.getpid()),
        os.getpid(),
    ):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    process = int(os.environ["ACPFS_GENERATION"])
    resilient(DIRECTORY / "run")(train)(
        Plan("hsdp", {(0, 0, "gated", 5): lose_the_node}), DIRECTORY, process
    )
