"""`acpfs-run`: start the ranks of a training job, as torchrun does.

Its options are torchrun's, so argparse reads them and not click.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from acpfs.errors import AcpfsError
from acpfs.training.launcher.program import run


def main() -> NoReturn:
    """Entry point."""
    try:
        status = run(sys.argv[1:])
    except AcpfsError as error:
        print(f"acpfs-run: {error}", file=sys.stderr)
        status = int(error.exit_code)
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would try again, and end with a status of its own
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status)


if __name__ == "__main__":
    main()
