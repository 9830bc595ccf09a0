"""What `train(run)` holds: the generation's store, and the state from whoever has it.

Of one process, across generations.

A process keeps its last state until the next one is whole, so at any moment of a rebuilding it has
one complete copy, or had none before. Main thread only, but for `abort`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from acpfs.errors import ConfigError, RefusedError
from acpfs.logger import get_logger
from acpfs.training.guard import Guard, theirs
from acpfs.training.host_state import HostState, Taken
from acpfs.training.marks import Marks
from acpfs.training.memory_left import name_of
from acpfs.training.messages import Ask, Phase, Stopped
from acpfs.training.mounted import node_name
from acpfs.training.policy import Policy
from acpfs.training.sources import Having, Origin, Sources, Tag, sources
from acpfs.training.torch import snapshot
from acpfs.training.torch.buddy import Buddy, packed, unpacked
from acpfs.training.torch.buddy_copies import PIECE_S, BuddyCopies, Parcel, copied, ring
from acpfs.training.torch.end_mark import EndMark, local
from acpfs.training.torch.gate import ExplicitGate
from acpfs.training.torch.generation import Generation, any_tensor
from acpfs.training.torch.holding import Holding, TorchHolding
from acpfs.training.torch.hooks import UpdateCalls, UpdateHooks
from acpfs.training.torch.host_parts import host_state
from acpfs.training.torch.left_state import LeftState, State, leave_state, left_state
from acpfs.training.torch.store import LinkStore
from acpfs.training.torch.transfer import receive, receive_bytes, send, send_bytes

log = get_logger(__name__)


class Run:
    """One per process."""

    def __init__(
        self,
        directory: Path,
        job: str,
        rank: int,
        world: int,
        marks: Marks,
        policy: Policy,
        on_update: Callable[[], None],
    ) -> None:
        """`on_update`: called behind each update."""
        self.directory = directory
        self.rank = rank
        self.world = world
        self.generation = 0
        self._job = job
        self._marks = marks
        self._policy = policy
        self._groups = Generation(marks, policy)
        self._entry = ExitStack()
        """Whatever is opened in it counts as a group's connection."""
        self._buddy = Buddy(rank, world)
        self._copies = BuddyCopies(rank, policy.buddy_every, lambda: marks.held)
        self._named = 0
        """Step of the newest checkpoint in the mount that this process knows of."""
        self._state: State | LeftState | None = None
        """What this process has, or can have of the one before; None: nothing, or nothing whole."""
        self._is_first = True
        """Nobody has asked yet what the process before this one has left."""
        self._lineage = 0
        """The generation in which all took another state than the one of their last step: what was
        left before it is void.
        """
        self._store: Any = None
        """Kept: what torch has of a store written in Python ends with the Python object."""
        self._on_update = on_update
        self.guard = Guard()
        self.guard.at_end.append(lambda _: self._switch_off())
        self._packed = b""
        """Host state for the buddy, of the update that is ready."""
        self.at: Callable[[str], object] = str
        """Called at points by name, for drills."""

    # -- what a loop uses

    @property
    def store(self) -> Any:
        """Where this generation's ranks meet; nobody's death ends it but the coordinator's."""
        return self._store

    def control(self) -> Any:
        """gloo's group of all ranks of this generation: whatever is said over it ends with its
        connections, and leaves nothing that was not said. A collective the first time.

        Raises:
            ConfigError: a backend that nobody can be got out of, or that no device has seen.
        """
        return self._groups.control or self._groups.make_control()

    def restore(
        self,
        *,
        model: Any,
        optimizer: Any,
        scheduler: Any = None,
        scaler: Any = None,
        state: Mapping[str, Any] | None = None,
        after_update: Callable[[], None] | None = None,
        step: int | None = None,
    ) -> int:
        """Give model, optimizers and all the rest their state; the step that they are at then.

        Called by all ranks behind building them.

        Arguments are those of `protect`, but for `step`: that of the checkpoint which the function
        has loaded by itself, 0 without one. Where no newer copy is left, all go on from that. None:
        what `snapshot` has written is loaded here.

        Raises:
            ConfigError: something that cannot be told from the model and the optimizers.
        """
        group = self._groups.make_control()
        self._groups.order_buckets(model)
        held = TorchHolding(model, several(optimizer), group)
        held.begun = step
        return self.restore_held(
            held, several(scheduler), scaler=scaler, further=state, after_update=after_update
        )

    def restore_held(
        self,
        held: Holding,
        schedulers: Sequence[Any],
        *,
        scaler: Any = None,
        further: Mapping[str, Any] | None = None,
        after_update: Callable[[], None] | None = None,
    ) -> int:
        """The same for whoever brings a holding. All but that one are as for `restore`."""
        group = self.control()
        progress = self._groups.progress
        host = host_state(
            *(held.optimizers, held.buffers, self._policy.buffers_bytes_max),
            frozen=held.frozen,
            schedulers=schedulers,
            scaler=scaler,
            further=further,
            after_update=after_update,
        )
        end = EndMark(
            *(held.live, self._policy.copies_bytes_max),
            is_told=after_update is not None,
            is_done=progress.wait_updated if progress.device.is_behind else None,
        )
        fresh = State(
            held,
            host,
            UpdateHooks(
                held.optimizers,
                self._marks,
                ExplicitGate(group, votes=self._copies if self._policy.buddy_every else None),
                UpdateCalls(self._ready(held, host, end), self._at, self._meet),
                end=end,
                guard=self.guard,
                progress=progress,
            ),
            end,
        )
        has_copies = self._meet_buddies(held)
        found = self._found_out(fresh)
        self.at("restoring")
        before = self._state
        if found.origin is Origin.MEMORY:
            self._lineage = found.lineage
            self._take(found, fresh)
            held.spread(found.givers)
        else:
            self._lineage = self.generation
            self._state = None  # it is of no use any more
            self._load(found, fresh)
        host.begin(found.step)
        first = packed(host.taken(found.step))
        self._buddy.meet(group, first)
        self._buddy.begin(found.step, first)
        self._marks.resume(found.step)
        end.note()
        self._state = fresh
        if before is not None:
            before.release()
        fresh.hooks.install()
        self._copies.only(found.tag)
        if has_copies:
            self._copy(fresh, found.step)
        self._entry.close()
        log.info("restored", step=found.step, origin=found.origin.value, generation=self.generation)
        return found.step

    def snapshot(self) -> Path:
        """Write a checkpoint of the step that was done last; a collective of all ranks.

        For the case that all copies are lost.
        """
        state = self._state
        if not isinstance(state, State):
            raise ConfigError("snapshot comes after restore")
        state.hooks.wait_done()
        step = self._marks.now.done
        path = snapshot.save(
            *(self.directory, self._job, self.rank, self.generation, step, state.held.layout),
            *(state.held.writer(state.host, self.rank), self._policy, self._groups.gathered),
        )
        self._named = step
        return path

    @contextmanager
    def long_operation(self) -> Iterator[None]:
        """Evaluation: whatever is done to parameters in it, such as averaged ones swapped in, no
        rank is given.

        They are copied at its beginning, up to `copies_bytes_max`.
        """
        self.guard.ours(self._keep)
        yield

    def _keep(self) -> None:
        if isinstance(self._state, State) and not self._marks.updating:
            self._state.end.keep()

    # -- what its life needs

    def enter(self, generation: int, ask: Ask) -> None:
        """A generation begins. `ask`: how its store is asked."""
        self.generation = generation
        self._store = LinkStore(ask)
        self._groups = Generation(self._marks, self._policy)
        self._entry = ExitStack()
        self._entry.enter_context(self._groups.noting())

    def stop(self, *, damaged: bool) -> None:
        """The main thread is out of the loop. `damaged`: nothing in its memory is what it was.

        Raises:
            LostError: nothing of it can be read, nor works on its device.
        """
        self._entry.close()
        self._copies.leave()
        self._groups.settle(self._any_tensor)
        now = self._marks.now
        if self._state is not None:
            self._state.stop(Stopped(now.done, now.ready, now.phase), damaged=damaged)
        if now.phase is Phase.UPDATING:
            self._marks.give_up()
        if "torch.distributed" in sys.modules:
            self._groups.leave()

    def abort(self) -> int:
        """End all collectives; from any thread."""
        return self._groups.abort()

    @property
    def is_behind(self) -> bool:
        """Whether a device does collectives behind the host's back; from any thread."""
        return self._groups.is_behind

    def _any_tensor(self) -> Any:
        """One that is read to see whether any can be."""
        if isinstance(self._state, State):
            for parameters in self._state.held.live().values():
                for values in parameters.values():
                    return local(values[""])
        return any_tensor()

    def leave(self) -> int:
        """Leave what this process has to the next, since nothing brings its main thread out of C;
        how many bytes. By another thread.

        Raises:
            RefusedError: it has nothing, or what cannot be left.
            OSError: the system has no process for that.
        """
        if self.is_behind:
            raise RefusedError("a device's memory ends with its process")
        if not isinstance(self._state, State):
            raise RefusedError(
                "it has no state"
                if self._state is None
                else "what the one before has left stays where it is"
            )
        return leave_state(
            self._left_name, self._state, self._marks, self._lineage, self._buddy.kept
        )

    def rendezvous(self, *_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
        """For `init_process_group` without a store."""
        self._groups.meeting()
        yield self.store, self.rank, self.world

    def _ready(self, held: Holding, host: HostState, end: EndMark) -> Callable[[int], None]:
        def ready(step: int) -> None:
            held.look()
            end.look()
            host.take(step)
            self._packed = packed(host.taken(step))

        return ready

    def _meet(self, step: int) -> None:
        """Each rank gets what another one has taken; of one that is not protected any more
        nothing.
        """
        mine = self._packed
        self._packed = b""
        self._buddy.exchange(step, mine)

    def _switch_off(self) -> None:
        if isinstance(self._state, State):
            self._state.hooks.switch_off()

    def _at(self, point: str) -> None:
        if point == "updated":
            self._on_update()
            step = self._marks.now.done
            if isinstance(self._state, State) and self._copies.is_due(step):
                self._state.hooks.wait_done()
                self._copy(self._state, step)
        theirs(self.at, point)

    # -- copies in the memory of other ranks

    def _meet_buddies(self, held: Holding) -> bool:
        """Make the group that copies go over, where some are wanted; whether they are. A
        collective.

        Raises:
            ConfigError: ranks want different ones, or copies of what cannot be copied.
        """
        every = self._policy.buddy_every
        told = self._groups.gathered(
            (every, node_name(self.directory), held.layout.holders, held.layout.copies)
        )
        if len({one for one, *_ in told}) > 1:
            raise ConfigError(
                f"buddy_every differs between ranks: {', '.join(str(one) for one, *_ in told)}"
            )
        if every and not held.takes_copies:
            raise ConfigError(
                "buddy_every: copies in the memory of other ranks are not for this framework"
            )
        copies = min(one for *_, one in told)
        if self.rank == 0 and not self.generation:
            self._say(copies)
        if not every or self.world in (1, copies):
            return False
        offset = ring([node for _, node, *_ in told], [ranks for *_, ranks, _ in told])
        self._copies.meet(
            dist.new_group(backend="gloo", timeout=timedelta(seconds=PIECE_S)),
            *(self.world, offset),
        )
        return True

    def _say(self, copies: int) -> None:
        """What the loss of a rank means, before there is one."""
        every = self._policy.buddy_every
        if self.world == 1 or copies > 1:
            return
        log.warning(
            "shards that only one rank holds: when that rank dies, all go back to the last copy "
            f"in other ranks' memory, {every} updates at most (buddy_every)"
            if every
            else "shards that only one rank holds: when that rank dies, all go back to the last "
            "run.snapshot() in the mount, or to the beginning; buddy_every=50 keeps a copy of each "
            "in another rank's memory, and at most so many updates are lost"
        )

    def _copy(self, state: State, step: int) -> None:
        """Take one of everything at the end of that step, which it is now, and have it sent."""

        def parcel() -> Parcel:
            shards = {shard: copied(state.held.contents(shard)) for shard in state.holders}
            return Parcel(shards, packed(state.host.taken(step)))

        self._copies.take((self._lineage, step), parcel)
        theirs(self.at, "copied")

    def end(self) -> None:
        """The job has."""
        self._copies.end()

    # -- from where

    @property
    def _left_name(self) -> str:
        return name_of(self.directory, self._job, self.rank)

    def _look_for_left(self) -> None:
        """In a process that is new: what the one before has left, if it did."""
        if not self._is_first:
            return
        left = left_state(self._left_name)
        if left is not None:
            log.warning("the process before this one has left what it had", stopped=left.stopped)
            self._state = left
            self._lineage = left.lineage
            self._buddy.kept = dict(left.kept)
        self._is_first = False  # last: whoever is interrupted before asks again

    def _found_out(self, fresh: State) -> Sources:
        self._look_for_left()
        mine = Having(
            fresh.held.layout.holders,
            None if self._state is None else self._state.stopped,
            () if self._state is None else self._state.steps,
            {self._buddy.of: tuple(self._buddy.kept)},
            lineage=self._lineage,
            copies=self._copies.having,
            named=self._named,
        )
        told: list[Having] = self._groups.gathered(mine)
        found = sources(dict(enumerate(told)))
        begun = fresh.held.begun
        if begun is not None and found.origin is not Origin.MEMORY:
            if found.origin is Origin.COPIES and found.step >= begun:
                return found
            self._say_lost(told)
            return Sources(Origin.BEGINNING, begun)
        is_newest = found.origin is Origin.MEMORY or (
            found.origin is Origin.COPIES and found.step >= max(one.named for one in told)
        )
        if is_newest or not self._policy.tracker:
            return found  # what is in memory is not older: nobody waits for a file
        if found.origin is not Origin.COPIES:
            self._say_lost(told)
        seen = snapshot.newest(self.directory, self._policy.tracker, self._policy.files_s)
        return sources(dict(enumerate(self._groups.gathered(replace(mine, mount=seen)))))

    def _say_lost(self, told: Sequence[Having]) -> None:
        """No copy is whole, though some were taken."""
        kept: dict[Tag, set[int]] = {}
        for one in told:
            for tag, whose in one.copies.items():
                kept.setdefault(tag, set()).update(whose)
        if kept and self.rank == 0:
            most = max(kept, key=lambda tag: (len(kept[tag]), tag))
            log.warning(
                "ranks were lost together with those that kept their copies: all go back to the "
                "checkpoint in the mount",
                ranks=sorted(set(range(self.world)) - kept[most]),
            )

    def _take_copies(self, found: Sources, fresh: State) -> None:
        """From what each rank and its buddy keep in memory."""
        group = self._groups.control
        assert found.tag is not None
        for rank, shards in sorted(found.parcels.items()):
            for shard, (giver, whose) in sorted(shards.items()):
                if giver == self.rank:
                    contents = self._copies.parcel(whose, found.tag).shards[shard]
                    if rank == self.rank:  # a model takes what it is given: the copy stays
                        fresh.held.fill(copied(contents))
                    else:
                        send(contents, rank, group)
                elif rank == self.rank:
                    fresh.held.fill(receive(giver, group))
        self._host_of(found, fresh)
        fresh.held.spread(
            {shard: min(ranks) for one in self._holders(fresh) for shard, ranks in one.items()}
        )

    def _holders(self, fresh: State) -> list[Mapping[str, tuple[int, ...]]]:
        """Of all ranks; a collective."""
        return self._groups.gathered(fresh.held.layout.holders)

    def _packed_of(self, rank: int, found: Sources) -> bytes:
        """A rank's host state at the step that all begin with, of which this one has it."""
        if found.tag is not None and found.origin is Origin.COPIES:
            return self._copies.parcel(rank, found.tag).host
        if rank != self.rank:
            return self._buddy.kept[found.step]
        assert self._state is not None
        return packed(self._state.taken(found.step))

    def _take(self, found: Sources, fresh: State) -> None:
        """From memory: this process's, or another rank's."""
        group = self._groups.control
        if self.rank in found.coming:
            assert self._state is not None
            self._state.come(found.step, fresh, self._marks)
        if self._state is not None:
            self._state.bring()
        for shard in fresh.held.layout.holders:
            if self.rank not in found.wanting.get(shard, ()):
                assert self._state is not None
                fresh.held.fill(self._state.contents(shard))
        for shard, wanting in sorted(found.wanting.items()):
            giver = found.givers[shard]
            if self.rank == giver:
                assert self._state is not None
                for rank in wanting:
                    send(self._state.contents(shard), rank, group)
            elif self.rank in wanting:
                fresh.held.fill(receive(giver, group))
        self._host_of(found, fresh)

    def _host_of(self, found: Sources, fresh: State) -> None:
        """Random numbers and the like: one's own, the buddy's copy, or, where both are gone,
        another rank's with random numbers anew.
        """
        group = self._groups.control
        # a copy of which somebody has a part is whole in those that took it and live
        present = min(rank for rank, source in found.hosts.items() if source == rank)
        for rank, source in sorted(found.hosts.items()):
            giver = present if source is None else source
            if giver == self.rank:
                taken = self._packed_of(giver if source is None else rank, found)
                if rank == self.rank:
                    fresh.host.adopt(found.step, unpacked(taken))
                else:
                    send_bytes(taken, rank, group)
            elif rank == self.rank:
                fresh.host.adopt(found.step, unpacked(receive_bytes(giver, group)))
        fresh.host.bring(found.step)
        if found.hosts[self.rank] is None:
            log.warning(
                "random numbers of this rank are lost with its buddy: they begin anew",
                step=found.step,
            )
            torch.manual_seed(hash((found.step, self.rank)))

    def _load(self, found: Sources, fresh: State) -> None:
        """From copies, from the mount, or as it was built."""
        if found.origin is Origin.COPIES:
            self._take_copies(found, fresh)
        if found.origin is not Origin.MOUNT:
            return
        path = snapshot.of_step(self.directory, found.step, self._policy.name, self._policy.files_s)
        host = fresh.held.load(path, self.rank)
        if host is not None:
            fresh.host.adopt(found.step, Taken(host, follows=False))
            fresh.host.bring(found.step)
        self._named = found.step


def several(value: Any) -> Sequence[Any]:
    """One, none, or a list of them."""
    return () if value is None else value if isinstance(value, list | tuple) else (value,)
