"""numpy, pickle, SQLite, tar, rsync, cp -a and git, unmodified."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.frameworks.conftest import Place, run, workload

pytestmark = [pytest.mark.frameworks, pytest.mark.mount]

GIT = [
    "git",
    "-c",
    "user.name=t",
    "-c",
    "user.email=t@example.org",
    "-c",
    "safe.directory=*",
    "-c",
    "init.defaultBranch=main",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of many sizes, modes and times, links, an empty directory, names that are awkward."""
    top = tmp_path / "tree"
    (top / "empty").mkdir(parents=True)
    for number in range(40):
        path = top / f"d{number % 5}" / f"file {number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(number**3))
        path.chmod(0o400 + number % 8 * 0o10 + 0o200)
        os.utime(path, ns=(10**18 + number, 10**18 + 7 * number))
    (top / "d1" / "umlaut-ä-\n-newline").write_text("x")
    (top / "link").symlink_to("d1/nowhere")
    (top / "d2" / "hard").hardlink_to(top / "d1" / "file 1")
    (top / "d0").chmod(0o2750)
    return top


def shape(top: Path, granularity_ns: int = 1) -> dict[str, tuple[object, ...]]:
    """What a faithful copy keeps: type and mode, size, owner, times as fine as the file system has
    them, link target, number of links.
    """
    found: dict[str, tuple[object, ...]] = {}
    for path in top.rglob("*"):
        st = path.lstat()
        target = os.readlink(path) if path.is_symlink() else None
        size = 0 if path.is_dir() else st.st_size
        links = 0 if path.is_dir() else st.st_nlink
        found[str(path.relative_to(top))] = (
            st.st_mode,
            size,
            st.st_uid,
            st.st_gid,
            st.st_mtime_ns // granularity_ns,
            target,
            links,
        )
    return found


def test_numpy_and_pickle(place: Place, torch_python: str) -> None:
    workload(torch_python, "numpy_files", place.directory)
    place.settle()


def test_sqlite(place: Place) -> None:
    workload(sys.executable, "sqlite_database", place.directory)
    place.settle()


def test_cp_archive(place: Place, tree: Path) -> None:
    run(["cp", "-a", str(tree), str(place.directory / "copy")])
    assert shape(place.directory / "copy") == shape(tree)
    place.settle()
    assert shape(place.backing / "copy", place.time_granularity_ns) == shape(
        tree, place.time_granularity_ns
    )  # S27


def test_rsync(place: Place, tree: Path) -> None:
    """The second run finds nothing to do, also after a new mount; a changed file is replaced by
    rename.
    """
    command = ["rsync", "-aHX", "--itemize-changes", f"{tree}/", f"{place.directory}/copy/"]
    run(command)
    assert run(command) == ""
    place.settle()
    place.remount()
    assert run(command) == ""
    (tree / "d3" / "file 3").write_text("changed")
    assert run(command).splitlines() == [">f.st...... d3/file 3"]
    place.settle()


def test_tar(place: Place, tree: Path) -> None:
    archive = place.directory / "tree.tar"
    run(["tar", "-C", str(tree.parent), "-cf", str(archive), tree.name])
    run(["tar", "-C", str(place.directory), "-xpf", str(archive)])
    run(["tar", "-C", str(place.directory), "--compare", "-f", str(archive)])
    place.settle()


def test_git_clone(place: Place, tmp_path: Path) -> None:
    """Clone, commit, repack and check on the mount."""
    origin = tmp_path / "origin"
    run([*GIT, "init", "-q", str(origin)])
    for number in range(5):
        for name in range(30):
            (origin / f"file{name}").write_text(f"{number} {name}\n" * 100 * (name + 1))
        run([*GIT, "-C", str(origin), "add", "."])
        run([*GIT, "-C", str(origin), "commit", "-qm", f"commit {number}"])
    clone = place.directory / "clone"
    run([*GIT, "clone", "-q", "--no-local", str(origin), str(clone)])
    (clone / "more").write_text("more\n")
    run([*GIT, "-C", str(clone), "add", "more"])
    run([*GIT, "-C", str(clone), "commit", "-qm", "more"])
    run([*GIT, "-C", str(clone), "gc", "-q"])
    run([*GIT, "-C", str(clone), "fsck", "--full", "--strict"])
    assert run([*GIT, "-C", str(clone), "status", "--porcelain"]) == ""
    place.settle()
