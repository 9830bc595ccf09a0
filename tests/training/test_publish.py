"""A gasp gets its name: whole or not at all, whoever is killed, however often it is tried."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from acpfs.control import registry
from acpfs.training import mounted
from acpfs.training.manifest import GaspError, read_manifest, saved_file, verify, write_manifest
from acpfs.training.messages import Manifest, Publish
from acpfs.training.naming import read_tracker
from acpfs.training.publish import publish
from tests.training.taken_trackers import TAKEN, assert_only_the_name_went, take

FILES = {"__0_0.distcp": b"weights", ".metadata": b"where", "host_state/rank-0.pt": b"random"}


@pytest.fixture
def order(tmp_path: Path) -> Publish:
    written = tmp_path / "step-7.gasp-2.tmp"
    (written / "host_state").mkdir(parents=True)
    for name, data in FILES.items():
        (written / name).write_bytes(data)
    files = tuple(saved_file(written, written / name) for name in FILES)
    return Publish(
        Manifest("job", 2, 7, (1,), {"ranks-0-1": 0}, files, {"ranks-0-1": "00"}, ("node",)),
        written.name,
        "step-7",
    )


@pytest.mark.clause("T196")
def test_gasps_that_go_to_no_mount_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounted.tell_where(tmp_path)
    assert f"{tmp_path}, which lies in no acpfs mount" in caplog.text
    caplog.clear()
    monkeypatch.setattr(registry, "locate", lambda path: (path, ""))
    mounted.tell_where(tmp_path)
    assert caplog.text == ""


@pytest.mark.clause("T45")
def test_it_has_its_name_its_manifest_and_the_tracker(tmp_path: Path, order: Publish) -> None:
    for _ in range(2):  # the second time nothing is left to do
        assert publish(tmp_path, order, "latest", 1.0) == tmp_path / "step-7"
        assert verify(tmp_path / "step-7") == order.manifest
        assert (tmp_path / "latest").read_text() == "step-7\n"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-7"]


@pytest.mark.clause("T45")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
        (lambda path: (path / "__9_0.distcp").write_bytes(b""), "reported by nobody"),
        (lambda path: (path / ".metadata").write_bytes(b""), "0 bytes instead of 5"),
    ],
)
def test_other_files_than_reported_get_no_name(
    tmp_path: Path, order: Publish, change: Callable[[Path], None], said: str
) -> None:
    change(tmp_path / order.directory)
    with pytest.raises(GaspError, match=said):
        publish(tmp_path, order, "latest", 1.0)
    assert not (tmp_path / "step-7").exists()
    assert not (tmp_path / "latest").exists()


@pytest.mark.clause("T45")
def test_killed_between_rename_and_tracker(tmp_path: Path, order: Publish) -> None:
    publish(tmp_path, order, "", 1.0)
    assert not (tmp_path / "latest").exists()
    publish(tmp_path, order, "latest", 1.0)
    assert (tmp_path / "latest").read_text() == "step-7\n"


@pytest.mark.clause("T45")
def test_what_had_the_name_is_kept(tmp_path: Path, order: Publish) -> None:
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "half").touch()
    publish(tmp_path, order, "latest", 1.0)
    assert verify(tmp_path / "step-7") == order.manifest
    assert (tmp_path / "step-7.before-gasp-2" / "half").exists()
    # a later generation's gasp of the same step is another one
    again = replace(order, manifest=replace(order.manifest, generation=3))
    (tmp_path / "step-7").rename(tmp_path / order.directory)
    publish(tmp_path, again, "latest", 1.0)
    found = read_manifest(tmp_path / "step-7")
    assert found is not None
    assert found.generation == 3


@pytest.mark.clause("T45")
def test_what_had_the_name_is_kept_however_many_had_it_before(
    tmp_path: Path, order: Publish
) -> None:
    taken = ("step-7", "step-7.before-gasp-2", "step-7.before-gasp-2-2")
    for name in taken:
        (tmp_path / name).mkdir()
        (tmp_path / name / "of").write_text(name)
    publish(tmp_path, order, "latest", 1.0)
    assert verify(tmp_path / "step-7") == order.manifest
    kept = (*taken[1:], "step-7.before-gasp-2-3")
    assert [(tmp_path / name / "of").read_text() for name in kept] == [*taken[1:], "step-7"]


@pytest.mark.clause("T45")
@pytest.mark.parametrize("kind", ["link to nothing", "link to a checkpoint", "file", "unreadable"])
def test_what_had_the_name_is_kept_whatever_it_is(
    tmp_path: Path, order: Publish, kind: str
) -> None:
    final = tmp_path / "step-7"
    other = tmp_path / "other"
    if kind == "file":
        final.write_bytes(b"a checkpoint of another kind")
    elif kind == "unreadable":
        final.mkdir()
        (final / "gasp.json").write_bytes(b"of another program")
    else:
        final.symlink_to("other")
    if kind == "link to a checkpoint":
        other.mkdir()
        (other / "half").touch()
    publish(tmp_path, order, "latest", 1.0)
    assert not final.is_symlink()
    assert verify(final) == order.manifest
    assert os.path.lexists(tmp_path / "step-7.before-gasp-2")
    assert not other.exists() or [path.name for path in other.iterdir()] == ["half"]


@pytest.mark.clause("T171")
def test_what_was_begun_and_not_named_goes(tmp_path: Path, order: Publish) -> None:
    """Of this job, up to this generation; what another node may just be naming stays."""
    begun = [
        "step-6.gasp-job-1.tmp",
        "step-7.gasp-job-1.tmp",
        "step-7.gasp-other-1.tmp",
        "step-7.gasp-job-3.tmp",
    ]
    for name in begun:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
    (tmp_path / ".latest.gasp-job-1.tmp").touch()
    shutil.copytree(tmp_path / order.directory, tmp_path / "again")
    publish(tmp_path, replace(order, elsewhere=("other",)), "latest", 0.0)
    assert all((tmp_path / name).exists() for name in begun)
    publish(tmp_path, order, "latest", 1.0)
    assert [name for name in begun if (tmp_path / name).exists()] == begun[2:]
    assert not (tmp_path / ".latest.gasp-job-1.tmp").exists()


@pytest.mark.clause("T171")
def test_nothing_is_no_checkpoint(tmp_path: Path, order: Publish) -> None:
    """As of a `save=` that writes to a path of its own."""
    (tmp_path / "nothing").mkdir()
    empty = replace(order, manifest=replace(order.manifest, files=()), directory="nothing")
    with pytest.raises(GaspError, match="nothing was written"):
        publish(tmp_path, empty, "latest", 1.0)
    assert not (tmp_path / "step-7").exists()
    assert not (tmp_path / "latest").exists()


@pytest.mark.clause("T170")
@pytest.mark.parametrize("kind", TAKEN)
def test_nothing_is_written_through_the_trackers_name(
    tmp_path: Path, order: Publish, kind: str
) -> None:
    left = take(tmp_path, kind)
    publish(tmp_path, order, "latest", 1.0)
    assert_only_the_name_went(tmp_path, left)


@pytest.mark.clause("T61")
def test_a_tracker_may_say_the_number_alone(tmp_path: Path, order: Publish) -> None:
    publish(tmp_path, order, "latest", 1.0, "{step}")
    assert (tmp_path / "latest").read_text() == "7\n"


@pytest.mark.clause("T64")
def test_an_earlier_gasp_that_comes_from_another_node_keeps_the_name(
    tmp_path: Path, order: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / order.directory
    shutil.copytree(written, tmp_path / "on its way")
    write_manifest(tmp_path / "on its way", replace(order.manifest, generation=1))

    def comes(_: float) -> None:
        (tmp_path / "on its way").rename(tmp_path / "step-7")

    monkeypatch.setattr("time.sleep", comes)
    publish(tmp_path, replace(order, elsewhere=("other",)), "latest", 60.0)
    assert verify(tmp_path / "step-7").generation == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-7"]


@pytest.mark.clause("T64")
def test_a_gasp_that_does_not_come_from_another_node_is_not_waited_for_for_ever(
    tmp_path: Path, order: Publish
) -> None:
    shutil.copytree(tmp_path / order.directory, tmp_path / "step-7")
    write_manifest(tmp_path / "step-7", replace(order.manifest, generation=1))
    (tmp_path / "step-7" / ".metadata").unlink()  # not whole
    publish(tmp_path, replace(order, elsewhere=("other",)), "latest", 0.0)
    assert verify(tmp_path / "step-7") == order.manifest
    assert (tmp_path / "step-7.before-gasp-2").exists()


@pytest.mark.clause("T170")
def test_what_a_tracker_names(tmp_path: Path) -> None:
    tracker = tmp_path / "latest"
    with pytest.raises(FileNotFoundError):
        read_tracker(tracker)
    for text in (b"", b"\xff", b"a\0b", b"x" * 4097):
        tracker.write_bytes(text)
        with pytest.raises(GaspError, match="names no checkpoint"):
            read_tracker(tracker)
    tracker.write_text("step-7\n")
    assert read_tracker(tracker) == tmp_path / "step-7"
    tracker.unlink()
    tracker.symlink_to("step-8")  # of another program, which may lead anywhere
    assert read_tracker(tracker) == tmp_path / "step-8"
    tracker.unlink()
    tracker.mkdir()
    assert read_tracker(tracker) == tracker


def test_verify_reads_every_byte(tmp_path: Path, order: Publish) -> None:
    publish(tmp_path, order, "", 1.0)
    (tmp_path / "step-7" / ".metadata").write_bytes(b"wherf")
    with pytest.raises(GaspError, match="checksum"):
        verify(tmp_path / "step-7")
    (tmp_path / "step-7" / "gasp.json").write_bytes(b"{}")
    with pytest.raises(GaspError):
        verify(tmp_path / "step-7")
    with pytest.raises(GaspError, match="has no"):
        verify(tmp_path)
