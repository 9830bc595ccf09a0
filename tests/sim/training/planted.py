"""`python -m tests.sim.training.planted [NAME…]`: after how many histories of a job each planted
bug is found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).parents[3]
PATIENCE_S = 600
TRAINING = Path("acpfs/training")


@dataclass(frozen=True)
class Bug:
    """One: `new` in place of `old`, which a file has once."""

    name: str
    file: str
    old: str
    new: str
    profile: str = "any"
    unseen: str = ""
    """Why histories do not find it; that is no failure."""


BUGS = (
    Bug(
        "votes-twice",
        "coordinator/election.py",
        "if term <= self.term or self.connected:",
        "if term < self.term or self.connected:",
    ),
    Bug(
        "votes-while-connected",
        "coordinator/election.py",
        "if term <= self.term or self.connected:",
        "if term <= self.term:",
    ),
    Bug(
        "half-is-enough",
        "coordinator/election.py",
        "if 2 * len(self.votes) <= world:",
        "if 2 * len(self.votes) < world:",
    ),
    Bug(
        "claim-is-everybodys",
        "coordinator/witness.py",
        "    owner = _claim(directory, generation, claimant)\n",
        "    owner = claimant\n",
    ),
    Bug(
        "same-generation-again",
        "coordinator/phases.py",
        "        self.generation += 1\n        self._round",
        "        self.generation = max(1, self.generation)\n        self._round",
        profile="deaths",
    ),
    Bug(
        "updates-go-on",
        "marks.py",
        "        self._held = True\n",
        "        self._held = False\n",
        profile="deaths",
    ),
    Bug(
        "not-said-again",
        "member.py",
        "            self._outbox.extendleft(reversed(self._said))\n",
        "",
        profile="deaths",
    ),
    Bug(
        "hears-the-gone",
        "member.py",
        "        while self._links.get(number) is link:\n",
        "        while True:\n",
        unseen="rare: seed 1169 of any finds it, whose history begins with a late vote",
    ),
    Bug(
        "beats-unanswered",
        "coordinator/server.py",
        "                self._connected.to_members(self._elections.active(), [rank])\n",
        "                pass\n",
        profile="deaths",
    ),
    Bug(
        "silence-is-life",
        "coordinator/phases.py",
        '            self._lose(silent, f"silent for {self._limits.silent_s:g} s", now)\n',
        "",
    ),
    Bug(
        "old-terms-obeyed",
        "coordinator/election.py",
        "return term >= self.term and term > 0",
        "return True",
    ),
    Bug(
        "any-job-of-that-name",
        "coordinator/server.py",
        "            hello.first\n            and known is not None",
        "            False\n            and known is not None",
    ),
    Bug(
        "any-process-is-another-job",
        "coordinator/server.py",
        "            hello.first\n            and known is not None",
        "            known is not None",
        profile="crew",
    ),
    Bug(
        "same-crew-again",
        "coordinator/crew.py",
        "        self.generation += 1\n",
        "        self.generation = max(1, self.generation)\n",
        profile="crew",
    ),
)


def main() -> None:
    """Exit status 1 where one was not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these alone")
    parser.add_argument("--seeds", type=int, default=300, metavar="N")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if not options.names or bug.name in options.names]
    found = 0
    for bug in bugs:
        answer = look(bug, options.seeds)
        if bug.unseen and not answer.startswith("found"):
            answer = f"{answer}, {bug.unseen}"
        found += answer.startswith("found") or bool(bug.unseen)
        print(f"{bug.name}: {answer}", flush=True)
    print(f"{found} of {len(bugs)}")
    sys.exit(found < len(bugs))


def look(bug: Bug, seeds: int) -> str:
    """Whether histories find it."""
    with tempfile.TemporaryDirectory(prefix="acpfs-planted-") as name:
        tree = Path(name)
        shutil.copytree(TREE / "acpfs", tree / "acpfs")
        shutil.copytree(TREE / "tests" / "sim" / "training", tree / "tests" / "sim" / "training")
        (tree / "tests" / "__init__.py").touch()
        (tree / "tests" / "sim" / "__init__.py").touch()
        file = tree / TRAINING / bug.file
        text = file.read_text(encoding="utf-8")
        if text.count(bug.old) != 1:
            return "DOES NOT APPLY"
        file.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
        words = ["--stop", "--profile", bug.profile, "--seeds", str(seeds)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.sim.training", *words],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    told = re.search(r"^seed (\d+), digest \w+: (.*)$", done.stdout, re.MULTILINE)
    if told is not None:
        return f"found after {int(told[1]) + 1}: {told[2]}"
    return "not found" if done.returncode == 0 else f"failed: {done.stderr[-300:]}"


if __name__ == "__main__":
    main()
