"""A script for `acpfs-run`: LIBRARIES DIRECTORY.

Rank 1 kills itself when all is done, the others have ended, and the launcher knows it.
"""

import os
import select
import signal
import sys
from pathlib import Path

sys.path.append(sys.argv[1])  # behind its own: only what is missing there comes from here
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

from acpfs.training import resilient
from acpfs.training.member import Member
from tests.training.ranks.replaced import Plan, train

DIRECTORY = Path(sys.argv[2])


def die_last(_: Member) -> None:
    others = [path.read_text() for path in DIRECTORY.glob("pid-*") if path.name != "pid-1"]
    while any(Path(f"/proc/{pid}").exists() for pid in others):
        select.select([], [], [], 0.02)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    rank = os.environ["RANK"]
    process = int(os.environ["ACPFS_GENERATION"])
    (DIRECTORY / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == "1" and process == 0:
        setattr(Member, "end", die_last)  # noqa: B010  # to mypy a method is nothing that changes
    resilient(DIRECTORY / "run")(train)(Plan("ddp"), DIRECTORY, process)
    (DIRECTORY / f"ended-{rank}-{process}").touch()
