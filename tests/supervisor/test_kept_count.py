"""What a RAM tier keeps, counted without its worker: that it cannot be told is never said to be
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from acpfs.cli.verbs import status
from acpfs.errors import NotMountedError, RefusedError
from acpfs.mounting import checks
from acpfs.ram.state import StateDatabase
from acpfs.supervisor import fallthrough
from acpfs.types import Ino, TierId
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import OpKind
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S201")
UNKNOWN = (None, None)


def damaged(tier: Path) -> None:
    (tier / "state.sqlite").write_bytes(b"no database at all" * 100)


def gone(_tier: Path) -> None:
    pass


@pytest.mark.parametrize("what", [damaged, gone])
def test_a_state_that_cannot_be_read_is_not_an_empty_one(
    tmp_path: Path, what: Callable[[Path], None]
) -> None:
    what(tmp_path)
    assert fallthrough.count_kept(tmp_path) == UNKNOWN
    assert fallthrough.count_kept(None) == UNKNOWN


def test_the_log_of_a_dead_worker_is_counted_without_a_file_beside_it(tmp_path: Path) -> None:
    """On a full tmpfs there is no room for SQLite's shared index; what the last steps wrote is in
    the write-ahead log only.
    """
    state = StateDatabase(tmp_path / "state.sqlite", REAL)
    state.commit()
    assert fallthrough.count_kept(tmp_path) == (0, 0), "its maker died before there was a log"
    log = OperationLog(state, REAL.clock)
    log.append(OpKind.STORE, Ino(5), version=log.new_version(Ino(5), TierId(7), 1000))
    log.append(OpKind.MKDIR, Ino(6))
    state.commit()
    before = sorted(tmp_path.iterdir())
    assert fallthrough.count_kept(tmp_path) == (2, 1000)
    assert sorted(tmp_path.iterdir()) == before
    state.close()


@pytest.mark.parametrize("what", [damaged, gone])
def test_a_bare_directory_is_refused_where_the_tier_cannot_be_read(
    tmp_path: Path, what: Callable[[Path], None]
) -> None:
    backing = tmp_path / "backing"
    tier = tmp_path / "tiers" / "volume-node"
    backing.mkdir()
    tier.mkdir(parents=True)
    what(tier)
    (tier / "meta.json").write_text(
        json.dumps({"volume_id": "volume", "node_id": "node", "backing": str(backing)})
    )
    with pytest.raises(RefusedError, match="is not the directory"):
        checks.check_not_bare(backing, tmp_path / "tiers")


def test_status_of_a_bypassed_mount_says_that_it_is_not_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beneath = fallthrough.BypassedMount(
        "/m", "/b", 1, since=1.0, reason="a test", kept_operations=None, kept_bytes=None
    )
    monkeypatch.setattr(fallthrough, "bypassed", lambda: [(Path("/run"), beneath)])

    class Target:
        mountpoint = None

    status.tell_bypassed(Target(), NotMountedError("gone"), as_json=False)  # type: ignore[arg-type]
    assert "cannot be read" in (said := capsys.readouterr().out)
    assert "operations" not in said
    status.tell_bypassed(Target(), NotMountedError("gone"), as_json=True)  # type: ignore[arg-type]
    told = json.loads(capsys.readouterr().out)
    assert (told["kept_operations"], told["kept_bytes"]) == UNKNOWN
