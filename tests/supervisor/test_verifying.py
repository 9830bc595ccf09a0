"""Verification beside the drain, below the transports."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from acpfs.backing.calls import CallPools
from acpfs.worker.subject import WorkerSubject
from tests.rig.runtime import REAL


@pytest.mark.clause("S222")
def test_verifications_that_hang_or_are_long_take_no_commits_thread() -> None:
    let_go = threading.Event()
    reading = threading.Semaphore(0)

    class Hanging:
        def verify(self, _paths: object) -> Iterator[None]:
            reading.release()
            assert let_go.wait(60)
            yield from ()

    calls = CallPools.make(
        REAL, requests=4, streams=4, syncs=4
    )  # fewer threads each than verifications
    parts = SimpleNamespace(
        calls=calls,
        verifier=Hanging(),
        given=REAL,
        settings=SimpleNamespace(mountpoint="/mnt/acp"),
    )
    subject = WorkerSubject(cast("Any", parts), cast("Any", None))

    async def tell(_verdict: object) -> None:
        return

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(subject.verify, [b"f"], tell)
            await trio.to_thread.run_sync(reading.acquire)
            await trio.testing.wait_all_tasks_blocked()
            for pool in (calls.commits, calls.streams, calls.syncs, calls.requests):
                assert (
                    await trio.to_thread.run_sync(pool.submit("commit", lambda: 1).result, 20) == 1
                )
            nursery.cancel_scope.cancel()

    try:
        trio.run(main)
    finally:
        let_go.set()
        calls.close()
