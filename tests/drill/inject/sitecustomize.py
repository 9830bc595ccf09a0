"""Python runs this at start where its directory is on PYTHONPATH: what the drill puts into acpfs'
own processes gets in here.
"""

from __future__ import annotations

import os
import sys

if "ACPFS_CLOCK" in os.environ:
    from tests.drill import clock

    clock.install()
if ("ACPFS_DRILL" in os.environ or "ACPFS_MUTANT" in os.environ) and not {
    "-c",
    "acpfs.supervisor.supervisor",
} & set(sys.orig_argv):
    # `-c`: the commands, which need none of it and start twice as fast
    if "ACPFS_MUTANT" in os.environ:
        from tests.drill import mutants

        mutants.install(os.environ["ACPFS_MUTANT"])
    if "ACPFS_DRILL" in os.environ:
        from tests.drill import points

        points.install()
