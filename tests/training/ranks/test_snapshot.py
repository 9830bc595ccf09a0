"""Which checkpoint ranks begin at, and where they read it."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from acpfs.errors import RefusedError
from acpfs.training.manifest import saved_file, verify, write_manifest
from acpfs.training.messages import Gate, Manifest, Save, SavedFile, Shard
from acpfs.training.policy import Policy
from acpfs.training.torch import snapshot
from acpfs.training.torch.layout import Layout

NAME = "step-{step}"
TRACKER = "latest"
PATIENCE_S = 0.5
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


@pytest.mark.clause("S526")
def test_one_of_a_newer_acpfs_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    manifest = tmp_path / "step-4" / "gasp.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 2, "news": 1}))
    with pytest.raises(RefusedError, match=r"gasp\.json has version 2, this acpfs knows 1"):
        snapshot.newest(tmp_path, TRACKER, PATIENCE_S)


@clause
def test_a_place_that_does_not_answer_is_waited_for(tmp_path: Path) -> None:
    """That it says nothing for a while is no sign that there is nothing: the job would begin again
    from its beginning.
    """
    checkpoint(tmp_path, 4)
    (tmp_path / TRACKER).unlink()
    os.mkfifo(tmp_path / TRACKER)  # whoever opens it waits, as in a storage that hangs
    with ThreadPoolExecutor(1) as looking:
        found = looking.submit(snapshot.newest, tmp_path, TRACKER, 0.0)
        (tmp_path / TRACKER).write_text("step-4\n")  # returns when somebody reads
        assert found.result() == 4


class Writing:
    """Of the only rank. `fails`: in the middle."""

    def __init__(self) -> None:
        self.fails = False
        self.written: list[str] = []

    def prepare(self, step: int) -> None:
        """Nothing depends on it."""

    def write(
        self, directory: Path, order: Save, shards: tuple[Shard, ...]
    ) -> tuple[SavedFile, ...]:
        self.written.append(directory.name)
        directory.mkdir()
        path = directory / "weights"
        path.write_text(str(order.step))
        if self.fails:
            raise OSError("connection closed by peer")
        return (saved_file(directory, path),)


def save(directory: Path, generation: int, step: int, writer: Writing, job: str = "job") -> Path:
    layout = Layout({"all": (0,)}, {"all": ("weights",)}, Gate.EXPLICIT)
    return snapshot.save(
        directory, job, 0, generation, step, layout, writer, Policy(), lambda value: [value]
    )


def unnamed(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("*.tmp")}


@pytest.mark.clause("T165")
def test_what_was_broken_off_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writing()
    writer.fails = True
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(snapshot, "node_name", lambda directory: "acpfs:another-node")
        with pytest.raises(OSError, match="closed"):
            save(tmp_path, 1, 4, writer)
    for generation, job in ((9, "job"), (1, "another-job"), (1, "job-1"), (2, "job")):
        with pytest.raises(OSError, match="closed"):
            save(tmp_path, generation, 4, writer, job)
    assert unnamed(tmp_path) == set(writer.written)
    others = set(writer.written[:4])
    writer.fails = False
    path = save(tmp_path, 3, 5, writer)
    # its name may have been given where this node cannot see it yet; of a later generation; of
    # others
    assert unnamed(tmp_path) == others
    assert verify(path).step == 5
    assert (tmp_path / "latest").read_text() == "step-5\n"


@pytest.mark.clause("T165")
def test_one_that_is_taken_again_is_not_written_again(tmp_path: Path) -> None:
    """But its tracker is: whatever kept it from being written the first time."""
    writer = Writing()
    path = save(tmp_path, 3, 5, writer)
    (tmp_path / "latest").unlink()
    assert save(tmp_path, 3, 5, writer) == path
    assert len(writer.written) == 1
    assert unnamed(tmp_path) == set()
    assert (tmp_path / "latest").read_text() == "step-5\n"
    assert verify(path).files == (saved_file(path, path / "weights"),)
    assert (
        save(tmp_path, 4, 5, writer) == path
    )  # of another generation: the one before is kept beside it
    assert len(writer.written) == 2
    assert verify(path).generation == 4
