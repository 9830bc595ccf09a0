"""A script for `acpfs-run`: LIBRARIES DIRECTORY.

The rank that is in nobody's place kills itself in update 5 where it is number 1.
"""

import os
import sys
from pathlib import Path

sys.path.append(sys.argv[1])  # behind its own: only what is missing there comes from here
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

from acpfs.training import resilient
from tests.training.ranks.replaced import Plan, die, train

if __name__ == "__main__":
    directory = Path(sys.argv[2])
    process = int(os.environ["ACPFS_GENERATION"])
    resilient(directory / "run")(train)(Plan("hsdp", {(1, 0, "gated", 5): die}), directory, process)
