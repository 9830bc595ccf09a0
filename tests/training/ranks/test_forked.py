"""What a rank leaves behind does not outlive it: a framework's helpers would keep its memory, and
there are hundreds of tests.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from tests.training.gasp_job import until
from tests.training.ranks.forked import Ranks


def _with_a_helper(directory: Path) -> None:
    helper = os.fork()
    if helper == 0:
        signal.pause()
    (directory / "made").write_text(str(helper))
    (directory / "made").rename(directory / "helper")
    signal.pause()


@pytest.mark.parametrize("asked", [True, False])
def test_a_helper_of_a_rank_that_is_killed_ends_with_it(tmp_path: Path, asked: bool) -> None:
    with Ranks(1, tmp_path, lambda _: _with_a_helper(tmp_path)) as ranks:
        until((tmp_path / "helper").exists, ranks.said)
        helper = os.pidfd_open(int((tmp_path / "helper").read_text()))
        if asked:
            ranks.kill(0)
            assert ranks.status(0) == -signal.SIGKILL
    waiting = select.poll()
    waiting.register(helper, select.POLLIN)
    assert waiting.poll(60_000)
    os.close(helper)
