"""What the holder of a copy has to know before an operation is carried out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from acpfs.writeback.log.ops import OpKind
from acpfs.writeback.sources.mirror import HOLDER_PATIENCE, Mirror
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S612")


def mirror() -> Mirror:
    """That knows all that was logged."""
    parts: Any = SimpleNamespace(last_seq=0, changed=lambda _op: 0)
    return Mirror(parts, parts, parts, parts, "n1", REAL, HOLDER_PATIENCE)


@pytest.mark.parametrize("kind", OpKind)
def test_all_but_the_storing_of_a_file_is_told_before_it_is_begun(kind: OpKind) -> None:
    """Also those that a disk's journal lets be repeated in a row."""
    op: Any = SimpleNamespace(kind=kind, ino=5, touches=lambda: [(1, b"name")])
    assert mirror()._must_know(op) is (kind is not OpKind.STORE)
