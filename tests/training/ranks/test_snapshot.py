"""Which checkpoint ranks begin at, and where they read it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from acpfs.errors import RefusedError
from acpfs.training.manifest import write_manifest
from acpfs.training.messages import Manifest
from acpfs.training.torch import snapshot

NAME, TRACKER, PATIENCE_S = "step-{step}", "latest", 0.5
clause = pytest.mark.clause("T82")


def checkpoint(directory: Path, step: int) -> None:
    path = directory / f"step-{step}"
    path.mkdir()
    write_manifest(path, Manifest("job", 0, step, (), {}, (), {}, ()))
    (directory / TRACKER).write_text(path.name + "\n")


@clause
def test_a_rank_that_sees_a_newer_one_begins_at_the_step_that_all_see(tmp_path: Path) -> None:
    for step in (4, 9):
        checkpoint(tmp_path, step)
    assert snapshot.newest(tmp_path, TRACKER, PATIENCE_S) == 9
    assert snapshot.of_step(tmp_path, 4, NAME, PATIENCE_S) == tmp_path / "step-4"
    with pytest.raises(RefusedError, match="step-5"):
        snapshot.of_step(tmp_path, 5, NAME, PATIENCE_S)


@clause
def test_there_is_none(tmp_path: Path) -> None:
    assert snapshot.newest(tmp_path, TRACKER, PATIENCE_S) is None
    (tmp_path / TRACKER).write_text("step-3\n")
    assert snapshot.newest(tmp_path, TRACKER, PATIENCE_S) is None


@clause
def test_a_place_that_does_not_answer_is_waited_for(tmp_path: Path) -> None:
    """That it says nothing for a while is no sign that there is nothing: the job would begin again from its beginning."""
    checkpoint(tmp_path, 4)
    (tmp_path / TRACKER).unlink()
    os.mkfifo(tmp_path / TRACKER)  # whoever opens it waits, as in a storage that hangs
    with ThreadPoolExecutor(1) as looking:
        found = looking.submit(snapshot.newest, tmp_path, TRACKER, 0.0)
        (tmp_path / TRACKER).write_text("step-4\n")  # returns when somebody reads
        assert found.result() == 4
