"""Which files are looked at for a report on one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio

from acpfs.checkpoints import Checkpoint
from acpfs.filesystem import catalogue
from acpfs.filesystem.known_files import KnownFile, KnownFiles
from acpfs.types import ROOT, Ino
from acpfs.worker.assembly import Parts
from acpfs.worker.checkpoint_view import CheckpointView
from tests.filesystem.world import CALLER, World, world
from tests.rig.runtime import REAL

FILES = 5


async def saved(w: World) -> None:
    """Three directories, and one checkpoint whose files have only their names in common."""

    async def directory(name: bytes, parent: Ino = ROOT) -> Ino:
        return (await w.do(w.fs.mkdir(parent, name, 0o755, CALLER))).ino

    run = await directory(b"run")
    for step in (b"step-1", b"step-2", b"step-3"):
        inside = await directory(step, run)
        for number in range(FILES):
            await w.write(b"shard_%d.pt" % number, b"x", inside)
    for name in (b"model_7.pt", b"optimizer_7.pt"):
        await w.write(name, b"x", run)
    await w.drained()


def view_of(w: World) -> CheckpointView:
    manifest = w.engine._manifest.manifest
    parts = SimpleNamespace(fs=w.fs, inner=w.inner, manifest=manifest, state=w.state, given=REAL)
    return CheckpointView(cast("Parts", parts))


@pytest.mark.clause("S113")
@pytest.mark.parametrize(("path", "name", "files", "looked_at"), [
    (b"run/step-2", "run/step-2", FILES, FILES),
    (b"run/step-2/shard_1.pt", "run/step-2", FILES, FILES),
    (b"run/model_7.pt", "run/*_7.pt", 2, 3 * FILES + 2),
])  # fmt: skip
def test_a_report_on_one_directory_walks_over_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: bytes,
    name: str,
    files: int,
    looked_at: int,
) -> None:
    """The lock is had meanwhile: with 100,000 files in one save_dir that was 0.1 to 0.5 s for each
    checkpoint that came to be persisted.
    """
    walked: list[bytes] = []
    below = KnownFiles.below

    def noted(self: KnownFiles, where: bytes) -> Iterator[KnownFile]:
        for file in below(self, where):
            walked.append(file.path)
            yield file

    monkeypatch.setattr(KnownFiles, "below", noted)

    async def main() -> None:
        async with world(tmp_path) as w:
            await saved(w)
            view = view_of(w)
            (report,) = view.reports(path)
            assert (report.path, report.files, report.state) == (name, files, "persisted")
            assert len(walked) == looked_at

    trio.run(main)


@pytest.mark.clause("S471")
def test_a_checkpoint_with_a_damaged_file_is_not_called_persisted(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            await saved(w)
            view = view_of(w)

            def states() -> list[str]:
                return [report.state for report in view.reports(b"run") if "*" not in report.path]

            bad = b"run/step-2/shard_1.pt"
            view.read_back(bad, is_whole=False)
            assert states() == ["persisted", "damaged", "persisted"]
        async with world(tmp_path) as w:  # the next worker
            view = view_of(w)
            assert bad in w.inner.catalogue.damaged
            view.read_back(bad, is_whole=True)
            assert bad not in w.inner.catalogue.damaged

    trio.run(main)


@pytest.mark.clause("S471")
@pytest.mark.parametrize("how", ["written anew", "renamed over", "its directory moved in"])
def test_what_takes_the_place_of_a_damaged_file_is_whole(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            await saved(w)
            run = (await w.do(w.fs.lookup(ROOT, b"run"))).ino
            step = (await w.do(w.fs.lookup(run, b"step-2"))).ino
            bad = b"run/step-2/shard_1.pt"
            if how == "its directory moved in":
                bad = b"run/step-9/shard_1.pt"
            view_of(w).read_back(bad, is_whole=False)
            assert bad in w.inner.catalogue.damaged
            if how == "written anew":
                await w.write(b"shard_1.pt", b"y", step)
            elif how == "renamed over":
                await w.write(b"tmp", b"y", step)
                await w.do(w.fs.rename(step, b"tmp", step, b"shard_1.pt", 0))
            else:
                await w.do(w.fs.rename(run, b"step-2", run, b"step-9", 0))
            await w.drained()
            assert bad not in w.inner.catalogue.damaged

    trio.run(main)


@pytest.mark.clause("S472")
def test_a_save_that_drains_slowly_began_when_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than after which a checkpoint that is written to counts as saved anew."""

    async def main() -> None:
        async with world(tmp_path) as w:
            w.engine.hold(True)
            run = (await w.do(w.fs.mkdir(ROOT, b"step-1", 0o755, CALLER))).ino
            await w.write(b"model.pt", b"x", run)
            monkeypatch.setattr(catalogue, "NEW_SAVE_S", -1.0)
            before = w.inner.catalogue.times(Checkpoint(b"", b"step-1", 1))
            assert before is not None
            began_at = before.began_at
            await w.drained()
            (report,) = view_of(w).reports(b"step-1")
            assert report.began_at == began_at
            assert report.save_s is not None
            assert report.persist_s is not None
            assert report.persist_s >= report.save_s

    trio.run(main)
