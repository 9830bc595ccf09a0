"""A request that hangs the worker, and comes again to the next one: only its caller is
concerned.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from acpfs.ram.kept import Kept
from acpfs.transport.native.hung_requests import HungRequests, Watch
from acpfs.transport.native.request import resent
from tests.rig.hanging_code import Place, code_that_hangs, flag_of
from tests.rig.mounts import AcpfsMount
from tests.rig.processes import Child

needs_fuse = pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
pytestmark = pytest.mark.clause("S422")
HANG_S = "6"
WITHOUT_THE_LOCK: Place = (
    "acpfs/transport/native/operations.py",
    "        name, target = two_names(request.body())\n",
    "        hang_here()\n",
)
UNDER_THE_LOCK: Place = (
    "acpfs/filesystem/names.py",
    "        node.target = target\n        node.size = len(target)\n",
    "        hang_here()\n",
)


def test_a_request_may_hang_two_workers_and_its_record_goes_with_its_answer(
    tmp_path: Path,
) -> None:
    def next_worker() -> tuple[Kept, HungRequests]:
        kept = Kept(tmp_path / "kept", "session")
        return kept, HungRequests(kept)

    _kept, hung = next_worker()
    for unique in (12, 12, 14):
        hung.note(unique)
    hung.ended(14)
    kept, hung = next_worker()
    assert (hung.to_set_apart, kept.given_up) == (frozenset({resent(12)}), frozenset())
    hung.note(resent(12))
    kept, hung = next_worker()
    assert (hung.to_set_apart, kept.given_up) == (frozenset(), frozenset({12}))
    hung.ended(resent(12))
    kept, hung = next_worker()
    assert (hung.to_set_apart, kept.given_up) == (frozenset(), frozenset())


def test_whoever_waits_for_the_lock_is_not_to_blame() -> None:
    lock = threading.RLock()
    own = threading.get_ident()
    seats = [(own, 4), (own + 1, 6)]
    kept = Kept()
    hung = HungRequests(kept)
    watch = Watch(hung, lambda: seats, lock, 3.0)

    def noted(now: float) -> set[int]:
        watch.look(now)
        return {unique for _slot, (unique, _hangs) in kept.hung}

    assert [noted(at) for at in (10.0, 12.0)] == [set(), set()]
    assert noted(13.0) == {4, 6}
    seats[:] = [(own, 8), (own + 1, 10)]
    with lock:
        assert [noted(at) for at in (14.0, 16.0)] == [set(), set()]
        assert noted(17.0) == {8}
        seats[0] = (own, 0)
        assert noted(18.0) == set()
    assert noted(19.0) == {10}


def hang(tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch) -> AcpfsMount:
    monkeypatch.setenv("ACPFS_HANG_TIMEOUT_S", HANG_S)
    code = code_that_hangs(tmp_path, place, again=True)
    (tmp_path / "backing").mkdir()
    environment = {"PYTHONPATH": str(code)}
    return AcpfsMount(tmp_path / "backing", tmp_path / "mnt", "native", environment=environment)


def make_link(mount: AcpfsMount) -> Child:
    def link() -> int:
        try:
            os.symlink("target", mount.path / "links" / "link")
        except OSError as error:
            return error.errno or -1
        return 0

    return Child(link)


def others_go_on(mount: AcpfsMount, name: str) -> None:
    def write() -> None:
        # the kernel keeps the lock of the directory in which a call makes something
        (mount.path / name).mkdir()
        (mount.path / name / "f").write_bytes(b"data")

    Child(write).result()


@needs_fuse
@pytest.mark.mount
@pytest.mark.transports("native")
def test_the_next_worker_does_not_hang_on_it(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hang(tmp_path, WITHOUT_THE_LOCK, monkeypatch) as mount:
        others_go_on(mount, "links")
        flag_of(tmp_path).touch()
        caller = make_link(mount)
        mount.wait_status(lambda status: status["worker"]["number"] >= 2)
        others_go_on(mount, "after")  # and it hangs still
        flag_of(tmp_path).unlink()
        mount.kill_worker()
        assert caller.result() in (0, errno.EIO)
        others_go_on(mount, "at last")


@needs_fuse
@pytest.mark.mount
@pytest.mark.transports("native")
def test_one_that_hangs_two_workers_fails_and_others_go_on(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs with the lock of the file system, without which nobody gets anywhere."""
    with hang(tmp_path, UNDER_THE_LOCK, monkeypatch) as mount:
        others_go_on(mount, "links")
        flag_of(tmp_path).touch()
        assert make_link(mount).result() == errno.EIO
        assert mount.status()["worker"]["number"] >= 3
        others_go_on(mount, "after")
        flag_of(tmp_path).unlink()
        assert make_link(mount).result() == 0
