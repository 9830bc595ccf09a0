"""Where the workloads run: on a fresh mount (default), or on a plain directory (ACPFS_PLACE=plain)
to try the workloads themselves.

After each workload `settle` drains and compares: `diff -r` of mount and backing directory is empty,
every file there is in the manifest, and the stock `xxh128sum -c` agrees with it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount

WORKLOADS = Path(__file__).parent / "workloads"
WORKLOAD_TIMEOUT_S = 600
DRAIN_TIMEOUT_S = 240
NODE = "test-node"


class Place:
    """A directory to work in, and how to check what arrived in the backing directory."""

    def __init__(self, base: Path, transport: str, faults: FaultFs | None = None) -> None:
        self.faults = faults
        self._transport = transport
        self.backing = (faults.path if faults else base) / "backing"
        self.backing.mkdir()
        self._mount: AcpfsMount | None = None
        self._mountpoint = base / "mount"

    @property
    def directory(self) -> Path:
        """Where to work."""
        return self._mount.path if self._mount else self.backing

    @property
    def runtime_dir(self) -> Path:
        """Where the mount's daemon is found; nowhere on a plain directory."""
        return self._mount.runtime_dir if self._mount else self.backing.with_name("none")

    @property
    def time_granularity_ns(self) -> int:
        """How finely the backing file system keeps times."""
        return int(self._mount.status()["features"]["time_granularity_ns"]) if self._mount else 1

    def mount(self) -> None:
        """Begin; does nothing on a plain directory."""
        if os.environ.get("ACPFS_PLACE") != "plain":
            self._mount = AcpfsMount(
                self.backing, self._mountpoint, self._transport, ram="2G", node_id=NODE
            )
            self._mount.start()

    def unmount(self) -> None:
        """End; drains."""
        if self._mount:
            mount = self._mount
            self._mount = None
            try:
                mount.umount()
            finally:
                mount.abort()

    def remount(self) -> None:
        """Begin again with an empty upper layer: what is read from here on comes from the backing
        directory.
        """
        self.unmount()
        self.mount()

    def settle(self) -> None:
        """Drain, then compare mount, backing directory and manifest."""
        if self._mount is None:
            return
        self._mount.flush(timeout_s=DRAIN_TIMEOUT_S)
        self._mount.ask("release")  # what the guard holds is to stay longer, and is no difference
        self._mount.flush(timeout_s=DRAIN_TIMEOUT_S)
        run(
            [
                "diff",
                "-r",
                "--no-dereference",
                "--exclude=.acpfs",
                str(self.directory),
                str(self.backing),
            ]
        )
        manifest = Path(".acpfs", "manifest", f"{NODE}.xxh128")
        listed = {
            line.split(None, 1)[1] for line in (self.backing / manifest).read_text().splitlines()
        }
        assert listed == {
            name
            for p in files(self.backing)
            if "\n" not in (name := str(p.relative_to(self.backing)))
        }  # S26
        run(["xxh128sum", "--quiet", "-c", str(manifest)], cwd=self.backing)


def files(backing: Path) -> list[Path]:
    """All regular files, without acpfs's own."""
    return [
        p
        for p in backing.rglob("*")
        if p.is_file() and not p.is_symlink() and p.relative_to(backing).parts[0] != ".acpfs"
    ]


def run(command: list[str], cwd: Path | None = None, timeout_s: float = WORKLOAD_TIMEOUT_S) -> str:
    """Run a program to its end; a failure shows what it said."""
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        command,
        cwd=cwd,
        timeout=timeout_s,
        capture_output=True,
        text=True,
        env={**os.environ, **quiet},
        check=False,
    )
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def workload(python: str, name: str, *arguments: str | Path) -> None:
    """Run one of the programs in `workloads`."""
    run([python, str(WORKLOADS / f"{name}.py"), *map(str, arguments)])


def interpreter(variable: str, module: str) -> str:
    """The interpreter that an environment variable names, else this one if it has the module; else
    the test is skipped.
    """
    if variable in os.environ:
        return os.environ[variable]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{variable} names no interpreter that has {module}; tools/test sets it")
    return sys.executable


@pytest.fixture(scope="session")
def torch_python() -> str:
    return interpreter("ACPFS_TORCH_PYTHON", "torch")


@pytest.fixture(scope="session")
def mindspore_python() -> str:
    return interpreter("ACPFS_MINDSPORE_PYTHON", "mindspore")


@pytest.fixture
def place(tmp_path: Path, transport: str) -> Iterator[Place]:
    """A mount over a directory on this machine's disk."""
    place = Place(tmp_path, transport)
    try:
        place.mount()
        yield place
    finally:
        place.unmount()
        clear(tmp_path)


@pytest.fixture
def faulty_place(tmp_path: Path, transport: str) -> Iterator[Place]:
    """A mount over a backing directory that can be frozen."""
    with FaultFs(tmp_path / "source", tmp_path / "faulty") as faults:
        place = Place(tmp_path, transport, faults)
        try:
            place.mount()
            yield place
        finally:
            faults.clear()
            place.unmount()
    clear(tmp_path)


def clear(base: Path) -> None:
    """Give the room back; what `--backing` has bound over a directory stays there, empty."""
    shutil.rmtree(base, ignore_errors=AcpfsMount.lay_backing is not None)
