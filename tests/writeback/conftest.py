"""Fixtures of the write-back tests."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.writeback.world import World

Run = Callable[..., None]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def run() -> Run:
    """Run a coroutine function on trio with virtual time: sleeps cost nothing, calls run inline."""

    def run(function: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        trio.run(function, *arguments, clock=MockClock(autojump_threshold=0))

    return run
