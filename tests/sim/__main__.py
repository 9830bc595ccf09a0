"""`python -m tests.sim`: histories of the whole engine, each from a seed. See
docs/CONTRIBUTING.md.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """In a process in which sets have the same order each time; which one makes no difference."""
    if not os.environ.get("PYTHONHASHSEED", "").isdigit():
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]], environment)
    from tests.sim.command import run

    run(sys.argv[1:])


if __name__ == "__main__":
    main()
