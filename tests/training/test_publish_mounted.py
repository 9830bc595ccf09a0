"""A gasp in a real mount: RAM full, storage that stands still, workers that are killed, a node that
died. Without torch.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from acpfs.training import mounted
from acpfs.training.manifest import GaspError, saved_file, verify
from acpfs.training.messages import Manifest, Publish
from acpfs.training.publish import publish
from tests.cluster.stand import SOON_MISSING_S, Stand
from tests.cluster.test_order import read, until, withheld, write
from tests.rig.mounts import AcpfsMount, MakeMount
from tests.rig.processes import Child
from tests.training.taken_trackers import TAKEN, assert_only_the_name_went, take

clause = pytest.mark.clause
pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
T = TypeVar("T")
MIB = 1 << 20
RAM = 32 * MIB
RESERVE = 8 * MIB
FILES = {"__0_0.distcp": b"weights" * 1000, "part/.metadata": b"where", "trainer_state.json": b"{}"}


def saved(
    save_directory: Path,
    nodes: tuple[str, ...] = (),
    files: dict[str, bytes] = FILES,
    step: int = 7,
    generation: int = 1,
) -> Publish:
    """What one rank writes, and then is told."""
    written = save_directory / f"step-{step}.gasp-{generation}.tmp"
    with mounted.written_by_one(written):
        for name, data in files.items():
            (written / name).parent.mkdir(exist_ok=True)
            temporary = (written / name).with_name("tmp")
            temporary.write_bytes(data)
            temporary.rename(written / name)
        told = tuple(saved_file(written, written / name) for name in files)
    own = mounted.node_name(save_directory)
    return Publish(
        Manifest("job", generation, step, (1,), {"all": 0}, told, {"all": "00"}, (own, *nodes)),
        written.name,
        f"step-{step}",
    )


def begin(mount: AcpfsMount, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(mount.runtime_dir))
    (mount.path / "run").mkdir()
    return mount.path / "run"


def with_the_worker_killed(mount: AcpfsMount, step: Callable[[], T]) -> T:
    """As a rank does it: with libfuse calls fail until the next worker is there, and what failed is
    done again.
    """
    mount.kill_worker()
    deadline = time.monotonic() + 60
    while True:
        try:
            return step()
        except (OSError, GaspError) as error:
            print(error)
            assert time.monotonic() < deadline
            mounted.wait_until_back(mount.path / "run", lambda: time.monotonic() < deadline)


@clause("T52", "T54", "S279")
def test_ram_is_full_and_the_storage_stands_still(
    transport: str, tmp_path: Path, make_mount: MakeMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", transport, ram=RAM, reserve="25%", bandwidth=1)
    run = begin(mount, monkeypatch)
    (run / "before").write_bytes(
        bytes(RAM - RESERVE - MIB)
    )  # first: at a byte per second nothing comes behind it
    (run / "latest").write_text("step-1000000\n", encoding="ascii")
    ordinary = Child(lambda: (run / "ordinary").write_bytes(bytes(2 * MIB)))
    mount.wait_status(lambda status: [one["path"] for one in status["waiting"]] == ["run/ordinary"])
    order = saved(run, files={**FILES, "__0_1.distcp": os.urandom(5 * MIB)})
    assert publish(run, order, "latest", 1.0) == run / "step-7"
    assert verify(run / "step-7") == order.manifest
    assert (run / "latest").read_text() == "step-7\n"
    status = mount.status()
    assert [one["path"] for one in status["waiting"]] == ["run/ordinary"]
    assert status["urgent"] == []
    assert not mounted.wait_safe(run / "step-7", run / "latest", "persisted", 0.05)
    assert read(mount.backing, "run/latest") is None
    mount.ask("set", key="bandwidth", value="0")
    assert mounted.wait_safe(run / "step-7", run / "latest", "persisted", 60)
    assert verify(mount.backing / "run" / "step-7") == order.manifest
    assert read(mount.backing, "run/latest") == "step-7\n"
    ordinary.result()
    mount.flush()


@clause("T53", "S282", "S286")
def test_a_node_died_and_nothing_of_the_gasp_waits_for_it(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its pointers inside, not its name, not the one that had the name before, not the tracker,
    whose older version is withheld.
    """
    shared = tmp_path / "shared"
    shared.mkdir()
    with Stand(tmp_path, [shared] * 2, transport, node_timeout=SOON_MISSING_S) as stand:
        first, second = stand.nodes
        run = begin(first, monkeypatch)
        (run / "latest").write_text("step-1\n", encoding="ascii")
        first.flush()
        second.ask("set", key="bandwidth", value="1")
        write(second, "lost", "x" * 10000)
        second.kill()
        (run / "latest").write_text("step-5\n", encoding="ascii")
        until(lambda: {one["path"] for one in withheld(first)} == {"run/latest"}, first)
        (run / "step-7").mkdir()
        (run / "step-7" / "half").write_bytes(b"x")
        order = saved(run)
        publish(run, order, "latest", 1.0)
        assert mounted.wait_safe(run / "step-7", run / "latest", "persisted", 60)
        assert verify(shared / "run" / "step-7") == order.manifest
        assert (shared / "run" / "step-7.before-gasp-1" / "half").exists()
        assert read(shared, "run/latest") == "step-7\n"
        assert not withheld(first)


@clause("T170")
@pytest.mark.transports("libfuse", "native")
def test_nothing_is_written_through_the_trackers_name(
    transport: str, tmp_path: Path, make_mount: MakeMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file that is there is written in place."""
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", transport)
    run = begin(mount, monkeypatch)
    for kind in TAKEN:
        (run / kind).mkdir()
        left = take(run / kind, kind)
        order = saved(run / kind, generation=2)
        publish(run / kind, order, "latest", 1.0)
        assert_only_the_name_went(run / kind, left)
        before = (run / kind / "latest").stat().st_ino
        publish(run / kind, order, "latest", 1.0)
        assert (run / kind / "latest").stat().st_ino == before, "one of its own stays"
        mount.flush()
        assert_only_the_name_went(mount.backing / "run" / kind, left)


@pytest.mark.long
@clause("T53", "S283")
def test_two_nodes_wrote_it_and_its_name_waits_for_both(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with Stand(tmp_path, [shared] * 2, transport) as stand:
        first, second = stand.nodes
        run = begin(first, monkeypatch)
        first.flush()
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(second.runtime_dir))
        second.ask("set", key="bandwidth", value="1")
        theirs = saved(
            second.path / "run",
            files={"__1_0.distcp": b"theirs" * 1000, "other/.metadata": b"there"},
        ).manifest
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(first.runtime_dir))
        order = saved(run, theirs.nodes)
        order = replace(
            order, manifest=replace(order.manifest, files=(*order.manifest.files, *theirs.files))
        )
        assert order.manifest.nodes == ("acpfs:node0", "acpfs:node1")
        with pytest.raises(GaspError, match=r"__1_0\.distcp is missing"):
            publish(run, order, "latest", 0.2)
        assert not (run / "step-7").exists()
        second.ask("set", key="bandwidth", value="0")
        publish(run, order, "latest", 60)
        assert mounted.wait_safe(run / "step-7", run / "latest", "persisted", 60)
        assert verify(shared / "run" / "step-7") == order.manifest
        assert read(shared, "run/latest") == "step-7\n"


@clause("T52", "T54", "S81")
@pytest.mark.transports("libfuse", "native")
def test_the_worker_is_killed_before_each_step(
    transport: str, tmp_path: Path, make_mount: MakeMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", transport, reserve="25%")
    run = begin(mount, monkeypatch)

    def done(step: int) -> Publish:
        shutil.rmtree(run / f"step-{step}.gasp-1.tmp", ignore_errors=True)
        return saved(run, step=step)

    for step in (7, 8):  # without a tracker, and with one
        order = with_the_worker_killed(mount, partial(done, step))
        with_the_worker_killed(mount, partial(publish, run, order, "latest", 1.0))
        assert with_the_worker_killed(
            mount, partial(mounted.wait_safe, run / order.name, run / "latest", "persisted", 60)
        )
        assert verify(mount.backing / "run" / order.name) == order.manifest
        assert read(mount.backing, "run/latest") == f"{order.name}\n"


@clause("T54")
def test_without_a_mount_persisted_means_synced(tmp_path: Path) -> None:
    order = saved(tmp_path)
    assert mounted.needed(order.manifest.nodes) == ()
    publish(tmp_path, order, "latest", 1.0)
    assert mounted.wait_safe(tmp_path / "step-7", tmp_path / "latest", "persisted", 1.0)
    assert not mounted.wait_safe(tmp_path / "gone", None, "persisted", 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-7"]
