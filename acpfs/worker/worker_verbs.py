"""Verbs of the control socket that ask or change one part of the worker: what stays in RAM, other
members, a look at the mount's state.

Those that wait for the drain or tell of it need only `acpfs.control.worker_contract` and are in
`acpfs.control.verbs`. Takes the file system's lock for each step and never calls the backing
directory from trio's thread; waits are cancelled when the client goes away.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict

import trio

from acpfs.backing.member_records import NodeState
from acpfs.control.reports import StayedFile
from acpfs.control.socket_messages import BadRequestError, ControlRequest, Json, RemoteError
from acpfs.control.verbs import BATCH_ITEMS, PROGRESS_INTERVAL_S, Answer
from acpfs.control.worker_contract import Report
from acpfs.drain_records import Verification
from acpfs.errors import AcpfsError, DeadlineError, ExitCode, RefusedError
from acpfs.filesystem.nodes import Node
from acpfs.worker.assembly import Parts
from acpfs.worker.examination import examine
from acpfs.worker.node_reports import node_reports
from acpfs.worker.preloads import Job, Preloads
from acpfs.writeback.arrival import outcome
from acpfs.writeback.copies.journal_marks import read_mark

LOOK_S = 2.0
"""Whether a directory is there, the backing directory must say within this time."""
_AS_HERE = (
    "cluster_order",
    "pointer_patterns",
    "checkpoint_patterns",
    "keep_last_persisted",
    "guard_time_s",
    "heartbeat_s",
    "clock_bound_s",
    "node_timeout_s",
    "node_forget_after_s",
)
"""Settings of a mount that adopts: what comes after what is the same on all members."""


class WorkerVerbs:
    """The handlers, over the parts that they need."""

    def __init__(self, parts: Parts, preloads: Preloads) -> None:
        self._parts = parts
        self._preloads = preloads

    def answers(self) -> dict[str, Answer]:
        """Verb → what answers it."""
        return {
            "preload": self._preload,
            "pin": self._pin,
            "unpin": self._unpin,
            "evict": self._evict,
            "urgent": self._urgent,
            "verify_ram": self._verify_ram,
            "doctor": self._doctor,
            "nodes": self._nodes,
            "wait_nodes": self._wait_nodes,
            "forget_node": self._forget_node,
            "adopt": self._adopt,
            "adopted": self._adopted,
            "history": self._history,
        }

    # -- what is in RAM

    async def _preload(self, request: ControlRequest, tell: Report) -> Json:
        """Bring files to RAM; with `wait`, until they are there, each that was brought or not an
        item.
        """
        job = self._preloads.begin([] if request.flag("latest") else request.some_paths())
        if not request.flag("wait"):
            return {"items": []}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_tell_left, job, tell)
            await job.ended()
            nursery.cancel_scope.cancel()
        files = job.outcome()
        for start in range(0, len(files), BATCH_ITEMS):
            await tell(
                {
                    "event": "items",
                    "items": [asdict(file) for file in files[start : start + BATCH_ITEMS]],
                }
            )
        return {"items": []}

    async def _pin(self, request: ControlRequest, _tell: Report) -> Json:
        kept_bytes = 0
        for path in request.some_paths():
            with self._parts.fs.lock, self._parts.state.step():
                kept_bytes = self._parts.inner.eviction.pin(path)
        return {"pinned_bytes": kept_bytes}

    async def _unpin(self, request: ControlRequest, _tell: Report) -> Json:
        removed = 0
        for path in request.some_paths():
            with self._parts.fs.lock, self._parts.state.step():
                removed += self._parts.inner.eviction.unpin(path)
        return {"pins": removed}

    async def _evict(self, request: ControlRequest, tell: Report) -> Json:
        """Each file that stayed is an item."""
        files = 0
        freed = 0
        for path in request.some_paths():
            with self._parts.fs.lock, self._parts.state.step():
                done = self._parts.inner.eviction.evict(path)
            files = files + done.files
            freed = freed + done.freed_bytes
            stayed = [
                StayedFile(os.fsdecode(one.path), one.reason, one.size_bytes) for one in done.stayed
            ]
            await tell({"event": "items", "items": [asdict(file) for file in stayed]})
        return {"files": files, "bytes": freed, "items": []}

    async def _urgent(self, request: ControlRequest, _tell: Report) -> Json:
        """Who asks is what the kernel said of the connection, never what the request says."""
        path = request.one_path()
        off = request.flag("off")
        seconds = request.seconds("for_s")
        if off == (seconds is not None):
            raise BadRequestError(f"{request.verb}: say for how long, or off")
        if seconds == 0:
            raise BadRequestError(f"{request.verb}: for no time at all")
        node = await self._found(path)
        if not node.is_dir and not node.is_file:
            raise RefusedError(
                f"{os.fsdecode(path)} is neither a directory nor a file: name the target of the "
                "symlink, if it is one"
            )
        if request.uid not in (0, node.uid):
            raise AcpfsError(
                "permission denied: only its owner and root may say whether "
                f"{os.fsdecode(path) or 'the mount'} is urgent"
            )
        urgent = self._parts.inner.urgent
        with self._parts.fs.lock, self._parts.state.step():
            changed = (
                urgent.declare(path, seconds, request.uid) if seconds else urgent.withdraw(path)
            )
        return {"changed": changed}

    async def _found(self, path: bytes) -> Node:
        node = None
        try:
            with trio.move_on_after(LOOK_S) as looked:
                node = await self._parts.fs.steps.drive(self._parts.inner.paths.find(path))
        except OSError as error:
            raise AcpfsError(f"{os.fsdecode(path)}: {error.strerror}") from error
        if node is None or looked.cancelled_caught:
            raise DeadlineError(
                f"the backing directory does not say whether there is {os.fsdecode(path)}"
            )
        return node

    # -- looks

    async def _verify_ram(self, request: ControlRequest, tell: Report) -> Json:
        """Compare what RAM has with the checksums; each verdict is an item."""
        paths = request.paths()  # not in the nursery, which would wrap what it raises
        one_at_a_time = trio.Lock()

        async def judge(verdict: Verification) -> None:
            async with one_at_a_time:
                await tell({"event": "items", "items": [asdict(verdict)]})

        async def still_at_it() -> None:
            """A large file takes long, and the client is not to give up."""
            while True:
                await trio.sleep(PROGRESS_INTERVAL_S)
                async with one_at_a_time:
                    with trio.CancelScope(shield=True):  # never half a line
                        await tell({"event": "progress"})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(still_at_it)
            await self._parts.scrubbing.verify(paths, judge)
            nursery.cancel_scope.cancel()
        return {"items": []}

    async def _doctor(self, _request: ControlRequest, tell: Report) -> Json:
        """Look at the worker's own state; each fault is an item."""
        faults = await examine(
            self._parts.fs.lock,
            self._parts.inner.invariants,
            _now_and_then(tell, self._parts.given.clock.now),
        )
        await tell({"event": "items", "items": [asdict(fault) for fault in faults]})
        return {"items": []}

    async def _history(self, _request: ControlRequest, tell: Report) -> Json:
        """Each entry is an item, oldest first."""
        with self._parts.fs.lock:
            entries = self._parts.history.entries()
        for start in range(0, len(entries), BATCH_ITEMS):
            await tell(
                {
                    "event": "items",
                    "items": [asdict(entry) for entry in entries[start : start + BATCH_ITEMS]],
                }
            )
        return {"items": []}

    # -- other members

    async def _nodes(self, _request: ControlRequest, _tell: Report) -> Json:
        with trio.move_on_after(self._parts.settings.patience_s):
            await self._parts.cluster.look()
        with self._parts.fs.lock:
            return {"nodes": [asdict(node) for node in node_reports(self._parts)]}

    async def _wait_nodes(self, request: ControlRequest, _tell: Report) -> Json:
        """Until what others had closed before the call can be read here."""
        behind: list[str] = []
        limit_s = request.seconds("timeout_s")
        with trio.move_on_after(float("inf") if limit_s is None else limit_s):
            await self._parts.cluster.others_persisted(
                lambda names: behind.__setitem__(slice(None), names)
            )
            with self._parts.fs.lock:
                self._parts.fs.look_up_all_anew()
            return {"nodes": []}
        why = (
            f"still draining: {', '.join(behind)}"
            if behind
            else "the backing directory does not say which nodes there are"
        )
        error = RemoteError(why, {"nodes": behind})
        error.exit_code = ExitCode.TIMEOUT
        raise error

    async def _forget_node(self, request: ControlRequest, _tell: Report) -> Json:
        node = request.text("node")
        try:
            forgotten = await self._parts.cluster.forget(node)
        except OSError as error:
            raise AcpfsError(
                f"the backing directory does not let the record be removed: {error.strerror}"
            ) from error
        if not forgotten:
            raise RefusedError(
                f"{node} is alive, or does not exist: only a missing node can be forgotten, "
                "and what one had lost that is back or adopted, on the node where that is"
            )
        return {"node": node}

    async def _adopt(self, request: ControlRequest, _tell: Report) -> Json:
        """Nothing more of a lost node is taken; what it has here is ready to be drained."""
        node = request.text("node")
        parts = self._parts
        is_claimed = bool(parts.holding.claimed(node))  # then it is the adopter that may live
        if not is_claimed and any(one.node == node for one in parts.cluster.live_records()):
            raise RefusedError(f"{node} is alive: what it has closed is its own to drain")
        token = await parts.given.threads.run_sync(self._counting, node)
        settings = parts.settings.as_json()
        try:
            place = parts.holding.claim(node, token)
        except KeyError:
            raise RefusedError(f"nothing is held of {node} here that counts") from None
        return {
            "node": node,
            "by": parts.identity.node_id,
            "backing": os.fspath(parts.settings.backing),
            "runtime_dir": os.fspath(parts.runtime),
            "spill": os.fspath(place),
            "volume": parts.identity.volume_id,
            "settings": {name: settings[name] for name in _AS_HERE},
        }

    def _counting(self, node: str) -> str:
        """The session that counts: by the mark on the storage, or one that is being adopted, whose
        adopter has a mark of its own.
        """
        found = self._parts.holding.claimed(node)
        try:
            mark = read_mark(self._parts.directory, node)
        except (OSError, ValueError) as error:
            raise AcpfsError(
                f"the mark of what {node} has copied cannot be read: {error}"
            ) from error
        if found and (mark is None or "holder" not in mark):
            return found[0]
        if mark is None or "session" not in mark:
            raise RefusedError(
                f"nothing that is held of {node} counts: it had no holder when it was lost, or "
                "all was persisted"
            )
        if mark.get("holder") != self._parts.identity.node_id:
            raise RefusedError(f"the copy that counts is held by node {mark.get('holder')}")
        return str(mark["session"])

    async def _adopted(self, request: ControlRequest, _tell: Report) -> Json:
        node = request.text("node")
        record = await outcome(self._parts.cluster.record_anew(node))
        if record is None or record.state is not NodeState.LEFT:
            raise RefusedError(f"the log of {node} is not drained: what is held of it stays")
        if record.withheld:
            with self._parts.fs.lock:
                others = self._parts.cluster.statistics().peers
            missing = ", ".join(one.node for one in others if one.missing) or "none"
            raise RefusedError(
                f"{record.withheld} pointers of {node} are withheld for other nodes (missing now: "
                f"{missing}), so what is held of it stays: `acpfs-ctl adopt {node}` goes on when "
                "they are back, adopted or forgotten (`acpfs-ctl nodes`)"
            )
        with self._parts.fs.lock:
            self._parts.holding.adopted(node)
        await self._parts.given.threads.run_sync(self._parts.holding.delete_gone)
        return {"node": node}


async def _tell_left(job: Job, tell: Report) -> None:
    while True:
        files, size = job.left()
        await tell({"event": "progress", "operations": files, "bytes": size})
        await trio.sleep(PROGRESS_INTERVAL_S)


def _now_and_then(tell: Report, now: Callable[[], float]) -> Callable[[int], Awaitable[None]]:
    """Tells how many pieces were looked at, not more often than a client needs to hear it."""
    told_at = now()

    async def looked(pieces: int) -> None:
        nonlocal told_at
        if now() >= told_at + PROGRESS_INTERVAL_S:
            told_at = now()
            await tell({"event": "progress", "pieces": pieces})

    return looked
