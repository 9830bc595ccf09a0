"""`python -m tests.sim.planted [NAME…]`: after how many histories each planted bug is found.

A bug is planted in a copy of the tree. One that no longer applies is an error: the suite moves with
the code. What is not found is not reached, or not judged; what cannot be found says why in `bugs`.
`--reach` plants nothing, and says in how many histories each bug's lines are executed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NoReturn

from tests.sim.choices import Choices, Profile
from tests.sim.command import history, simulate
from tests.sim.planted.bug import Bug
from tests.sim.planted.bugs import BUGS
from tests.sim.planted.reach import Watch, counts

TREE = Path(__file__).parents[3]
PATIENCE_S = 900


def main() -> None:
    """Exit status 1 where one that can be found was not."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.planted", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these alone")
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="of each profile")
    parser.add_argument("--from", type=int, default=0, metavar="N", dest="first")
    parser.add_argument("--jobs", type=int, default=1, metavar="J")
    parser.add_argument("--reach", action="store_true", help="plant nothing: who comes there?")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if not options.names or bug.name in options.names]
    if options.reach:
        reach(bugs, range(options.first, options.first + options.seeds))
    with ThreadPoolExecutor(options.jobs) as pool:
        found = []
        for bug, answer in zip(
            bugs, pool.map(lambda bug: look(bug, options.first, options.seeds), bugs), strict=True
        ):
            print(f"{bug.name}: {answer}", flush=True)
            found.append(answer.startswith("found") or bool(bug.why_not))
    print(f"{sum(found)} of {len(found)}")
    sys.exit(not all(found))


def reach(bugs: Sequence[Bug], seeds: range) -> NoReturn:
    """Say in how many histories of each of its profiles a bug's lines are executed."""
    simulate()
    for profile in sorted({profile for bug in bugs for profile in bug.profiles}):
        there = [bug for bug in bugs if profile in bug.profiles]
        histories = [partial(history, Choices(seed, Profile(profile))) for seed in seeds]
        found, first = counts(Watch(there, TREE / "acpfs"), histories)
        for bug in there:
            where = f", the first is {seeds[first[bug.name] - 1]}" if bug.name in first else ""
            print(f"{profile} {bug.name}: {found[bug.name]} of {len(seeds)}{where}", flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of dead lives wait for turns that never come


def look(bug: Bug, first: int, seeds: int) -> str:
    """Whether histories find it."""
    if bug.why_not:
        return bug.why_not
    with tempfile.TemporaryDirectory(prefix="acpfs-planted-") as name:
        tree = Path(name)
        shutil.copytree(TREE / "acpfs", tree / "acpfs")
        for part in ("rig", "sim"):
            shutil.copytree(TREE / "tests" / part, tree / "tests" / part)
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
