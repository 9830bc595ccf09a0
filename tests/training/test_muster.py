"""A rank finds its coordinators without a process group: whoever starts them, and whoever comes later."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from acpfs.errors import ConfigError
from acpfs.training.muster import Place, muster, place_from
from acpfs.training.policy import Policy
from acpfs.training.wire import LinkClosedError

clause = pytest.mark.clause
FIRST = {"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "run/7", "MASTER_PORT": "29500"}


def test_a_place_is_what_a_launcher_says() -> None:
    assert place_from(FIRST) == Place("run_7-29500-0", 0, 4, 0, 0, 1, 0)
    assert place_from({**FIRST, "ACPFS_JOB": "mine", "ACPFS_GENERATION": "2"}).job == "mine"
    with pytest.raises(ConfigError, match="RANK"):
        place_from({"RANK": "0"})


@clause("T83")
def test_the_first_ranks_of_the_first_nodes_start_coordinators_and_nobody_who_comes_later() -> None:
    node = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    started = [place_from({**node, "RANK": str(2 * group), "GROUP_RANK": str(group)}).starts for group in range(4)]
    assert started == [(0,), (1,), (2,), ()]
    assert place_from({**node, "RANK": "1", "LOCAL_RANK": "1"}).starts == ()
    assert place_from(FIRST).starts == (0, 1)
    assert place_from({**FIRST, "ACPFS_GENERATION": "1"}).starts == ()


@contextlib.contextmanager
def ended(directory: Path) -> Iterator[None]:
    """Coordinators that were started, at the end."""
    try:
        yield
    finally:
        for file in (directory / ".acpfs-job").glob("*/coordinator-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)


@clause("T83")
def test_rank_0_starts_two_and_a_process_that_comes_later_takes_the_one_that_lives(tmp_path: Path) -> None:
    place, policy = place_from(FIRST), Policy(tls=False)
    with ended(tmp_path):
        first = muster(tmp_path, place, policy, {})
        assert sorted(first.links) == [0, 1]
        os.kill(json.loads((tmp_path / ".acpfs-job" / first.job / "coordinator-0").read_text())["pid"], signal.SIGKILL)
        with pytest.raises(LinkClosedError):
            first.links[0].receive(60)
        later = muster(tmp_path, replace(place, generation=1), policy, {})
        assert sorted(later.links) == [1]
        for link in (*first.links.values(), *later.links.values()):
            link.close()
