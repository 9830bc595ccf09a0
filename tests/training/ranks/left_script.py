"""A script for `acpfs-run`: LIBRARIES DIRECTORY.

In update 5 a rank is stuck, and has the only copy of its shard.
"""

import os
import sys
from pathlib import Path

sys.path.append(sys.argv[1])  # behind its own: only what is missing there comes from here
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

from acpfs.training import resilient
from tests.training.ranks.replaced import Plan, train
from tests.training.ranks.test_replace_left import stuck_with_the_only_copy

if __name__ == "__main__":
    directory = Path(sys.argv[2])
    process = int(os.environ["ACPFS_GENERATION"])
    resilient(directory / "run")(train)(
        Plan("hsdp", stuck_with_the_only_copy(directory, "forward")), directory, process
    )
