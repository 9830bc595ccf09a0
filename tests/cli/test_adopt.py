"""`acpfs-ctl adopt`, beside another one."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from acpfs.cli.verbs import adopt
from acpfs.control.registry import adopting_lock
from acpfs.errors import RefusedError
from acpfs.runtime.file_locks import locked

clause = pytest.mark.clause


@clause("S615")
def test_one_command_at_a_time_adopts_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would mount one log at the same place."""
    lock = adopting_lock(tmp_path, "../n1")
    assert lock.parent == tmp_path / "adopting"
    began = threading.Event()
    happened: list[str] = []

    def ask(*_words: object, **_more: object) -> object:
        with locked(lock, may_wait=False) as is_had:
            happened.append("asks, beside others" if is_had else "asks alone")
        raise RefusedError("nothing is held")

    def waits(file: Path, *, may_wait: bool) -> AbstractContextManager[bool]:
        began.set()
        return locked(file, may_wait=may_wait)

    monkeypatch.setattr(adopt, "ask", ask)
    monkeypatch.setattr(adopt, "locked", waits)
    target = SimpleNamespace(record=lambda: SimpleNamespace(runtime_dir=str(tmp_path)))
    second = threading.Thread(
        target=lambda: CliRunner().invoke(adopt.command, ["../n1", "--is-off"], obj=target),
        daemon=True,
    )
    with locked(lock, may_wait=False) as is_first:
        assert is_first
        second.start()
        assert began.wait(60)
        happened.append("the first one ends")
    second.join(60)
    assert happened == ["the first one ends", "asks alone"]
