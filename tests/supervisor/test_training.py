"""What a training process calls, against a real mount."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from acpfs import training
from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from acpfs.errors import AcpfsError, ExitCode, NotMountedError
from tests.rig.mounts import AcpfsMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("libfuse", "native"),
    pytest.mark.skipif(os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"),
]


@pytest.fixture
def mount(transport: str, tmp_path: Path, make_mount: Callable[..., AcpfsMount], monkeypatch: pytest.MonkeyPatch) -> AcpfsMount:
    (tmp_path / "backing").mkdir()
    made = make_mount(tmp_path / "backing", transport, bandwidth="1M")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(made.runtime_dir))
    return made


def test_wait_until_a_checkpoint_is_safe(mount: AcpfsMount):
    content = os.urandom(1 << 20)
    (mount.path / "model.pt").write_bytes(content)
    with pytest.raises(AcpfsError) as caught:
        training.wait_persisted(mount.path / "model.pt", timeout_s=0.05)
    assert caught.value.exit_code == ExitCode.TIMEOUT
    training.wait_persisted(mount.path / "model.pt", timeout_s=60)
    assert (mount.backing / "model.pt").read_bytes() == content
    training.wait_verified(mount.path / "model.pt", timeout_s=60)
    training.flush(mount.path)
    assert training.status(mount.path)["queue_length"] == 0
    assert training.status()["mount"] == str(mount.path)


def test_a_path_elsewhere_is_not_ours_to_judge(mount: AcpfsMount, tmp_path: Path):
    with pytest.raises(NotMountedError):
        training.wait_persisted(tmp_path / "elsewhere")


def test_a_training_process_imports_nothing_heavy():
    code = (
        "import sys, acpfs.training; print([m for m in ('trio', 'pyfuse3', 'pydantic', 'click', 'rich', 'structlog') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True).stdout.strip() == "[]"
