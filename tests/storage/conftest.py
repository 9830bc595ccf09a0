"""One file system of each kind for all tests of this directory, with a client below acpfs and
another one that looks on.

The plain run is the short one; ACPFS_STORAGE=all adds the rest (docs/CONFORMANCE.md),
ACPFS_STORAGE_KINDS=moosefs keeps to one; cephfs is by hand only.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ordering.history import Application
from tests.ordering.training import TrainingRun
from tests.rig.storage import IN_EVERY_RUN, KINDS, UNCACHED, open_storage, why_not
from tests.rig.storage.servers import Storage, until

SERVER_BYTES = 300 << 20
"""Each server's tmpfs: no test has more than a third of it at once."""
QUICK: dict[str, object] = {
    "retry_delay_min": 0.05,
    "retry_delay_max": 0.5,
    "attr_timeout": 0.2,
    "max_dirty_age": 0,
    "no_keep_last_persisted": True,
    "ram": "256M",
}
ALL = os.environ.get("ACPFS_STORAGE") == "all"
by_hand = pytest.mark.skipif(
    not ALL, reason="by hand, all of them take minutes: ACPFS_STORAGE=all pytest tests/storage"
)
CHOSEN = [
    kind
    for kind in os.environ.get("ACPFS_STORAGE_KINDS", ",".join(IN_EVERY_RUN)).split(",")
    if kind in KINDS
]


@dataclass(frozen=True)
class Site:
    """A file system with two clients."""

    storage: Storage
    below: Path
    """The client that acpfs works on; with the caches that users have."""
    observer: Path
    """Another node's, without caches."""

    @property
    def kind(self) -> str:
        return self.storage.name

    def fresh(self, name: str) -> tuple[Path, Path]:
        """A new directory, as both clients have it; when the servers are back that the last test
        has killed.
        """
        until(
            lambda: answers(self.below) and answers(self.observer),
            "both clients have their servers",
        )
        (self.below / name).mkdir()
        return self.below / name, self.observer / name


def answers(client: Path) -> bool:
    """Whether the servers are there for it."""
    with contextlib.suppress(OSError):
        os.listdir(client)
        return True
    return False


def sites(base: Path, kind: str) -> Iterator[Site]:
    reason = why_not(kind)
    if reason is not None:
        pytest.skip(reason)
    with open_storage(kind, base, SERVER_BYTES) as storage:
        yield Site(storage, storage.client("below"), storage.client("observer", *UNCACHED[kind]))


@pytest.fixture(scope="session", params=CHOSEN)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="acpfs-storage-", ignore_cleanup_errors=True) as base:
        yield from sites(Path(base) / request.param, request.param)


def training(application: Application, seed: int) -> TrainingRun:
    """Saves, without the exchange of two names: what these file systems do not have is not atomic
    there (S27).
    """
    return TrainingRun(application, seed, exchange=False)
