"""The version that was cut last and this tree, one after the other: each takes a mount over from
the other in the middle of a save, and each drains what the other left.

That version's code is in the history of this checkout (its tag, or the commit that wrote it); where
the history is not there, as in a shallow clone, these are skipped.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from acpfs import __version__
from tests.formats import leave
from tests.formats.fixture_files import FIRST, HELD_BYTES, NODE, lay, shown
from tests.formats.test_left import lay_tier
from tests.rig.history import checkout, released
from tests.rig.mounts import REPOSITORY, AcpfsMount, wait_gone
from tests.supervisor.test_handover import WATCHDOG_S, take_over, until

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
PIECE = b"p" * 4096
TURNS = 6


@pytest.fixture(scope="module")
def candidate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Code of the version that was cut last."""
    code = checkout(released(), tmp_path_factory.mktemp("candidate"), "acpfs")
    assert f'"{__version__}"' in (code / "acpfs/__init__.py").read_text()
    return code


@contextmanager
def saving(file: Path) -> Iterator[list[int]]:
    """Somebody writes on and on; how much so far."""
    written = [0]
    stop = threading.Event()

    def write() -> None:
        with open(file, "wb", buffering=0) as one:
            while not stop.is_set():
                written[0] += one.write(PIECE)
                stop.wait(0.001)

    writer = threading.Thread(target=write, name="writer", daemon=True)
    writer.start()
    try:
        yield written
    finally:
        stop.set()
        writer.join(60)
    assert not writer.is_alive()


def goes_on_over(mount: AcpfsMount, codes: list[Path]) -> None:
    """A save that begins with the code of the mount and goes on with each of these, and what else
    was saved under each of them.
    """
    saved = {}
    with saving(mount.path / "log") as written:
        for number, code in enumerate(codes):
            (mount.path / f"step-{number}").write_bytes(PIECE * (number + 1))
            saved[f"step-{number}"] = PIECE * (number + 1)
            supervisor = mount.supervisor
            take_over(mount, code)
            wait_gone(supervisor)
            seen = written[0]
            until(lambda: written[0] > seen)  # noqa: B023 - asked before the next turn
    saved["log"] = PIECE * (written[0] // len(PIECE))
    mount._environment["PYTHONPATH"] = str(codes[-1])
    mount.flush()
    assert {name: (mount.backing / name).read_bytes() for name in saved} == saved
    assert mount.ask("doctor") == {"items": []}
    mount.umount()
    assert mount.leaks() == []


def mounted(tmp_path: Path, transport: str, code: Path) -> AcpfsMount:
    (tmp_path / "backing").mkdir()
    return AcpfsMount(
        tmp_path / "backing",
        tmp_path / "mnt",
        transport,
        watchdog_s=WATCHDOG_S,
        environment={"PYTHONPATH": str(code)},
    )


@pytest.mark.transports("native")
@pytest.mark.clause("S300", "S526", "S565")
@pytest.mark.parametrize("first", ["candidate", "today"])
def test_a_save_goes_on_when_the_other_version_takes_over(
    tmp_path: Path, transport: str, candidate: Path, first: str
) -> None:
    codes = [candidate, REPOSITORY] if first == "candidate" else [REPOSITORY, candidate]
    with mounted(tmp_path, transport, codes[0]) as mount:
        goes_on_over(mount, codes[1:])


@pytest.mark.long
@pytest.mark.transports("native-direct", "native-passthrough")
@pytest.mark.clause("S300", "S526", "S565")
def test_a_save_goes_on_over_many_changes_of_the_version(
    tmp_path: Path, transport: str, candidate: Path
) -> None:
    with mounted(tmp_path, transport, candidate) as mount:
        goes_on_over(mount, [REPOSITORY, candidate] * (TURNS // 2))


@pytest.mark.transports("native")
@pytest.mark.clause("S530", "S565")
@pytest.mark.parametrize("case", leave.CASES)
def test_the_candidate_drains_what_this_tree_leaves(
    tmp_path: Path, transport: str, candidate: Path, case: str
) -> None:
    """The way back, as long as no version of a form has grown since. Where one has, this says so:
    then docs/FORMATS.md and the changelog have to.
    """
    left = tmp_path / "left" / case
    (tmp_path / "scratch").mkdir()
    leave.make(case, left, tmp_path / "scratch", REPOSITORY)
    backing = tmp_path / "backing"
    lay(left / "backing", backing, tmp_path)
    volume = (backing / ".acpfs/volume").read_text().split()[0]
    (tmp_path / "spill").mkdir()
    mount = AcpfsMount(
        backing,
        tmp_path / "mnt",
        transport,
        environment={"PYTHONPATH": str(candidate)},
        **leave.options(case, tmp_path / "spill"),
    )
    if case == "tier":
        lay_tier(left, mount, volume)
    else:
        lay(left / "spill", tmp_path / f"spill/acpfs-{volume}-{NODE}", tmp_path)
    with mount:
        wanted = json.loads((left / "shown.json").read_text())
        assert shown(mount.path) == wanted
        assert (mount.path / FIRST).stat().st_size == HELD_BYTES
        mount.flush()
        mount.umount()
        assert shown(backing) == wanted
