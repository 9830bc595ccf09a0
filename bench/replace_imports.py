"""What the template of `bench.replace` imports: torch comes from its interpreter, and what acpfs
needs from the one that measures.
"""

from __future__ import annotations

import os
import sys

if os.environ["ACPFS_BENCH_LIBRARIES"] not in sys.path:
    sys.path.append(
        os.environ["ACPFS_BENCH_LIBRARIES"]
    )  # behind its own: only what is missing there comes from here
