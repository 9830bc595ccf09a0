"""What a job calls that saves while it dies: on real mounts, on a bypassed one, and on a path in no
mount at all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from acpfs import client
from acpfs.client import Durability
from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from acpfs.errors import AcpfsError, DeadlineError, NotMountedError
from tests.rig.mounts import REPOSITORY, AcpfsMount, MakeMount

clause = pytest.mark.clause
pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
BOTH = pytest.mark.transports("libfuse", "native")


@pytest.fixture
def mount(
    transport: str, tmp_path: Path, make_mount: MakeMount, monkeypatch: pytest.MonkeyPatch
) -> AcpfsMount:
    (tmp_path / "backing").mkdir()
    made = make_mount(tmp_path / "backing", transport, bandwidth=1, reserve="25%", node_id="node0")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(made.runtime_dir))
    return made


def needs_of(path: Path) -> bytes:
    return os.getxattr(path, "user.acpfs.needs")


@clause("S280", "S284", "S285")
@BOTH
def test_a_gasp_from_declaration_to_storage(mount: AcpfsMount) -> None:
    gasp = mount.path / "gasp"
    gasp.mkdir()
    client.declare_urgent(gasp, seconds=600)
    (gasp / "state").write_bytes(os.urandom(1 << 20))
    tracker = gasp / "latest.tmp"
    tracker.write_text("state", encoding="ascii")
    assert client.node_id(tracker) == "node0"
    client.set_needs(tracker, [client.node_id(gasp), "node7"])
    assert needs_of(tracker) == b"node0,node7"
    client.set_needs(tracker, ["node0"])
    tracker.rename(gasp / "latest")
    assert client.durability(gasp) is Durability.RAM
    with pytest.raises(DeadlineError):
        client.wait_persisted(gasp, timeout_s=0.05)
    mount.ask("set", key="bandwidth", value="0")
    client.wait_persisted(gasp, timeout_s=60)
    assert client.durability(gasp) is Durability.PERSISTED
    assert client.withdraw_urgent(gasp)
    with pytest.raises(AcpfsError, match="Invalid argument"):
        client.set_needs(gasp / "latest", ["no/node"])
    with pytest.raises(AcpfsError):
        client.durability(gasp / "nothing")


@clause("S285")
def test_outside_of_a_mount_nothing_is_done_and_it_is_said(
    mount: AcpfsMount, tmp_path: Path
) -> None:
    mount.ask("set", key="bandwidth", value="0")
    plain = tmp_path / "plain"
    plain.mkdir()
    for call in (
        client.declare_urgent,
        client.withdraw_urgent,
        client.node_id,
        lambda path: client.set_needs(path, ["node0"]),
    ):
        with pytest.raises(NotMountedError):
            call(plain)
    assert os.listxattr(plain) == []
    assert client.durability(plain) is Durability.NATIVE


@clause("S285", "S70")
@pytest.mark.transports("native")
def test_on_a_bypassed_mount_nothing_is_left_on_the_storage(mount: AcpfsMount) -> None:
    mount.ask("set", key="bandwidth", value="0")
    (mount.path / "latest").write_text("x", encoding="ascii")
    mount.flush()
    mount.ask("set", key="bandwidth", value="1")
    (mount.path / "rest").write_bytes(
        os.urandom(1 << 16)
    )  # a bypassed daemon that has nothing left to drain ends
    mount.ask("bypass", reason="test")
    with pytest.raises(NotMountedError, match="is native now"):
        client.set_needs(mount.path / "latest", ["node0"])
    assert "user.acpfs.needs" not in os.listxattr(mount.backing / "latest")
    supervisor = mount.supervisor
    mount.ask("set", key="bandwidth", value="0")
    mount.wait_ended(supervisor)


def test_it_takes_neither_torch_nor_the_file_system(tmp_path: Path) -> None:
    code = (
        "import acpfs.client, sys; print([name for name in sys.modules if name in ('torch', "
        "'trio', 'pyfuse3', 'acpfs.filesystem')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.stdout == "[]\n"
