"""What a rank has left is read by the form in which it was left, and by no other."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from acpfs.training.memory_left import Left, leave
from acpfs.training.torch import left_state as module


@pytest.fixture
def name() -> Iterator[str]:
    made = f"acpfs-test-{secrets.token_hex(8)}"
    yield made
    if (left := Left.ask(made)) is not None:
        left.taken()


@pytest.mark.clause("S526")
@pytest.mark.parametrize("step", [-1, 1], ids=["older", "newer"])
def test_another_version_is_not_taken_and_stays(
    name: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    pid = leave(name, module._VERSION.pack(module.LEFT_VERSION + step) + b"no pickle", [])
    assert module.left_state(name) is None
    assert "is of another acpfs" in caplog.text
    left = Left.ask(name)
    assert left is not None
    assert left.head.endswith(b"no pickle"), "an acpfs that knows it may still come"
    left.taken()
    os.waitpid(pid, 0)
