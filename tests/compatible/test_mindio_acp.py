"""`mindio_acp`: its names, files that are whole or not there, return codes, and the mount below
it.
"""

from __future__ import annotations

import errno
import os
import queue
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from acpfs.cli.main import command
from acpfs.compatible.places import SITE
from acpfs.compatible.refusal import UnsupportedError
from tests.compatible import product_names
from tests.compatible.conftest import signature
from tests.rig.mounts import AcpfsMount, MakeMount

clause = pytest.mark.clause
Product = Callable[[str], ModuleType]
RESULT_S = 240


@clause("T95")
def test_the_packages_are_on_a_path_and_not_installed(tmp_path: Path) -> None:
    shown = CliRunner().invoke(command, ["mindio-path"])
    assert shown.exit_code == 0, shown.output
    assert Path(shown.output.strip()) == SITE
    program = (
        "import mindio_acp, acpfs, sys; print(acpfs.__file__, mindio_acp.__file__, [p for p in "
        "sys.path if 'site-packages' in p])"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SITE)}
    # -S: an interpreter in which acpfs is not installed
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == [
        str(SITE.parents[1] / "__init__.py"),
        str(SITE / "mindio_acp" / "__init__.py"),
    ]
    done = subprocess.run(
        [sys.executable, "-I", "-c", "import mindio_acp"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'mindio_acp'" in done.stderr


@clause("T96")
def test_names_and_signatures_are_the_products(product: Product, tmp_path: Path) -> None:
    acp = product("mindio_acp")
    assert {name: signature(getattr(acp, name)) for name in product_names.ACP} == product_names.ACP
    (tmp_path / "there").touch()
    for maker, methods in product_names.ACP_FILES.items():
        with getattr(acp, maker)(str(tmp_path / "there")) as file:
            assert {name: signature(getattr(file, name)) for name in methods} == methods
    helper = acp.CheckpointHelper(3)
    assert helper is acp.CheckpointHelper(3)
    assert helper is not acp.CheckpointHelper(4)
    assert (
        product("mindio_acp.acc_checkpoint.framework_acp").CheckpointHelper is acp.CheckpointHelper
    )
    assert {
        name: signature(getattr(helper, name)) for name in product_names.CHECKPOINT_HELPER
    } == product_names.CHECKPOINT_HELPER
    assert set(acp.__all__) == {*product_names.ACP, "CheckpointHelper"}


@clause("T97")
def test_a_file_has_its_name_when_it_is_closed(product: Product, tmp_path: Path) -> None:
    acp = product("mindio_acp")
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"before")
    file = acp.create_file(str(path))
    assert file.write(b"first") == 5
    assert path.read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 2
    file.write(b" second")
    file.close()
    file.close()
    assert path.read_bytes() == b"first second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


@clause("T97")
def test_an_exception_leaves_what_was_there(product: Product, tmp_path: Path) -> None:
    acp = product("mindio_acp")
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"before")
    with pytest.raises(TypeError), acp.create_file(str(path)) as file:
        file.write("half")
    dropped = acp.create_file(str(path))
    dropped.write(b"half")
    dropped.drop()
    forgotten = acp.create_file(str(path))
    forgotten.write(b"half")
    del forgotten
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        acp.create_file(str(tmp_path / "nowhere" / "a.ckpt"))


@clause("T97")
def test_a_file_on_a_full_disk_does_not_get_its_name(product: Product, tmp_path: Path) -> None:
    acp = product("mindio_acp")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], check=True)
    try:
        (small / "a").write_bytes(b"before")
        with pytest.raises(OSError) as caught, acp.create_file(str(small / "a")) as file:
            file.write(os.urandom(1 << 20))
        assert caught.value.errno == errno.ENOSPC
        assert [path.name for path in small.iterdir()] == ["a"]
        assert (small / "a").read_bytes() == b"before"
    finally:
        subprocess.run(["umount", str(small)], check=True)


@clause("T97")
def test_reading_at_places(product: Product, tmp_path: Path) -> None:
    acp = product("mindio_acp")
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    with acp.open_file(str(path)) as file:
        assert (file.read(), file.read(3), file.read(3, 4), file.read(10, 0)) == (
            b"0123456789",
            b"3456789",
            b"3456",
            b"",
        )
        for offset, count in ((-1, 2), (8, 3), (11, -1), (0, -2)):
            with pytest.raises(ValueError, match="of a file of 10"):
                file.read(offset, count)


@clause("T98")
def test_return_codes_where_nothing_is_mounted(
    product: Product, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACPFS_RUNTIME_DIR", str(tmp_path / "none"))
    acp = product("mindio_acp")
    assert (acp.initialize(), acp.flush(), acp.preload(str(tmp_path)), acp.preload()) == (
        -1,
        1,
        1,
        1,
    )
    assert acp.register_checker(print, {str(tmp_path): 1}, None, 10) is None
    with pytest.raises(UnsupportedError, match="save_model_checkpoint copies by itself"):
        acp.CheckpointHelper(0).get_checkpoint_copy_stream()
    with pytest.raises(UnsupportedError, match="leave process_group out"):
        acp.CheckpointHelper(0).load_model_checkpoint("a", 0, object())


@clause("T98", "T99")
def test_the_mount_below(
    product: Product, make_mount: MakeMount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", "libfuse", ram="64M")
    monkeypatch.setenv("ACPFS_RUNTIME_DIR", str(mount.runtime_dir))
    acp = product("mindio_acp")
    _start_values(acp)
    directory = mount.path / "run" / "iter_0000007"
    directory.mkdir(parents=True)
    for name in ("a", "b"):
        with acp.create_file(str(directory / name)) as file:
            file.write(name.encode() * 100_000)
    told: queue.Queue[tuple[int, object]] = queue.Queue()

    def tell(result: int, context: object) -> None:
        told.put((result, context))

    assert acp.register_checker(tell, {str(directory): 2}, "seven", 60) == 1
    assert told.get(timeout=RESULT_S) == (0, "seven")
    assert (tmp_path / "backing" / "run" / "iter_0000007" / "b").read_bytes() == b"b" * 100_000
    assert acp.register_checker(tell, {str(directory): 1}, 0, 60) == 1
    assert told.get(timeout=RESULT_S) == (-errno.EFBIG, 0)
    assert acp.register_checker(tell, {str(directory): 3}, 0, 1) == 1
    assert told.get(timeout=RESULT_S) == (-errno.ETIMEDOUT, 0)
    for wrong in (
        (None, {str(directory): 1}, 0, 9),
        (tell, {}, 0, 9),
        (tell, {str(directory): 1}, 0, 3601),
        (tell, {"/": 1}, 0, 9),
    ):
        assert acp.register_checker(*wrong) is None
    _tracker(acp, mount, directory, tell, told)
    assert acp.flush() == 0
    assert (tmp_path / "backing" / "run" / "tracker").read_text() == "7"
    mount.ask("evict", paths=["run"])
    assert acp.preload(str(directory / "a"), [str(directory / "b")]) == 0
    assert acp.preload(str(directory / "c")) == 1


def _start_values(acp: ModuleType) -> None:
    assert acp.initialize() == 0
    assert acp.initialize(server_info={"memfs.data_block_pool_capacity_in_gb": "100"}) == 0
    for wrong in (
        {"memfs.unknown": "1"},
        {"memfs.data_block_pool_capacity_in_gb": "0"},
        {"memfs.write.parallel.enabled": "yes"},
    ):
        assert acp.initialize(server_info=wrong) == -1


def _tracker(
    acp: ModuleType,
    mount: AcpfsMount,
    directory: Path,
    tell: Callable[..., Any],
    told: queue.Queue[tuple[int, object]],
) -> None:
    """The tracker comes when all files are persisted."""
    helper = acp.CheckpointHelper(0)
    tracker = mount.path / "run" / "tracker"
    (mount.path / "run" / "older").write_bytes(b"a checkpoint")
    tracker.symlink_to("older")
    helper.async_write_tracker_file(7, str(directory), 2, str(tracker), tell)
    assert told.get(timeout=RESULT_S) == (7, 0)
    assert tracker.read_text() == "7"
    assert (mount.path / "run" / "older").read_bytes() == b"a checkpoint", "not through a link"
    with pytest.raises(ValueError, match="not a directory"):
        helper.async_write_tracker_file(7, str(directory / "none"), 2, "tracker")
    with pytest.raises(ValueError, match="1024"):
        helper.async_write_tracker_file(7, "d" * 1025, 2, "tracker")
