"""Fixtures of the file system's tests."""

from __future__ import annotations

import pytest

from acpfs.filesystem import hold


@pytest.fixture(autouse=True)
def _no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a machine stands still, time passes between two steps, and held writers are let in;
    some tests are about that.
    """
    monkeypatch.setattr(hold, "SLICE_S", 600.0)
    monkeypatch.setattr(
        hold, "ASK_AGAIN_S", 60.0
    )  # no more: a lock that was lost counts as asked for at boot
