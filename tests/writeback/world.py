"""A write-back engine with everything below it real but the backing directory, and a small model of
the layer above.

`World` logs operations as the file system would and remembers the states that the application saw,
in order.
"""

from __future__ import annotations

import math
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import trio

from acpfs.backing.calls import CallPool, CallPools
from acpfs.backing.health import Health
from acpfs.backing.lower import Lower, LowerPath, LowerStat
from acpfs.config import Settings
from acpfs.drain_records import Verification
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier
from acpfs.types import NO_INO, ROOT, Ino
from acpfs.writeback.engine import Engine
from acpfs.writeback.evidence.verify import Verifier
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.lower_tree import LowerTree, Place
from acpfs.writeback.log.ops import Metadata, Op, OpKind, Version
from acpfs.writeback.manifest.manifest import Manifest
from acpfs.writeback.parts import DrainParts
from tests.rig.runtime import REAL
from tests.writeback.memory_lower import MemoryLower

T = TypeVar("T")


class InlinePool(CallPool):
    """Runs each call at once in the caller's thread: with trio's virtual clock everything becomes
    deterministic.
    """

    def submit(self, label: str, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls[label] += 1
        try:
            with self.health.call(self.name, label):
                future.set_result(function(*arguments))
        except BaseException as failure:  # noqa: BLE001 - whatever it was, it belongs to the caller
            future.set_exception(failure)
        return future


def verified(manifest: Manifest, paths: Iterable[LowerPath] = ()) -> list[Verification]:
    """What is said of files of the backing directory."""
    return list(Verifier(manifest, manifest._lower, manifest._lock, REAL.threads).verify(paths))


def inline_pools() -> CallPools:
    health = Health(REAL.clock)
    requests, streams, commits, syncs, fills, verifies = (
        InlinePool(name, 1, REAL, health)
        for name in ("requests", "streams", "commits", "syncs", "fills", "verifies")
    )
    return CallPools(requests, streams, commits, syncs, fills, verifies, health)


class ListenerDouble:
    """Remembers what it was told, gives tier files back."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.persisted_ops: list[tuple[Op, LowerStat | None]] = []
        self.dropped_ops: list[Op] = []
        self.times: dict[Ino, tuple[int, int]] = {}
        self.open_versions: set[int] = set()
        self.writing = False
        self.being_written: set[str] = set()
        """Paths that count as open for writing."""
        self.idle = math.inf
        """Seconds since the last request."""
        self.settled: list[tuple[Ino, LowerStat]] = []

    def persisted(self, op: Op, stat: LowerStat | None) -> None:
        self.persisted_ops.append((op, stat))
        if stat is not None:
            self._world.left[op.ino] = stat.identity()
        self._finished(op)

    def dropped(self, op: Op) -> None:
        self.dropped_ops.append(op)
        self._finished(op)

    def _finished(self, op: Op) -> None:
        if op.version is not None:
            self._world.unuse(op.version)

    def left_as(self, ino: Ino) -> tuple[int, int, int, int] | None:
        return self._world.left.get(ino)

    def superseded(self, op: Op, given_up: list[Op], former: Place | None) -> None:
        pass

    def set_aside(self, op: Op) -> None:
        pass

    def keeps_staging(self, version: Version) -> bool:
        return False

    def staging_in_use(self) -> set[str]:
        return set()

    def idle_s(self) -> float:
        return self.idle

    def still_frozen(self, version: Version) -> bool:
        return True

    def is_changing(self, version: Version) -> bool:
        return False

    def when_still(self, version: Version) -> Future[Any] | None:
        return None

    def held_up_by(self, version: Version) -> int | None:
        return None

    def may_have_changed(self, version: Version) -> bool:
        return False

    def restaged(self, version: Version, before: str) -> None:
        pass

    def unstaged(self, version: Version) -> None:
        pass

    def permissions_of(self, directory: Ino) -> int | None:
        return self._world.modes.get(directory)

    def only_appended(self, version: Version) -> bool:
        return False

    def directory_settled(self, ino: Ino, stat: LowerStat) -> None:
        self.settled.append((ino, stat))

    def directory_times(self, ino: Ino) -> tuple[int, int] | None:
        return self.times.get(ino)

    def display_path(self, op: Op) -> bytes:
        return op.name or b"#%d" % op.ino

    def is_writing(self) -> bool:
        return self.writing

    def is_interrupted(self, ino: Ino) -> bool:
        del ino
        return False

    def is_directory(self, ino: Ino) -> bool:
        return ino in self._world.directory_inos

    def directory_of(self, ino: Ino) -> Ino:
        return NO_INO

    def path_of(self, ino: Ino) -> bytes:
        return next(
            (path.encode() for path, other in self._world.inos.items() if other == ino), b"?"
        )

    def is_settled(self, path: LowerPath) -> bool:
        prefix = b"/".join(path).decode()
        below = [
            ino for name, ino in self._world.inos.items() if (name + "/").startswith(prefix + "/")
        ]
        return prefix not in self.being_written and not any(
            self._world.log.is_pending(ino) for ino in below
        )

    def version_of_open_file(self, version: Version) -> bool:
        return version.vid in self.open_versions


def _rename(table: dict[str, T], source: str, target: str) -> None:
    for path in [p for p in table if p == source or p.startswith(source + "/")]:
        table[target + path[len(source) :]] = table.pop(path)


class World:
    """See above."""

    def __init__(
        self,
        directory: Path,
        lower: Lower | None = None,
        calls: CallPools | None = None,
        **settings: Any,
    ) -> None:
        self.directory = directory
        (directory / "tier").mkdir(exist_ok=True)
        self.lower: Any = lower or MemoryLower()
        self.calls = calls or inline_pools()
        settings.setdefault(
            "keep_last_persisted", False
        )  # most tests are of the order, to which held deletions are an exception
        self.settings = Settings(backing=Path("/backing"), mountpoint=Path("/mount"), **settings)
        self.lock = threading.RLock()
        self.inos: dict[str, Ino] = {"": ROOT}
        self.contents: dict[str, bytes] = {}
        """By path; of symlinks their target."""
        self.left: dict[Ino, tuple[int, int, int, int]] = {}
        self.seen: list[dict[bytes, bytes]] = [{}]
        self._last_ino = 1
        self._symlink_inos: set[Ino] = set()
        self.directory_inos: set[Ino] = set()
        self.modes: dict[Ino, int] = {}
        """Permission bits of directories, as the application sees them."""
        self.assemble()

    def assemble(self) -> None:
        """Put the parts together over whatever lies in the directory."""
        self.state = StateDatabase(self.directory / "state.db", REAL)
        self.log = OperationLog(self.state, REAL.clock)
        self.tree = LowerTree(self.state)
        self.tier = Tier(self.directory / "tier", 1 << 40, REAL, when_safe=self.state.after_commit)
        self.listener = ListenerDouble(self)
        self.manifest = Manifest(self.state, self.lower, self.lock, "node")
        parts = (
            self.lower,
            self.tree,
            self.log,
            self.tier,
            self.state,
            self.lock,
            self.listener,
            self.calls,
            self.settings,
            REAL,
        )
        self.engine = Engine(DrainParts(*parts), self.manifest)
        if hasattr(self.lower, "on_death"):
            self.lower.on_death = self.die
        self.engine._retry._random = random.Random(0)

    def restart(self) -> None:
        """As after kill -9: what was not committed to the state database is gone."""
        self.engine._stop()
        self.die()
        self.state.close()
        self.tier.close()
        self.assemble()

    def die(self) -> None:
        """Nothing of this worker reaches the state database any more, whatever its threads and
        tasks still do as they unwind.
        """
        with self.lock:
            self.state.abandon(RuntimeError("kill -9"))

    @property
    def symlinks(self) -> set[str]:
        return {path for path, ino in self.inos.items() if ino in self._symlink_inos}

    # -- the application

    def _place(self, path: str) -> dict[str, Any]:
        parent, _slash, name = path.rpartition("/")
        return {"parent": self.inos[parent], "name": name.encode()}

    def _new_ino(self, path: str) -> Ino:
        self._last_ino += 1
        self.inos[path] = Ino(self._last_ino)
        return self.inos[path]

    def _append(self, kind: OpKind, ino: Ino, *, creates: bool = False, **fields: Any) -> Op:
        with self.lock:
            op = self.log.append(kind, ino, creates=creates, logged_at=time.time(), **fields)
            self.state.commit()
        self.seen.append(self.application_view())
        return op

    def application_view(self) -> dict[bytes, bytes]:
        view = {
            (path + "/").encode()
            if path not in self.contents
            else path.encode(): self.contents.get(path, b"")
            for path in self.inos
            if path
        }
        return dict(view)

    def store(self, path: str, data: bytes, *, mode: int = 0o644, **meta: Any) -> Op:
        creates = path not in self.inos
        ino = self.inos[path] if not creates else self._new_ino(path)
        for name, other in self.inos.items():
            if other == ino:
                self.contents[name] = data
        with self.lock:
            tier_id = self.tier.create()
            fd = self.tier.open(tier_id)
            os.pwrite(fd, data, 0)
            os.close(fd)
            version = self.log.new_version(ino, tier_id, len(data))
        return self._append(
            OpKind.STORE,
            ino,
            creates=creates,
            version=version,
            meta=Metadata(permissions=mode, **meta),
            **self._place(path),
        )

    def unuse(self, version: Version) -> None:
        if version.tier_id:
            self.tier.remove(version.tier_id)

    def mkdir(self, path: str, mode: int = 0o755) -> Op:
        ino = self._new_ino(path)
        self.directory_inos.add(ino)
        self.modes[ino] = mode
        return self._append(
            OpKind.MKDIR, ino, creates=True, meta=Metadata(permissions=mode), **self._place(path)
        )

    def _gone(self, path: str) -> Ino:
        self.contents.pop(path, None)
        return self.inos.pop(path)

    def unlink(self, path: str) -> Op:
        place = self._place(path)
        return self._append(OpKind.UNLINK, self._gone(path), **place)

    def rmdir(self, path: str) -> Op:
        place = self._place(path)
        return self._append(OpKind.RMDIR, self._gone(path), **place)

    def rename(self, source: str, target: str) -> Op:
        old = self._place(source)
        new = self._place(target)
        victim = self._gone(target) if target in self.inos else NO_INO
        ino = self.inos[source]
        _rename(self.inos, source, target)
        _rename(self.contents, source, target)
        return self._append(
            OpKind.RENAME, ino, new_parent=new["parent"], new_name=new["name"], victim=victim, **old
        )

    def exchange(self, a: str, b: str) -> Op:
        place_a = self._place(a)
        place_b = self._place(b)
        ino_a = self.inos[a]
        ino_b = self.inos[b]
        self.inos[a], self.inos[b] = self.inos[b], self.inos[a]
        if a in self.contents and b in self.contents:
            self.contents[a], self.contents[b] = self.contents[b], self.contents[a]
        else:  # directories have none
            _rename(self.contents, *((a, b) if a in self.contents else (b, a)))
        return self._append(
            OpKind.EXCHANGE,
            ino_a,
            victim=ino_b,
            new_parent=place_b["parent"],
            new_name=place_b["name"],
            **place_a,
        )

    def link(self, source: str, target: str) -> Op:
        self.inos[target] = self.inos[source]
        self.contents[target] = self.contents[source]
        return self._append(OpKind.LINK, self.inos[source], **self._place(target))

    def symlink(self, target: bytes, path: str) -> Op:
        ino = self._new_ino(path)
        self.contents[path] = target
        self._symlink_inos.add(ino)
        return self._append(OpKind.SYMLINK, ino, creates=True, payload=target, **self._place(path))

    def mkfifo(self, path: str) -> Op:
        ino = self._new_ino(path)
        self.contents[path] = b""
        return self._append(
            OpKind.MKNOD,
            ino,
            creates=True,
            meta=Metadata(permissions=0o600, file_type=stat.S_IFIFO),
            **self._place(path),
        )

    def setattr(self, path: str, **meta: Any) -> Op | None:
        ino = self.inos[path]
        payload = b"%o" % self.modes[ino] if ino in self.modes else b""
        if ino in self.modes:
            self.modes[ino] = meta.get("permissions", self.modes[ino])
        with self.lock:
            if self.log.fold(ino, Metadata(**meta)):
                return None
        return self._append(OpKind.SETATTR, ino, meta=Metadata(**meta), payload=payload)

    # -- running

    async def drain(self, timeout_s: float = 3600.0) -> None:
        """Run the engine until it is drained, with the manifest, on trio's clock."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.engine.run)
            with trio.fail_after(timeout_s):
                await self.until(self.engine.drained)
            nursery.cancel_scope.cancel()

    async def until(self, condition: Callable[[], bool]) -> None:
        """For tests on real time, where another thread makes it true."""
        while not condition():  # noqa: ASYNC110 - threads have no trio event to set
            await trio.sleep(0.005)

    async def run_for(self, seconds: float) -> None:
        """Run the engine for a while."""
        with trio.move_on_after(seconds):
            await self.engine.run()
