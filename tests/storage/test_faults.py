"""Servers that die, hang, refuse or fill up below acpfs: applications go on, status says why,
nothing is lost or shown too early.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ordering.history import Application
from tests.ordering.training import TrainingRun
from tests.rig.journal import tree_of
from tests.rig.mounts import AcpfsMount, MakeMount
from tests.rig.storage.cephfs import NO_QUOTA, CephFs
from tests.rig.storage.glusterfs import GlusterFs
from tests.rig.storage.moosefs import MooseFs
from tests.rig.storage.servers import kill, stopped, until
from tests.storage.conftest import ALL, CHOSEN, QUICK, Site, answers, by_hand, training
from tests.storage.observer import Observer

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
ROUNDS = 4
NO_ROOM = ("ENOSPC", "EDQUOT")
Status = dict[str, Any]
BACK_S = 120.0
"""MooseFS clients take 10 s to believe that a chunk server is back, GlusterFS 3 s to connect; on a
busy machine more.
"""
ROOM_S = 300.0
"""MooseFS's master looks once a minute for bytes that no file has any more, and its servers tell
once a minute what room they have.
"""


def _waits(status: Status) -> bool:
    """Something is queued, and status says why it does not move."""
    return status["queue_length"] > 0 and _troubled(status)


def _troubled(status: Status) -> bool:
    health = status["backing_health"]
    return (
        health["state"] != "ok"
        or health["calls_out"] > 0
        or bool(health["problem"])
        or any(q["last_error"] for q in status["queue"])
    )


@contextlib.contextmanager
def all_data_servers_die(site: Site) -> Iterator[None]:
    """GlusterFS answers ENOTCONN at once, MooseFS does not answer."""
    kill(site.storage.servers_of_data())
    try:
        yield
    finally:
        site.storage.restart()


@contextlib.contextmanager
def one_data_server_dies(site: Site) -> Iterator[None]:
    """The others go on."""
    kill(site.storage.servers_of_data()[:1])
    try:
        yield
    finally:
        site.storage.restart()


@contextlib.contextmanager
def quorum_is_lost(site: Site) -> Iterator[None]:
    """Two bricks of three."""
    kill(site.storage.servers_of_data()[:2])
    try:
        yield
    finally:
        site.storage.restart()


@contextlib.contextmanager
def all_data_servers_hang(site: Site) -> Iterator[None]:
    """Calls do not return; GlusterFS gives up after its ping timeout, MooseFS never."""
    with stopped(site.storage.servers_of_data()):
        yield


@contextlib.contextmanager
def one_data_server_hangs(site: Site) -> Iterator[None]:
    """Until it is given up."""
    with stopped(site.storage.servers_of_data()[:1]):
        yield


@contextlib.contextmanager
def calls_fail_at_random(site: Site) -> Iterator[None]:
    """A fifth of write, fsync and flush, each with another error, sensible or not; what was written
    may be there or not.
    """
    assert isinstance(site.storage, GlusterFs)
    for key, value in (("error-failure", "20"), ("error-fops", "write,fsync,flush")):
        site.storage.set(f"debug.{key}", value)
    site.storage.set("debug.error-gen", "client")
    try:
        yield
    finally:
        site.storage.reset()
    # the same one of twenty errors three times in a row, which some runs meet, parks (S24)


@contextlib.contextmanager
def master_dies(site: Site) -> Iterator[None]:
    """No call returns."""
    assert isinstance(site.storage, MooseFs | CephFs)
    kill(site.storage.master())
    try:
        yield
    finally:
        site.storage.restart()


@contextlib.contextmanager
def master_hangs(site: Site) -> Iterator[None]:
    """The same, without an end of connections."""
    assert isinstance(site.storage, MooseFs | CephFs)
    with stopped(site.storage.master()):
        yield


@contextlib.contextmanager
def client_dies(site: Site) -> Iterator[None]:
    """The backing file system is a dead mount (ENOTCONN) until somebody mounts it again: another
    mount, at the same path.
    """
    kill(site.storage.client_pids(site.below))
    try:
        yield
    finally:
        site.storage.remount(site.below)


@contextlib.contextmanager
def client_is_unmounted(site: Site) -> Iterator[None]:
    """The bare mount point shows; nothing may be drained to it."""
    site.storage.unmount(site.below)
    try:
        yield
        assert os.listdir(site.below) == [], "drained into the bare directory"
    finally:
        site.storage.remount(site.below)


@contextlib.contextmanager
def client_is_fenced(site: Site) -> Iterator[None]:
    """ESHUTDOWN for all but fsync, which says 0, until somebody mounts it again."""
    assert isinstance(site.storage, CephFs)
    site.storage.fence(site.below)
    try:
        yield
    finally:
        site.storage.remount(site.below)


Work = tuple[AcpfsMount, Application, TrainingRun, Observer]
Fault = Callable[[Site], contextlib.AbstractContextManager[None]]
SEEN = {
    all_data_servers_die,
    quorum_is_lost,
    all_data_servers_hang,
    master_dies,
    master_hangs,
    client_dies,
    client_is_unmounted,
    client_is_fenced,
}
"""While these hold nothing moves."""
SHORT: dict[str, list[Fault]] = {
    "glusterfs": [all_data_servers_die, calls_fail_at_random, client_dies],
    "moosefs": [master_dies, client_is_unmounted],
    "cephfs": [client_is_fenced, master_dies],
}
LONG: dict[str, list[Fault]] = {
    "glusterfs": [
        one_data_server_dies,
        quorum_is_lost,
        all_data_servers_hang,
        one_data_server_hangs,
        client_is_unmounted,
    ],
    "moosefs": [
        all_data_servers_die,
        one_data_server_dies,
        all_data_servers_hang,
        one_data_server_hangs,
        master_hangs,
        client_dies,
    ],
    "cephfs": [
        all_data_servers_die,
        one_data_server_dies,
        all_data_servers_hang,
        master_hangs,
        client_dies,
        client_is_unmounted,
    ],
}
FAULTS = [
    pytest.param(kind, fault, id=f"{kind}-{fault.__name__}")
    for kind in CHOSEN
    for fault in SHORT[kind] + (LONG[kind] if ALL else [])
]
"""Each file system's own."""


@pytest.fixture(scope="session")
def fault(request: pytest.FixtureRequest) -> Fault:
    found: Fault = request.param
    return found


@pytest.fixture
def work(
    transport: str, make_mount: MakeMount, site: Site, tmp_path: Path, seed: int
) -> Iterator[Work]:
    """A mount over one client, an application on it, and somebody who looks on from another
    client.
    """
    below, seen = site.fresh(tmp_path.name)
    mount = make_mount(below, transport, **QUICK)
    application = Application(mount.path)
    with Observer(seen, application.states, seed) as observer:
        yield mount, application, training(application, seed), observer


def all_arrived(mount: AcpfsMount, application: Application, observer: Observer) -> None:
    """Drained, whole, in order, the same for the application and for the other node."""
    until(lambda: mount.status()["queue_length"] == 0, "drained", BACK_S)
    mount.flush(timeout_s=BACK_S)
    assert tree_of(mount.path) == application.states[-1]
    until(lambda: tree_of(observer.root) == application.states[-1], "the other client sees it")
    assert {row["status"] for row in mount.ctl("verify")} == {"ok"}
    assert observer.check() > 0
    status = mount.status()
    assert (
        status["parked"],
        status["ram"]["dirty_bytes"],
        status["counters"]["checksum_mismatches"],
    ) == (0, 0, 0)


@pytest.mark.parametrize(("site", "fault"), FAULTS, indirect=True)
@clause("S3", "S4", "S6", "S7", "S23", "S25", "S74")
def test_the_application_goes_on_and_nothing_is_lost(fault: Fault, work: Work, site: Site) -> None:
    mount, application, saves, observer = work
    saves.round()
    os.listdir(mount.path)  # what is known of the top directory goes on being known
    mount.flush(timeout_s=60)
    with fault(site):
        for _ in range(ROUNDS):
            saves.round()
        assert tree_of(mount.path) == application.states[-1]
        if fault in SEEN:
            mount.wait_status(_waits, 60)
            assert mount.status()["ram"]["dirty_bytes"] > 0, "declared persisted without servers"
    if fault is calls_fail_at_random:
        mount.ctl("retry", str(mount.path), check=False)
    saves.round()
    all_arrived(mount, application, observer)
    mount.umount()


@by_hand
@clause("S81", "S83", "S22")
@pytest.mark.parametrize("victim", ["worker", "everything"])
def test_acpfs_dies_while_the_servers_hang(work: Work, site: Site, victim: str) -> None:
    mount, application, saves, observer = work
    saves.round()
    os.listdir(mount.path)  # what is known of the top directory goes on being known
    mount.flush(timeout_s=60)
    with stopped(site.storage.servers_of_data()):
        saves.round()
        mount.wait_status(
            lambda s: s["queue_length"] > 0 and s["backing_health"]["calls_out"] > 0, 60
        )
        killing = threading.Thread(
            target=mount.kill, daemon=True
        )  # processes end when their calls on the backing directory do
        if victim == "worker":
            mount.kill_worker()  # the next one has to ask for directories that this one knew
        else:
            killing.start()
    if victim == "everything":
        killing.join(60)
        mount.start()
    until(
        lambda: answers(site.below), "the client has its servers back"
    )  # directories that no worker knew yet must be asked for
    saves.round()
    all_arrived(mount, application, observer)


@by_hand
@clause("S23", "S25")
@pytest.mark.parametrize("site", [kind for kind in CHOSEN if kind == "moosefs"], indirect=True)
def test_a_client_whose_descriptors_break_for_ever(
    transport: str, make_mount: MakeMount, site: Site, tmp_path: Path, seed: int
) -> None:
    """MooseFS with mfstimeout: EIO where servers hang, and a descriptor that met it is dead for
    ever, also when they are back.

    Where they are dead the client waits all the same: 150 s were tried, with `mfsioretries=5`, and
    with 3 alone.
    """
    client = site.storage.client(f"timeout-{tmp_path.name}", "mfstimeout=5", "mfsioretries=5")
    try:
        (client / tmp_path.name).mkdir()
        mount = make_mount(client / tmp_path.name, transport, **QUICK)
        application = Application(mount.path)
        saves = training(application, seed)
        saves.round()
        mount.flush(timeout_s=60)
        with (
            Observer(site.observer / tmp_path.name, application.states, seed) as observer,
            all_data_servers_hang(site),
        ):
            for _ in range(ROUNDS):
                saves.round()
            mount.wait_status(lambda s: any(q["last_error"] for q in s["queue"]), 90)
        all_arrived(mount, application, observer)
        mount.umount()
    finally:
        site.storage.unmount(client)


@contextlib.contextmanager
def little_room(site: Site, leave: int) -> Iterator[None]:
    """Somebody else's file takes the rest, random bytes because chunk servers drop zeros; Ceph gets
    a quota, which it notices late.
    """
    ceph = site.storage
    ballast = site.observer / "ballast"
    size = 8 << 20 if isinstance(ceph, CephFs) else ceph.free_bytes(site.observer) - leave
    try:
        with open(ballast, "wb") as file:
            file.writelines(os.urandom(1 << 20) for _ in range(size >> 20))
        if isinstance(ceph, MooseFs):
            # its master learns once a minute; until then servers take more than they have, and lose
            # it
            until(
                lambda: ceph.free_bytes(site.observer) <= 2 * leave,
                "the master knows that little room is left",
                ROOM_S,
            )
        if isinstance(ceph, CephFs):
            ceph.quota(size // 2)
            until(lambda: not takes_more(ballast), "the quota is known")
        yield
    finally:
        if isinstance(ceph, CephFs):
            ceph.quota(NO_QUOTA)
        os.truncate(
            ballast, 0
        )  # a client of MooseFS keeps the bytes of a file that it has deleted for eleven minutes
        ballast.unlink()


def takes_more(path: Path) -> bool:
    """Whether a file can be appended to; all three calls count, since fsync alone may say yes."""
    try:
        with open(path, "ab", buffering=0) as file:
            file.write(b"more")
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


@by_hand
@pytest.mark.timeout(900)
@clause("S23")
def test_a_full_volume(
    transport: str, make_mount: MakeMount, site: Site, tmp_path: Path, seed: int
) -> None:
    """GlusterFS says ENOSPC, MooseFS too with mfserroronnospace, Ceph EDQUOT; room comes back late
    after somebody else's deletion.
    """
    options = ("mfserroronnospace",) if site.kind == "moosefs" else ()
    client = site.storage.client(f"full-{tmp_path.name}", *options)
    try:
        (client / tmp_path.name).mkdir()
        mount = make_mount(client / tmp_path.name, transport, **QUICK)
        contents = {f"shard{number}": os.urandom(24 << 20) for number in range(4)}
        with little_room(site, 60 << 20):
            for name, data in contents.items():
                (mount.path / name).write_bytes(data)
            (mount.path / "latest").write_bytes(b"all of them")
            mount.wait_status(lambda s: any(q["last_error"] in NO_ROOM for q in s["queue"]), 120)
            assert not (site.observer / tmp_path.name / "latest").exists()
            assert all((mount.path / name).read_bytes() == data for name, data in contents.items())
        mount.flush(timeout_s=ROOM_S)
        for name, data in contents.items():
            assert (site.observer / tmp_path.name / name).read_bytes() == data
        assert {row["status"] for row in mount.ctl("verify")} == {"ok"}
        mount.umount()
    finally:
        site.storage.unmount(client)
