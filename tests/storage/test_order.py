"""Over real distributed file systems: another client sees the application's history; all of it
arrives and is found again.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.ordering.history import Application
from tests.rig.journal import tree_of
from tests.rig.mounts import MakeMount
from tests.storage.conftest import ALL, QUICK, Site, training
from tests.storage.observer import Look, Observer, check

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
ROUNDS = 60 if ALL else 15


def run(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@clause("S6", "S7", "S1", "S26")
def test_another_client_sees_only_what_was(
    transport: str, make_mount: MakeMount, site: Site, tmp_path: Path, seed: int
) -> None:
    """Names appear through a directory that the backing client has cached, files are replaced while
    they are read there.
    """
    below, seen = site.fresh(tmp_path.name)
    mount = make_mount(below, transport, **QUICK)
    application = Application(mount.path)
    saves = training(application, seed)
    with Observer(seen, application.states, seed) as observer:
        for _ in range(ROUNDS):
            saves.round()
            observer.look("latest")  # the thread may not come to it on a busy machine
        mount.flush(timeout_s=120)
    assert observer.check() >= ROUNDS
    assert tree_of(seen) == application.states[-1]
    assert {row["status"] for row in mount.ctl("verify")} == {"ok"}
    (manifest,) = (seen / ".acpfs" / "manifest").glob("*.xxh128")
    run("xxh128sum", "--quiet", "-c", str(manifest), cwd=seen)
    mount.umount()
    assert mount.leaks() == []
    mount.start()
    assert tree_of(mount.path) == application.states[-1], "found again, from the servers alone"
    mount.umount()


def test_the_observer_finds_a_wrong_order() -> None:
    """The test of the test."""
    one = ("file", "1")
    other = ("file", "2")
    states = [
        {},
        {"shard": one},
        {"shard": one, "latest": one},
        {"shard": other, "latest": one},
        {"latest": one},
    ]
    good: list[Look] = [
        ("shard", None),
        ("latest", None),
        ("latest", one),
        ("shard", other),
        ("shard", None),
    ]
    assert check(good, states) == len(good)
    wrong: list[list[Look]] = [
        [("latest", one), ("latest", None)],
        [("shard", other), ("shard", one)],
        [("shard", ("file", "half"))],
        [("latest", other)],
    ]
    for looks in wrong:
        with pytest.raises(AssertionError, match="saw"):
            check(looks, states)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files with modes, owners, times, xattrs, links and awkward names."""
    top = tmp_path / "tree"
    (top / "empty").mkdir(parents=True)
    for number in range(12):
        path = top / f"d{number % 3}" / f"file {number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(number**4))
        path.chmod(0o600 + number % 8)
        os.chown(path, 1000 + number, 2000 + number)
        os.setxattr(path, "user.number", str(number).encode())
        os.utime(path, ns=(10**18 + number, (10**9 + 7 * number) * 10**9))
    (top / "d1" / "umlaut-ä-'quote").write_text("x")
    (top / "link").symlink_to("d1/nowhere")
    (top / "d2" / "hard").hardlink_to(top / "d1" / "file 1")
    return top


@clause("S1", "S27", "S30")
def test_attributes_links_and_sparse_files_arrive(
    transport: str, make_mount: MakeMount, site: Site, tmp_path: Path, tree: Path
) -> None:
    """Neither file system has rename flags or O_TMPFILE, and MooseFS has times of whole seconds:
    rsync finds nothing to do all the same.
    """
    below, seen = site.fresh(tmp_path.name)
    mount = make_mount(below, transport, **QUICK)
    copy = ["rsync", "-aHX", "--itemize-changes", f"{tree}/", f"{mount.path}/copy/"]
    run(*copy)
    with open(mount.path / "sparse", "wb") as file:
        file.seek(5 << 20)
        file.write(b"end")
    with open(mount.path / "reserved", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
    now_ns = (mount.path / "sparse").stat().st_mtime_ns
    mount.flush()
    assert (
        run(
            "rsync",
            "-aHXn",
            "--filter=-x user.acpfs.*",
            "--itemize-changes",
            f"{tree}/",
            f"{seen}/copy/",
        )
        == ""
    ), "for the other client"
    assert (seen / "sparse").read_bytes() == bytes(5 << 20) + b"end"
    assert (seen / "reserved").stat().st_size == 1 << 20
    assert (mount.path / "sparse").stat().st_mtime_ns == now_ns
    features = mount.status()["features"]
    assert (features["rename_exchange"], features["hard_links"], features["xattrs"]) == (
        False,
        True,
        True,
    )
    assert features["time_granularity_ns"] == 10**9 if site.kind == "moosefs" else 1
    mount.umount()
    mount.start()
    assert run(*copy) == "", "nor after a mount with empty RAM"
    assert (mount.path / "sparse").stat().st_mtime_ns // 10**9 == now_ns // 10**9
    mount.umount()
