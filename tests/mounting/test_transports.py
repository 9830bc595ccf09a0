"""Which transport `auto` is, on machines laid out in a directory, and what happens when it was the
wrong choice.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.config import Settings, Transport
from acpfs.errors import ExitCode, MachineError
from acpfs.filesystem.lanes import Lanes
from acpfs.filesystem.records import Lane
from acpfs.mounting.checks import check_fuse
from acpfs.mounting.transports import MachineSupport, TransportChoice, choose
from acpfs.worker.serving import serve
from tests.rig.runtime import REAL

ROOT = "000001ffffffffff"
NOBODY = "0000000000000000"
CONTAINER = "00000000a80425fb"


@pytest.fixture
def machine(tmp_path: Path) -> MachineSupport:
    """Root's, with everything."""
    (tmp_path / "status").write_text(f"Name:\tacpfs\nCapEff:\t{ROOT}\n")
    (tmp_path / "fuse").touch()
    return MachineSupport(
        "6.18.1-cloud",
        tmp_path / "fuse",
        tmp_path / "status",
        is_root=True,
        helper="/bin/fusermount3",
    )


def test_what_was_asked_for_is_taken(machine: MachineSupport) -> None:
    old = dataclasses.replace(machine, release="4.18.0")
    assert choose(Transport.LIBFUSE, machine) == TransportChoice(Transport.LIBFUSE, "asked for")
    assert choose(Transport.NATIVE, old) == TransportChoice(Transport.NATIVE, "asked for")


def test_native_where_it_can_mount(machine: MachineSupport) -> None:
    chosen = choose(Transport.AUTO, machine)
    assert (chosen.transport, chosen.forced) == (Transport.NATIVE, False)


@pytest.mark.clause("S460")
def test_locks_are_not_refused_by_a_transport_that_cannot(machine: MachineSupport) -> None:
    """Nor does another transport take its place later."""
    assert choose(Transport.AUTO, machine, "locks = refuse").forced
    old = dataclasses.replace(machine, release="4.18.0")
    with pytest.raises(MachineError, match=r"locks = refuse .* 4\.18\.0"):
        choose(Transport.AUTO, old, "locks = refuse")


def test_native_for_users_who_have_the_helper(machine: MachineSupport) -> None:
    machine.status.write_text(f"CapEff:\t{NOBODY}\n")
    user = dataclasses.replace(machine, is_root=False)
    assert "without passthrough" in choose(Transport.AUTO, user).reason
    assert (
        choose(Transport.AUTO, dataclasses.replace(user, helper=None)).transport
        is Transport.LIBFUSE
    )


def test_libfuse_for_root_that_may_not_mount(machine: MachineSupport) -> None:
    machine.status.write_text(f"CapEff:\t{CONTAINER}\n")
    chosen = choose(Transport.AUTO, machine)
    assert chosen.transport is Transport.LIBFUSE
    assert "CAP_SYS_ADMIN" in chosen.reason


@pytest.mark.parametrize("release", ["4.18.0-553.el8", "5.3.0", "unheard-of"])
def test_libfuse_on_old_kernels(machine: MachineSupport, release: str) -> None:
    chosen = choose(Transport.AUTO, dataclasses.replace(machine, release=release))
    assert (chosen.transport, release in chosen.reason) == (Transport.LIBFUSE, True)


def test_libfuse_without_the_device(machine: MachineSupport) -> None:
    machine.device.unlink()
    assert str(machine.device) in choose(Transport.AUTO, machine).reason


@pytest.mark.clause("S524")
def test_libfuse_is_not_recommended_where_it_would_not_help(machine: MachineSupport) -> None:
    machine.device.unlink()
    neither = dataclasses.replace(machine, libfuse=False)
    with pytest.raises(MachineError, match=r"no transport is possible here: .* may not be opened"):
        choose(Transport.AUTO, neither)


@pytest.mark.clause("S524")
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errno.EACCES, "Permission denied; root can let users mount: chmod 0666 /dev/fuse"),
        (errno.EPERM, "Operation not permitted; give the container the device"),
        (errno.ENOENT, "no /dev/fuse: load the kernel's fuse module"),
    ],
)
def test_who_may_not_open_the_device_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: int, said: str
) -> None:
    def refuse(*_words: object) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MachineError, match=said) as refused:
        check_fuse()
    monkeypatch.undo()
    assert refused.value.exit_code is ExitCode.ENVIRONMENT


def test_without_the_package_of_libfuse(machine: MachineSupport) -> None:
    """Native where it can mount; else one line that says what to install."""
    bare = dataclasses.replace(machine, libfuse=False)
    assert choose(Transport.AUTO, bare).transport is Transport.NATIVE
    with pytest.raises(MachineError, match=r"pip install 'acpfs\[libfuse\]'"):
        choose(Transport.LIBFUSE, bare)
    with pytest.raises(MachineError, match=r"older than 5\.4.*pip install"):
        choose(Transport.AUTO, dataclasses.replace(bare, release="4.18.0"))


# -- when the session cannot be made


class FileSystemDouble:
    """As much of the file system as choosing needs."""

    def __init__(self) -> None:
        self.lanes = Lanes(REAL.clock)
        self.offer_lanes = self.lanes.offer
        self.lanes.offer(Lane.DIRECT, passthrough=True)


class Transports:
    """Doubles of both; native fails, before or after it said ready."""

    def __init__(self, *, ready_first: bool = False) -> None:
        self.ready_first = ready_first
        self.used: list[Transport] = []

    def load(self, transport: Transport) -> Any:
        async def run(_fs: Any, _settings: Settings, ready: Callable[[], None]) -> None:
            self.used.append(transport)
            if transport is Transport.LIBFUSE or self.ready_first:
                ready()
            if transport is Transport.NATIVE:
                raise MachineError("no session")

        def serve_double(fs: Any, settings: Settings, ready: Callable[[], None]) -> Awaitable[None]:
            return run(fs, settings, ready)

        return serve_double


def run(transports: Transports, choice: TransportChoice) -> tuple[Any, list[TransportChoice]]:
    fs: Any = FileSystemDouble()
    told: list[TransportChoice] = []

    async def main() -> None:
        await serve(
            choice,
            fs,
            Settings(backing=Path("/b"), mountpoint=Path("/m")),
            told.append,
            transports.load,
        )

    trio.run(main)
    return fs, told


def test_auto_falls_back_to_libfuse_and_says_why() -> None:
    transports = Transports()
    fs, told = run(transports, TransportChoice(Transport.NATIVE, "the fastest", forced=False))
    assert transports.used == [Transport.NATIVE, Transport.LIBFUSE]
    assert (told[0].transport, told[0].reason) == (
        Transport.LIBFUSE,
        "the native transport failed: no session",
    )
    assert fs.lanes.offered() == ["libfuse"]


@pytest.mark.parametrize(
    ("forced", "ready_first"),
    [(True, False), (False, True)],
    ids=["asked for", "after it was mounted"],
)
def test_no_other_transport(forced: bool, ready_first: bool) -> None:
    transports = Transports(ready_first=ready_first)
    with pytest.raises(MachineError, match="no session"):
        run(transports, TransportChoice(Transport.NATIVE, "x", forced=forced))
    assert transports.used == [Transport.NATIVE]
