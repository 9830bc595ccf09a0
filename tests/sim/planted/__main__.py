"""`python -m tests.sim.planted [NAME…]`: after how many histories each planted bug is found.

A bug is planted in a copy of the tree. One that no longer applies is an error: the suite moves with
the code. What is not found is not reached, or not judged; what cannot be found says why in `bugs`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.sim.planted.bug import Bug
from tests.sim.planted.bugs import BUGS

TREE = Path(__file__).parents[3]
PATIENCE_S = 900


def main() -> None:
    """Exit status 1 where one that can be found was not."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.planted", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these alone")
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="of each profile")
    parser.add_argument("--from", type=int, default=0, metavar="N", dest="first")
    parser.add_argument("--jobs", type=int, default=1, metavar="J")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if not options.names or bug.name in options.names]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = []
        for bug, answer in zip(
            bugs, pool.map(lambda bug: look(bug, options.first, options.seeds), bugs), strict=True
        ):
            print(f"{bug.name}: {answer}", flush=True)
            found.append(answer.startswith("found") or bool(bug.why_not))
    print(f"{sum(found)} of {len(found)}")
    sys.exit(not all(found))


def look(bug: Bug, first: int, seeds: int) -> str:
    """Whether histories find it."""
    if bug.why_not:
        return bug.why_not
    with tempfile.TemporaryDirectory(prefix="acpfs-planted-") as name:
        tree = Path(name)
        shutil.copytree(TREE / "acpfs", tree / "acpfs")
        shutil.copytree(TREE / "tests" / "sim", tree / "tests" / "sim")
        (tree / "tests" / "__init__.py").touch()
        if not bug.plant(tree):
            return "DOES NOT APPLY"
        return _look_in(tree, bug, first, seeds)


def _look_in(tree: Path, bug: Bug, first: int, seeds: int) -> str:
    which = ["--from", str(first), "--seeds", str(seeds)]
    profiles = [word for profile in bug.profiles for word in ("--profile", profile)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.sim", "--stop", *which, *profiles],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"NOT RUN to its end in {PATIENCE_S} s"
    failed = re.search(r"^FAILED (.*)$", done.stdout, re.MULTILINE)
    count = re.search(r"^(\d+) histories", done.stdout, re.MULTILINE)
    if failed is None or count is None:
        return f"NOT FOUND in {count.group(1) if count else '?'} histories {done.stderr[-200:]}"
    return f"found by history {count.group(1)}: {failed.group(1)[:110]}"


if __name__ == "__main__":
    main()
