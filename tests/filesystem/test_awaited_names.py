"""Lookups that wait for what another node is about to persist, whose records are made up; and what
of this node others may wait for.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.backing.name_filter import PATHS_MAX, NameFilter
from acpfs.filesystem.records import Attributes
from acpfs.filesystem.steps import Call
from acpfs.types import ROOT, Ino
from acpfs.writeback.log.ops import WITHHELD
from acpfs.writeback.members.peer_names import WAITING_MAX, Pending
from acpfs.writeback.members.peers import Peer, Terms
from tests.filesystem.test_slow_backing import hanging
from tests.filesystem.world import CALLER, World, world

clause = pytest.mark.clause
TERMS = Terms("a", 0.1, 0.0, 30.0, 0.0)
LONG_S = 600.0
waiting = partial(world, wait_for_peers_s=LONG_S, attr_timeout_s=600.0)


class Others:
    """One other node's record, as this one has read it."""

    def __init__(self, made: World) -> None:
        self.world = made
        self.peers = made.inner.awaited.peers
        self.peer = Peer("b", 0.0)
        self.clock = 1000.0
        self.peers._monotonic = lambda: self.clock

    def say(self, *paths: bytes, of_directories: bool = False, **fields: Any) -> None:
        beat = self.peer.record.beat + 1 if self.peer.record is not None else 1
        record = NodeRecord(
            "b",
            beat=beat,
            **{"pending": Pending(list(paths), of_directories).to_text(beat), **fields},
        )
        self.peer.saw(record, 0.0, 0.0)
        with self.world.fs.lock:
            self.peers.learn("b", self.peer, TERMS)
        self.peers.tell()


class Lookup:
    """A lookup that is under way, step by step."""

    def __init__(self, made: World, name: bytes, parent: Ino = ROOT) -> None:
        self._world = made
        self._peers = made.inner.awaited.peers
        self._call: Call[Attributes] = made.fs.lookup(parent, name)
        self._future: Future[Any] | None = None
        self.found: Attributes | None = None
        self.error = 0

    def asks(self) -> None:
        """Until it waits for anything."""
        self._future = self._world.fs.steps.step(self._call, self._future)

    def goes_on(self) -> bool:
        """Until it waits for other nodes: True; or has ended."""
        try:
            while True:
                self._future = self._world.fs.steps.step(self._call, self._future)
                if self._future in self._peers._bells:
                    return True
                wait([self._future])
        except StopIteration as stop:
            self.found = stop.value
        except OSError as error:
            self.error = error.errno or -1
        return False

    @property
    def rung(self) -> bool:
        return self._future is not None and self._future.done()

    def killed(self) -> None:
        """Its caller was."""
        assert self._future is not None
        self._future.cancel()


Scenario = Callable[[World, Others], Any]


def played(tmp_path: Path, scenario: Scenario, **settings: Any) -> None:
    async def play() -> None:
        async with waiting(tmp_path, **settings) as made:
            done = scenario(made, Others(made))
            if done is not None:
                await done

    trio.run(play)


@clause("S172")
def test_a_name_that_another_node_has_is_waited_for_and_found_at_the_next_news(
    tmp_path: Path,
) -> None:
    def scenario(made: World, others: Others) -> None:
        others.say(b"shard")
        lookup = Lookup(made, b"shard")
        assert lookup.goes_on()
        assert (others.peers.awaited, others.peers.sources()) == ([b"shard"], ["b"])
        others.say(b"shard")
        assert (lookup.rung, lookup.goes_on()) == (True, True), "it is still pending, and not there"
        (made.backing / "shard").write_bytes(b"12345")
        others.say(b"shard")
        assert not lookup.goes_on()
        assert lookup.found is not None
        assert (
            lookup.found.size,
            others.peers.waiting,
            others.peers.waits,
            others.peers.waits_in_vain,
        ) == (5, 0, 1, 0)

    played(tmp_path, scenario)


@clause("S172")
def test_what_is_not_pending_any_more_is_looked_at_once_more(tmp_path: Path) -> None:
    """It is there when its node says so: nobody who waited is told otherwise.

    And one that was removed meanwhile is not waited for.
    """

    def scenario(made: World, others: Others) -> None:
        others.say(b"kept", b"gone")
        kept = Lookup(made, b"kept")
        gone = Lookup(made, b"gone")
        assert (kept.goes_on(), gone.goes_on()) == (True, True)
        (made.backing / "kept").write_bytes(b"x")
        others.say()
        assert (kept.goes_on(), gone.goes_on()) == (False, False)
        assert (kept.found is not None, gone.error) == (True, errno.ENOENT)

    played(tmp_path, scenario)


@clause("S172")
@pytest.mark.parametrize("state", [NodeState.AWAY, NodeState.LEFT, NodeState.GONE, None])
def test_a_node_that_does_not_live_is_not_waited_for(
    tmp_path: Path, state: NodeState | None
) -> None:
    def scenario(made: World, others: Others) -> None:
        others.say(b"shard")
        lookup = Lookup(made, b"shard")
        assert lookup.goes_on()
        if state is None:
            others.peer.asked_at = TERMS.node_timeout_s + 1
            others.say(b"shard")
        else:
            others.say(b"shard", state=state)
        assert (lookup.goes_on(), lookup.error) == (False, errno.ENOENT)

    played(tmp_path, scenario)


@clause("S172")
def test_nobody_waits_for_longer_than_that_nor_twice_in_a_row(tmp_path: Path) -> None:
    """Who looks the name up while another one does waits for that one, and then asks: together they
    wait no longer than one.
    """

    def scenario(made: World, others: Others) -> None:
        others.say(b"shard")
        first = Lookup(made, b"shard")
        assert first.goes_on()
        others.clock += LONG_S / 2
        others.say(b"shard")
        assert first.goes_on()
        others.clock += LONG_S / 2
        others.say(b"shard")
        assert (first.goes_on(), first.error) == (False, errno.ENOENT)
        second = Lookup(made, b"shard")
        assert (second.goes_on(), second.error) == (False, errno.ENOENT)
        others.clock += LONG_S
        assert Lookup(made, b"shard").goes_on()

    played(tmp_path, scenario)


@clause("S172")
def test_time_ends_a_wait_without_any_news(tmp_path: Path) -> None:
    """As where the backing directory hangs, and no record can be read."""

    async def scenario(made: World, others: Others) -> None:
        others.peers._monotonic = trio.current_time
        others.say(b"shard")
        with pytest.raises(FileNotFoundError):
            await made.do(made.fs.lookup(ROOT, b"shard"))
        assert others.peers.waits_in_vain == 1

    played(tmp_path, scenario, wait_for_peers_s=0.05)


@clause("S172")
def test_a_killed_caller_ends_its_own_wait_and_no_other(tmp_path: Path) -> None:
    def scenario(made: World, others: Others) -> None:
        others.say(b"shard", b"other")
        killed = Lookup(made, b"shard")
        other = Lookup(made, b"other")
        assert (killed.goes_on(), other.goes_on()) == (True, True)
        killed.killed()
        assert (killed.goes_on(), killed.error, others.peers.awaited) == (
            False,
            errno.ENOENT,
            [b"other"],
        )
        others.say(b"shard", b"other")
        assert other.goes_on()
        others.clock += LONG_S
        assert Lookup(made, b"shard").goes_on(), "the next one has its own time"

    played(tmp_path, scenario)


@clause("S172")
def test_a_caller_that_is_killed_while_the_backing_directory_is_asked_does_not_wait_again(
    tmp_path: Path,
) -> None:
    """What is known already would do as an answer, but not for ever anew."""

    def scenario(made: World, others: Others) -> None:
        assert not Lookup(made, b"shard").goes_on()
        others.say(b"shard")
        killed = Lookup(made, b"shard")
        with hanging(made, "lstat"):
            killed.asks()
            assert (others.peers.awaited, others.peers._bells) == ([b"shard"], {})
            killed.killed()
            assert (killed.goes_on(), killed.error, others.peers.awaited) == (
                False,
                errno.ENOENT,
                [],
            )

    played(tmp_path, scenario)


@clause("S172")
def test_names_that_no_live_node_has_do_not_wait_nor_ask_twice(tmp_path: Path) -> None:
    def scenario(made: World, others: Others) -> None:
        others.say(b"shard")
        calls = made.calls.requests.statistics().calls.get("lookup", 0)
        lookup = Lookup(made, b"new")
        assert (lookup.goes_on(), lookup.error) == (False, errno.ENOENT)
        assert made.calls.requests.statistics().calls["lookup"] == calls + 1

    played(tmp_path, scenario)


@clause("S172")
def test_before_all_records_were_read_any_name_may_come(tmp_path: Path) -> None:
    """The last worker had a lookup that waited; the kernel has sent it again."""

    def scenario(made: World, others: Others) -> None:
        others.peers.known = False
        lookup = Lookup(made, b"shard")
        assert lookup.goes_on()
        others.peers.known = True
        others.say(b"shard")
        assert lookup.goes_on()
        others.say(b"other")
        assert (lookup.goes_on(), lookup.error) == (False, errno.ENOENT)

    played(tmp_path, scenario)


@clause("S172")
def test_what_came_with_a_name_that_was_waited_for_is_seen_too(tmp_path: Path) -> None:
    """However long what was looked for in vain may be remembered."""

    def scenario(made: World, others: Others) -> None:
        others.say(b".metadata")
        shard = Lookup(made, b"shard")
        metadata = Lookup(made, b".metadata")
        assert (shard.goes_on(), metadata.goes_on()) == (False, True)
        for name in ("shard", ".metadata"):
            (made.backing / name).write_bytes(b"x")
        others.say()
        assert (metadata.goes_on(), metadata.found is not None) == (False, True)
        again = Lookup(made, b"shard")
        assert (again.goes_on(), again.found is not None) == (False, True)

    played(tmp_path, scenario)


@clause("S172")
def test_off_is_the_default(tmp_path: Path) -> None:
    def scenario(made: World, others: Others) -> None:
        others.say(b"shard")
        lookup = Lookup(made, b"shard")
        assert (lookup.goes_on(), lookup.error) == (False, errno.ENOENT)

    played(tmp_path, scenario, wait_for_peers_s=0.0)


@clause("S172")
def test_what_this_node_has_removed_itself_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    (tmp_path / "backing" / "shard").write_bytes(b"old")

    async def scenario(made: World, others: Others) -> None:
        others.say(b"shard")
        await made.do(made.fs.lookup(ROOT, b"shard"))
        await made.do(made.fs.unlink(ROOT, b"shard"))
        lookup = Lookup(made, b"shard")
        assert (lookup.goes_on(), lookup.error) == (False, errno.ENOENT)

    played(tmp_path, scenario)


@clause("S172")
def test_so_many_wait_and_no_more(tmp_path: Path) -> None:
    def scenario(made: World, others: Others) -> None:
        others.say(b"", of_directories=True)
        lookups = [Lookup(made, b"shard%d" % number) for number in range(WAITING_MAX + 1)]
        assert [lookup.goes_on() for lookup in lookups] == [True] * WAITING_MAX + [False]
        assert lookups[-1].error == errno.ENOENT
        others.say()
        assert not any(lookup.goes_on() for lookup in lookups[:-1])
        assert (others.peers.waiting, others.peers._bells) == (0, {})

    played(tmp_path, scenario)


@clause("S172")
def test_a_directory_that_this_node_has_made_too_and_not_yet_persisted(tmp_path: Path) -> None:
    """What others have in it is there when it is."""

    async def scenario(made: World, others: Others) -> None:
        directory = (await made.do(made.fs.mkdir(ROOT, b"iter", 0o755, CALLER))).ino
        others.say(b"iter/shard")
        lookup = Lookup(made, b"shard", directory)
        assert lookup.goes_on()
        await made.drained()
        (made.backing / "iter" / "shard").write_bytes(b"x")
        others.say(b"iter/shard")
        assert (lookup.goes_on(), lookup.found is not None) == (False, True)

    played(tmp_path, scenario)


# -- what of this node others may wait for


def pending(made: World) -> set[bytes]:
    with made.fs.lock:
        told = made.inner.awaited.pending()
    assert not told.of_directories
    return set(told.paths)


@clause("S172")
def test_names_that_were_made_here_are_told_until_they_are_persisted(tmp_path: Path) -> None:
    async def scenario(made: World, _others: Others) -> None:
        directory = (await made.do(made.fs.mkdir(ROOT, b"iter_tmp", 0o755, CALLER))).ino
        shard = await made.write(b"shard", b"x", directory)
        await made.do(made.fs.link(shard, directory, b"second"))
        await made.do(made.fs.symlink(ROOT, b"latest", b"iter", CALLER))
        await made.write(b"deleted", b"x")
        await made.do(made.fs.unlink(ROOT, b"deleted"))
        await made.write(b"file.tmp", b"x")
        await made.do(made.fs.rename(ROOT, b"file.tmp", ROOT, b"file", 0))
        opened, _ = await made.create(b"still open")
        assert pending(made) == {
            b"iter_tmp",
            b"iter_tmp/shard",
            b"iter_tmp/second",
            b"latest",
            b"file",
        }
        await made.do(made.fs.rename(ROOT, b"iter_tmp", ROOT, b"iter", 0))
        assert pending(made) == {b"iter", b"iter/shard", b"iter/second", b"latest", b"file"}
        await made.close(opened)
        assert b"still open" in pending(made)
        await made.drained()
        assert pending(made) == set()

    played(tmp_path, scenario)


@clause("S172")
def test_what_waits_for_a_decision_is_not_told(tmp_path: Path) -> None:
    async def scenario(made: World, _others: Others) -> None:
        await made.write(b"latest", b"x")
        with made.fs.lock:
            (op,) = made.log
            op.last_error = WITHHELD
            made.log.park(op)
            made.state.commit()
        assert pending(made) == set()

    played(tmp_path, scenario)


@clause("S172")
def test_of_very_many_names_the_directories_are_told(tmp_path: Path) -> None:
    async def scenario(made: World, _others: Others) -> None:
        directory = (await made.do(made.fs.mkdir(ROOT, b"many", 0o755, CALLER))).ino
        for number in range(PATHS_MAX):
            await made.do(made.fs.mkdir(directory, b"d%d" % number, 0o755, CALLER))
        with made.fs.lock:
            told = made.inner.awaited.pending()
        assert (set(told.paths), told.of_directories) == ({b"", b"many"}, True)
        names = NameFilter.from_text(told.to_text(5))
        assert names is not None
        assert (names.may_have(b"many", os.urandom(8)), names.may_have(b"elsewhere", b"x")) == (
            True,
            False,
        )

    played(tmp_path, scenario)
