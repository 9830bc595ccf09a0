"""What the reference says of the JSON of `acpfs-train` is what the commands print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from acpfs.cli.training.status import ask
from acpfs.training.credentials import connect
from acpfs.training.messages import Beat, Gate, Header, Hello, Phase, Sent
from tests.cli.test_train import call

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs/reference/json.md").read_text(encoding="utf-8")
JOB = "described"
WATCHDOG_S = 120.0
pytestmark = pytest.mark.clause("S529", "S568")


def described(command: str) -> set[str]:
    """Names in the row of a command."""
    (row,) = (
        line for line in REFERENCE.splitlines() if line.startswith(f"| `acpfs-train {command}`")
    )
    names = re.findall(r"`([a-z_]+)`", row.partition("|")[2].partition("|")[2])
    assert len(names) == len(set(names)), "one place for each name"
    return set(names)


def names_of(answer: Any, without: frozenset[str] = frozenset()) -> set[str]:
    """All names in an answer, also in what lies within; not below those whose names are values."""
    if isinstance(answer, list):
        return set[str]().union(*(names_of(one, without) for one in answer))
    if not isinstance(answer, dict):
        return set()
    within = (names_of(one, without) for name, one in answer.items() if name not in without)
    return set(answer).union(*within)


@pytest.mark.parametrize(
    "words",
    [
        "plan --params 7e9 --dp 4 --ram 64G --storage-rate 2G",
        "interval --save 2s --mtbf 8h --covered 0.5 --today 30m --step 1s",
    ],
    ids=["plan", "interval"],
)
def test_what_a_plan_prints_is_described(words: str) -> None:
    done = call(*words.split(), "--json")
    assert done.exit_code == 0, done.output
    assert names_of(json.loads(done.output)) == described(words.partition(" ")[0])


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What a coordinator announces; one that nobody else needs."""
    words = [sys.executable, "-m", "acpfs.training.coordinator", str(tmp_path), "--first"]
    words += ["--job", JOB, "--number", "0", "--node", "n", "--witness", "off", "--tls", "off"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


def test_what_a_status_prints_is_described(coordinator: dict[str, Any], tmp_path: Path) -> None:
    link = connect(coordinator["address"], credentials=None)
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        hello = Hello(0, 1, "n", os.getpid(), started, Gate.NONE, {"0": (0,)})
        for message in (hello, Beat(1, 1, Phase.COMPUTING)):
            link.send(Sent(Header(JOB, 0, 0, "rank 0"), message))
        until = time.monotonic() + WATCHDOG_S
        found = ask(coordinator["status"])
        while found is None or "done" not in names_of(found):
            assert time.monotonic() < until
            found = ask(coordinator["status"])
        done = call("status", str(tmp_path), "--json")
    finally:
        link.close()
    assert done.exit_code == 0, done.output
    maps = frozenset({"coordinators", "counts", "stall"})
    assert names_of(json.loads(done.output), maps) == described("status")
