"""Members that read from each other. Real mounts over one directory, each with an exchange process
of its own; in networks of their own where that is the subject.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from acpfs.exchange.exchange_records import EXCHANGE_VERSION
from acpfs.exchange.sealed_stream import can_seal
from tests.cluster.stand import QUICK
from tests.exchange.giving_member import needs_sealing
from tests.rig.mounts import AcpfsMount
from tests.rig.processes import stop_processes
from tests.rig.storage.servers import until
from tests.supervisor.test_handover import copy_package
from tests.training.ranks.networks import Networks

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
MIB = 1 << 20
PATIENCE_S = "30"
"""Where everybody answers, nobody is too late, however busy the machine is."""
SHORT_S = "0.5"


def member(
    tmp_path: Path,
    name: str,
    *,
    at: str = "127.0.0.1",
    patience_s: str = PATIENCE_S,
    python: str = sys.executable,
    **options: Any,
) -> AcpfsMount:
    """One of those over `tmp_path/backing`."""
    backing = tmp_path / "backing"
    backing.mkdir(exist_ok=True)
    settings: dict[str, Any] = {
        **QUICK,
        "ram": "128M",
        "exchange": at,
        "exchange_patience": patience_s,
        "node_id": name,
        **options,
    }
    return AcpfsMount(
        backing,
        tmp_path / name,
        "native",
        python=python,
        **settings,
    )


@contextmanager
def mounted(*members: AcpfsMount) -> Iterator[tuple[AcpfsMount, ...]]:
    """All of them, once they know each other and can be asked."""
    with ExitStack() as stack:
        for one in members:
            stack.enter_context(one)
        for one in members:
            know_each_other(one, len(members) - 1)
        yield members


def know_each_other(mount: AcpfsMount, others: int) -> None:
    mount.wait_status(
        lambda status: status["cluster"]["live"] >= others and status["exchange"]["process"]
    )


def save(mount: AcpfsMount, name: str, data: bytes) -> None:
    """Write a file; it is persisted, and nobody has it open any more."""
    (mount.path / name).write_bytes(data)
    mount.flush()
    mount.wait_status(lambda status: status["open_files"] == 0)


def counted(mount: AcpfsMount, name: str) -> int:
    return int(mount.status()["counters"][name])


def in_ram(mount: AcpfsMount, count: int = 1) -> None:
    """So many cold files have come to RAM."""
    mount.wait_status(lambda status: status["counters"]["warmed_files"] >= count)


@clause("S539", "S540", "S548")
@pytest.mark.parametrize("encrypts", [True, False])
def test_what_another_member_has_saved_comes_from_it(tmp_path: Path, encrypts: bool) -> None:
    options: dict[str, Any] = {} if encrypts else {"no_peer_encryption": True}
    data = os.urandom(20 * MIB + 77)
    members = [member(tmp_path, name, **options) for name in ("saves", "loads")]
    with mounted(*members) as (saves, loads):
        save(saves, "model", data)
        assert (loads.path / "model").read_bytes() == data
        in_ram(loads)
        status = loads.status()
        assert status["exchange"]["got_bytes"] == len(data)
        assert status["exchange"]["encrypted"] == encrypts
        assert status["counters"]["warmed_verified"] == 1
        assert saves.status()["exchange"]["given_bytes"] == len(data)
        rows = {row["node"]: row for row in loads.ctl("nodes")}
        assert rows["saves"]["got_bytes"] == len(data)
        rows = {row["node"]: row for row in saves.ctl("nodes")}
        assert rows["loads"]["given_bytes"] == len(data)
        way = "plain" if not encrypts else "sealed" if can_seal() else "tls"
        assert status["exchange"]["ways"] == {"saves": way}
        saves.wait_status(lambda status: status["exchange"]["ways"] == {"loads": way})
        text = loads.run("acpfs-ctl", str(loads.path), "status").stdout
        assert {"plain": "not encrypted", "sealed": ", sealed", "tls": ", in TLS"}[way] in text
        assert "members  20.0 MiB read from them" in text
        assert ("not encrypted" in text) != encrypts
        key = saves.runtime_dir / "exchange"
        found = [path.stat().st_mode & 0o777 for path in key.rglob("key.pem")]
        assert found == [0o600]


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An acpfs whose members speak another version."""
    root = tmp_path_factory.mktemp("later")
    copy_package(root)
    records = root / "acpfs/exchange/exchange_records.py"
    text = records.read_text()
    known = f"EXCHANGE_VERSION = {EXCHANGE_VERSION}\n"
    assert known in text
    records.write_text(text.replace(known, f"EXCHANGE_VERSION = {EXCHANGE_VERSION + 1}\n"))
    return root


@pytest.fixture(scope="module")
def without_sealing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An acpfs beside which the package cryptography is not installed."""
    root = tmp_path_factory.mktemp("without")
    copy_package(root)
    sealed = root / "acpfs/exchange/sealed_stream.py"
    text = sealed.read_text()
    known = "from cryptography."
    assert known in text
    sealed.write_text(text.replace(known, "from no_cryptography."))
    return root


@needs_sealing
@clause("S546", "S548")
@pytest.mark.parametrize("lacks_it", ["saves", "loads"])
def test_a_member_that_cannot_seal_is_spoken_to_in_tls(
    tmp_path: Path, without_sealing: Path, lacks_it: str
) -> None:
    data = os.urandom(2 * MIB)
    members = {name: member(tmp_path, name) for name in ("saves", "loads", "third")}
    members[lacks_it]._environment["PYTHONPATH"] = str(without_sealing)
    with mounted(*members.values()) as (saves, loads, third):
        # each reads a file of its own: what two have read may come from either
        for mount, name in ((loads, "model"), (third, "other")):
            save(saves, name, data)
            assert (mount.path / name).read_bytes() == data
            in_ram(mount)
            assert mount.status()["exchange"]["got_bytes"] == len(data)
        # a member is shown once its record has been read, which may be after it has asked
        status = saves.wait_status(lambda status: len(status["exchange"]["ways"]) == 2)
        ways = status["exchange"]["ways"]
        other = "tls" if lacks_it == "saves" else "sealed"
        assert ways == {"loads": "tls", "third": other}
        text = saves.run("acpfs-ctl", str(saves.path), "status").stdout
        assert (", sealed with 1, in TLS with 1" in text) == (lacks_it == "loads")


@clause("S526", "S563")
def test_members_of_two_versions_say_so_and_read_the_storage(tmp_path: Path, later: Path) -> None:
    """Both, whichever has asked: it was a time-out each time, and nobody said why."""
    data = os.urandom(2 * MIB)
    older = member(tmp_path, "older")
    newer = member(tmp_path, "newer")
    newer._environment["PYTHONPATH"] = str(later)
    with mounted(older, newer):
        save(older, "model", data)
        assert (newer.path / "model").read_bytes() == data
        in_ram(newer)
        for mount, node, version in ((older, "newer", 2), (newer, "older", 1)):
            status = mount.wait_status(lambda status: status["exchange"]["strange"])
            (why,) = status["exchange"]["strange"].values()
            knows = EXCHANGE_VERSION if version > EXCHANGE_VERSION else EXCHANGE_VERSION + 1
            assert why.startswith(f"what it speaks has version {version}, this acpfs knows {knows}")
            assert status["exchange"]["got_bytes"] == status["exchange"]["given_bytes"] == 0
            rows = {row["node"]: row for row in mount.ctl("nodes")}
            assert why in rows[node]["errors"]
            text = mount.run("acpfs-ctl", str(mount.path), "status").stdout
            assert f"{node}: what it speaks has version {version}" in text
            (log,) = (mount.runtime_dir / "logs").glob("*.log")
            said = [line for line in log.read_text().splitlines() if "speaks another" in line]
            assert len(said) == 1, "once"
            assert why in said[0]


@clause("S539")
def test_off_is_as_ever(tmp_path: Path) -> None:
    """Nothing listens, nothing is asked, and readers have the kernel's lane."""
    backing = tmp_path / "backing"
    backing.mkdir()
    data = os.urandom(4 * MIB)
    (backing / "model").write_bytes(data)
    quick: dict[str, Any] = dict(QUICK)
    with (
        AcpfsMount(backing, tmp_path / "a", "native", node_id="a", **quick) as one,
        AcpfsMount(backing, tmp_path / "b", "native", node_id="b", **quick) as other,
    ):
        assert (one.path / "model").read_bytes() == data
        assert (other.path / "model").read_bytes() == data
        for mount in (one, other):
            status = mount.status()
            assert status["exchange"] is None
            assert not any("members" in why for why in status["lane_choices"])
        assert not (one.runtime_dir / "exchange").exists()


@clause("S541")
def test_members_that_read_one_file_together_read_it_about_once(tmp_path: Path) -> None:
    data = os.urandom(41 * MIB + 5)
    members = [member(tmp_path, name) for name in ("a", "b", "c")]
    (tmp_path / "backing" / "model").write_bytes(data)
    with mounted(*members), ThreadPoolExecutor(3) as readers:
        found = list(readers.map(lambda one: (one.path / "model").read_bytes(), members))
        assert [one == data for one in found] == [True] * 3
        for one in members:
            in_ram(one)
        got = [counted(one, "exchange_got_bytes") for one in members]
        assert 3 * len(data) - sum(got) < 2.7 * len(data)
        assert sum(counted(one, "exchange_given_bytes") for one in members) >= sum(got)


@clause("S543")
def test_a_file_that_is_written_again_and_again_is_never_read_as_a_mixture(
    tmp_path: Path,
) -> None:
    """Each version is one number all over; whoever reads a page finds one that had been closed."""
    size = 6 * MIB
    with mounted(member(tmp_path, "saves"), member(tmp_path, "loads")) as (saves, loads):
        save(saves, "model", bytes([1]) * size)
        closed = [1]

        def saves_on() -> None:
            for number in range(2, 26):
                if number % 3:
                    temporary = saves.path / "model.tmp"
                    temporary.write_bytes(bytes([number]) * size)
                    closed.append(number)
                    temporary.rename(saves.path / "model")
                else:
                    closed.append(number)
                    (saves.path / "model").write_bytes(bytes([number]) * size)
                saves.flush()

        with ThreadPoolExecutor(1) as saving:
            done = saving.submit(saves_on)
            last = 1
            while not done.done():
                before = last
                with contextlib.suppress(FileNotFoundError), open(loads.path / "model", "rb") as it:
                    data = it.read()
                    pages = {
                        bytes(set(data[start : start + 4096]))
                        for start in range(0, len(data), 4096)
                    }
                    assert all(len(page) == 1 for page in pages)
                    numbers = sorted(page[0] for page in pages)
                    assert set(numbers) <= set(closed)
                    last = max(last, *numbers) if numbers else last
                    assert not numbers or numbers[-1] >= before
            done.result()
        # the name was looked for a moment ago, and may be answered from that (S169)
        until(
            lambda: (loads.path / "model").read_bytes() == bytes([25]) * size,
            "the last one is read",
        )


@clause("S543")
def test_a_change_on_the_storage_itself_is_seen(tmp_path: Path) -> None:
    """The member that has what was there before gives it for nothing else."""
    with mounted(member(tmp_path, "saves"), member(tmp_path, "loads")) as (saves, loads):
        save(saves, "model", b"before" * MIB)
        (tmp_path / "backing" / "model").write_bytes(b"behind" * MIB)
        assert (loads.path / "model").read_bytes() == b"behind" * MIB


@clause("S542")
def test_the_end_of_an_exchange_process_is_no_more_than_a_pause(tmp_path: Path) -> None:
    """Killed at both ends, in the middle: who reads notices nothing, and another one follows."""
    data = os.urandom(24 * MIB)
    with mounted(member(tmp_path, "saves"), member(tmp_path, "loads")) as (saves, loads):
        for name in ("first", "second"):
            save(saves, name, data)
        with open(loads.path / "first", "rb") as file:
            found = file.read(2 * MIB)
            for one in (saves, loads):
                os.kill(one.status()["exchange"]["process"], signal.SIGKILL)
            found += file.read()
        assert found == data
        for one in (saves, loads):
            know_each_other(one, 1)
        # those that were told of a failure leave the other one alone for a while
        loads.wait_status(lambda _status: _comes_from_a_member(loads, "second", data))


def _comes_from_a_member(mount: AcpfsMount, name: str, data: bytes) -> bool:
    before = counted(mount, "exchange_got_bytes")
    assert (mount.path / name).read_bytes() == data
    came = counted(mount, "exchange_got_bytes") > before
    if not came:
        mount.ctl("evict", str(mount.path / name))
    return came


@clause("S542")
def test_a_member_that_stands_still_costs_a_time_out_and_no_error(tmp_path: Path) -> None:
    data = os.urandom(24 * MIB)
    with mounted(member(tmp_path, "saves"), member(tmp_path, "loads", patience_s=SHORT_S)) as (
        saves,
        loads,
    ):
        save(saves, "model", data)
        stopped = saves.status()["exchange"]["process"]
        stop_processes([stopped])
        try:
            assert (loads.path / "model").read_bytes() == data
            assert counted(loads, "exchange_failures") >= 1
        finally:
            os.kill(stopped, signal.SIGCONT)


@clause("S539", "S542")
def test_an_exchange_process_of_ones_own_that_stands_still_is_replaced(tmp_path: Path) -> None:
    """And is no error until then."""
    data = os.urandom(3 * MIB)
    with mounted(member(tmp_path, "saves"), member(tmp_path, "loads", patience_s=SHORT_S)) as (
        saves,
        loads,
    ):
        stopped = loads.status()["exchange"]["process"]
        stop_processes([stopped])
        number = 0
        while loads.status()["exchange"]["process"] in (0, stopped):
            name = f"model-{number}"
            save(saves, name, data)
            assert (loads.path / name).read_bytes() == data
            (saves.path / name).unlink()
            number += 1


@clause("S539")
def test_it_ends_with_its_worker_and_the_next_worker_has_another(tmp_path: Path) -> None:
    data = os.urandom(8 * MIB)
    with mounted(member(tmp_path, "saves"), member(tmp_path, "loads")) as (saves, loads):
        before = saves.status()["exchange"]
        save(saves, "model", data)
        saves.kill_worker()
        saves.wait_status(
            lambda status: status["worker"]["number"] > 1 and status["exchange"]["process"]
        )
        assert saves.status()["exchange"]["process"] != before["process"]
        loads.wait_status(lambda _status: _comes_from_a_member(loads, "model", data))
        _gone(before["process"])


def _gone(pid: int) -> None:
    pause = threading.Event()
    while Path(f"/proc/{pid}/exe").is_symlink():
        try:
            os.readlink(f"/proc/{pid}/exe")
        except OSError:
            return
        pause.wait(0.02)


@clause("S545")
def test_nobody_without_a_record_is_given_anything(tmp_path: Path) -> None:
    """And who has one of another key gets nothing, either: the storage is read."""
    data = os.urandom(4 * MIB)
    with mounted(member(tmp_path, "saves"), member(tmp_path, "loads")) as (saves, loads):
        save(saves, "model", data)
        directory = next((loads.runtime_dir / "exchange").iterdir())
        # The record says another key than the one that is used from now on.
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()
        _other_key(directory)
        killed = loads.status()["exchange"]["process"]
        os.kill(killed, signal.SIGKILL)
        loads.wait_status(lambda status: status["exchange"]["process"] not in (0, killed))
        assert (loads.path / "model").read_bytes() == data
        assert counted(saves, "exchange_given_bytes") == 0
        assert counted(loads, "exchange_got_bytes") == 0


def _other_key(directory: Path) -> None:
    from acpfs.links.keys import make_key

    make_key(directory, "a stranger", "it")


@clause("S542", "S549")
@pytest.mark.skipif(bool(Networks.missing()), reason=Networks.missing() or "-")
def test_a_link_that_goes_down_in_the_middle_is_no_error(tmp_path: Path) -> None:
    """Nobody is told: what was sent is never answered."""
    data = os.urandom(40 * MIB)
    with Networks(2) as networks:
        members = [
            member(
                tmp_path,
                f"n{number}",
                at=networks.address(number) if number else networks.device,
                patience_s="1",
                python=_inside(networks, number, tmp_path),
            )
            for number in range(2)
        ]
        with mounted(*members) as (saves, loads):
            assert saves.status()["exchange"]["listens"][0].startswith(networks.address(0))
            save(saves, "model", data)
            with open(loads.path / "model", "rb") as file:
                found = file.read(MIB)
                networks.cut(0)
                found += file.read()
            assert found == data
            networks.join(0)


def _inside(networks: Networks, number: int, tmp_path: Path) -> str:
    """A Python whose processes are on that node."""
    script = tmp_path / f"python{number}"
    script.write_text(
        f'#!/bin/sh\nexec nsenter --net=/run/netns/{networks.names[number]} {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)
