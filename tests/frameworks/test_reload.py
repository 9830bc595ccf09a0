"""New code takes a mount over while torch.save runs on it; the libfuse transport refuses that, and
the saves go on.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frameworks.conftest import WORKLOADS
from tests.rig.mounts import AcpfsMount, CommandError

RELOADS = 3


@pytest.fixture(params=["native", "libfuse"])
def mount(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AcpfsMount]:
    (tmp_path / "backing").mkdir()
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", request.param, watchdog_s=90.0) as made:
        yield made


@pytest.mark.clause("S81")
@pytest.mark.mount
def test_reload_while_torch_saves(mount: AcpfsMount, torch_python: str) -> None:
    command = [torch_python, str(WORKLOADS / "torch_save_loop.py"), str(mount.path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as loop:
        assert loop.stdout is not None
        for _ in range(RELOADS):
            assert loop.stdout.readline()
            if mount.transport == "native":
                assert mount.ctl("reload")["last_end"] == "reload"
            else:
                with pytest.raises(CommandError, match="reload needs the native transport"):
                    mount.ctl("reload")
        printed, _ = loop.communicate("end\n", timeout=60)
    assert loop.returncode == 0
    last = printed.split()[-1]
    assert mount.status()["worker"]["number"] == (1 + RELOADS if mount.transport == "native" else 1)
    mount.flush()
    shown = {p.name: p.read_bytes() for p in mount.path.iterdir()}
    assert {name: (mount.backing / name).read_bytes() for name in shown} == shown
    assert shown["latest"] == last.encode()
