"""A rank's tensors behind the interface that the member and the parked main thread use.

Main thread only, but for `abort`.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from acpfs.errors import ConfigError
from acpfs.logger import get_logger
from acpfs.training import last_words, messages
from acpfs.training.drill import Points
from acpfs.training.guard import Guard
from acpfs.training.host_state import HostState
from acpfs.training.marks import Marks
from acpfs.training.member import GenerationOverError
from acpfs.training.memory_left import GoneError
from acpfs.training.messages import Ask, GateResult, Save, SavedFile, Shard, TroubleKind
from acpfs.training.policy import Policy
from acpfs.training.torch.aborts import Aborts
from acpfs.training.torch.buddy import packed, unpacked
from acpfs.training.torch.buddy_copies import PIECE_S, BuddyCopies, ring
from acpfs.training.torch.end_mark import ChangedError, EndDigest, EndMark, Live, local
from acpfs.training.torch.gate import ExplicitGate, Gate, ImplicitGate, NoGate
from acpfs.training.torch.groups import Groups
from acpfs.training.torch.hooks import UpdateCalls, UpdateHooks, refuse_several_with_scaler
from acpfs.training.torch.host_parts import host_state
from acpfs.training.torch.layout import Copies, Layout, everywhere, layout_of
from acpfs.training.torch.local_state import LocalState, OwnState
from acpfs.training.torch.progress import LostError, Progress, SuspectError
from acpfs.training.torch.store import LinkStore
from acpfs.training.torch.writers import DistributedWriter, SingleWriter, Writer, own_failures

log = get_logger(__name__)
_OF_OTHERS = re.compile(
    # "[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer", "[enforce fail at
    # …/gloo/…cc:12]"
    r"\[[^\]]*\bgloo/[^\]]*:\d+\]"
    r"|Gloo connectFullMesh failed with"
    r"|(timed out in|failed to pass) monitoredBarrier"
    r"|^Operation timed out!"
    rf"|\b{GenerationOverError.__name__}\b"
    r"|NCCL communicator was aborted|\bnccl(Remote|System|Internal)Error\b|^FORCE STOP\b"
)
"""Nothing that a program says by itself: "connection lost to the database" is its own error."""


class Held(Protocol):
    """What a rank has where a framework shards by itself: in place of model and optimizers, as far
    as shards and files go.
    """

    layout: Layout
    buffers: dict[str, Any]

    def digest(self, shard: Shard) -> str: ...

    def live(self) -> Live:
        """Main parameters and the optimizer's state, as they are."""

    def writer(self, host: HostState, rank: int) -> Writer: ...


@dataclass(frozen=True, slots=True)
class Trained:
    """What is trained."""

    model: Any
    optimizers: Sequence[Any]
    """Where a framework shards, those that do the local update."""
    own: Callable[[], Mapping[str, Any]] | None = None
    """In place of model and optimizers, what has to be equal in all ranks; marks are then moved by
    hand.
    """
    held: Held | None = None
    """What a framework knows of its own shards."""
    copies: Copies | None = None
    """Who holds parameters that are in nothing that says it."""


@dataclass(frozen=True, slots=True)
class OnHost:
    """What belongs to it, and is in the host's memory."""

    schedulers: Sequence[Any] = ()
    scaler: Any = None
    further: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class LoopCalls:
    """What the training loop has done."""

    save_with: Callable[[int, Path], None] | None = None
    after_update: Callable[[], None] | None = None
    update: Callable[[], None] | None = None
    """What does an update, where marks are moved by hand."""
    use: Callable[[tuple[float, ...]], None] | None = None
    """What does with the values of the loop's own gate what precedes the update, where there is
    such a gate.
    """


class TorchRank:
    """Of one process. Made by all ranks at the same place, like a group."""

    def __init__(
        self,
        trained: Trained,
        on_host: OnHost,
        calls: LoopCalls,
        policy: Policy,
        begun: int,
    ) -> None:
        """`begun`: updates that were completed before.

        Raises:
            ConfigError: something that cannot be protected; the message says what, and why.
        """
        optimizers = trained.optimizers
        held = trained.held
        own = trained.own
        if calls.update is None:
            refuse_several_with_scaler(optimizers, on_host.scaler)
        self.groups = Groups(untried=policy.untried_device)
        self._policy = policy
        self.marks = Marks(begun)
        self._progress = Progress(
            *(self.groups.device, self.marks, self.groups.have_failed, policy.update_s)
        )
        self._aborts = Aborts(
            *(self.groups.device, self.groups.of_device, self._may_end_everything),
            policy.update_s,
        )
        self.number = dist.get_rank()
        self.world = dist.get_world_size()
        self.layout = (
            held.layout
            if held is not None
            else layout_of(trained.model, optimizers, trained.copies)
            if own is None
            else everywhere()
        )
        if calls.use is not None:
            self.layout = replace(self.layout, gate=messages.Gate.IMPLICIT)
        if self.world > 1 and self.layout.copies < 2 and not policy.buddy_every:
            shard = min(self.layout.holders, key=lambda name: len(self.layout.holders[name]))
            raise ConfigError(
                f"nobody else holds {shard}: a rank that dies takes it along, so a gasp needs "
                "copies (HSDP, ReplicatedZero, DDP), or buddy_every=50, which keeps one in another "
                "rank's memory; docs/TRAINING.md says how"
            )
        self._state: LocalState | OwnState | Held
        self._state = held or (
            LocalState(trained.model, optimizers, self.layout, trained.copies)
            if own is None
            else OwnState(own)
        )
        self._follows = calls.after_update is not None
        self._end = self._made_end(policy)
        self._host = host_state(
            optimizers,
            self._state.buffers,
            policy.buffers_bytes_max,
            frozen=self._state.frozen if isinstance(self._state, LocalState) else {},
            schedulers=on_host.schedulers,
            scaler=on_host.scaler,
            further=on_host.further,
            after_update=calls.after_update,
        )
        self._copies = self._made_copies(calls, held)
        self._refuse_several_devices()
        self._writer = self._made_writer(calls.save_with)
        self.groups.learn()
        self._gate = self._made_gate(calls.use)
        self.points = Points()
        self.guard = Guard()
        self.hooks = UpdateHooks(
            optimizers,
            self.marks,
            self._gate,
            UpdateCalls(self._ready, at=self._at, update=calls.update),
            end=self._end,
            guard=self.guard,
            progress=self._progress,
        )
        self.guard.at_end.append(lambda _: self.hooks.switch_off())
        self._by_hand = calls.update is not None
        self._give_back = self.groups.order_buckets(trained.model)

    def _made_copies(self, calls: LoopCalls, held: Held | None) -> BuddyCopies | None:
        """A collective.

        Raises:
            ConfigError: ranks want different ones, or what a lost rank held could not be written.
        """
        every = self._policy.buddy_every
        told = self.groups.gathered((every, socket.gethostname(), self.layout.holders))
        if len({one for one, *_ in told}) > 1:
            raise ConfigError(f"buddy_every differs between ranks: {[one for one, *_ in told]}")
        if not every or self.world == 1 or self.layout.gate is messages.Gate.NONE:
            return None
        if held is not None or calls.use is not None or calls.after_update is not None:
            raise ConfigError(
                "buddy_every: copies in the memory of other ranks are for plain torch, without "
                "gate= and after_update=: nobody could do these for a rank that is lost"
            )
        if self.number == 0 and self.layout.copies < 2:
            log.warning(
                "shards that only one rank holds: when that rank dies, the others leave the last "
                "copy that is in another rank's memory, and not the last update",
                buddy_every=every,
            )
        copies = BuddyCopies(self.number, every, lambda: self.marks.held)
        offset = ring([node for _, node, _ in told], [ranks for *_, ranks in told])
        copies.meet(self.groups.make(PIECE_S), self.world, offset)
        return copies

    def _at(self, point: str) -> None:
        copies = self._copies
        step = self.marks.now.done
        if point == "updated" and copies is not None and copies.is_due(step):
            state = self._state
            assert isinstance(state, LocalState)
            self._progress.wait_updated()
            copies.take((0, step), lambda: state.parcel(packed(self._host.taken(step))))
            self.points("copied")
        self.points(point)

    def copies(self) -> Mapping[int, tuple[int, ...]]:
        if self._copies is None:
            return {}
        self._copies.leave()
        return {step: ranks for (_, step), ranks in self._copies.having.items()}

    def _refuse_several_devices(self) -> None:
        """One rank's events are those of one device."""
        if not self.groups.device.is_behind or isinstance(self._state, OwnState):
            return
        found = {
            str(local(values[""]).device)
            for parameters in self._state.live().values()
            for values in parameters.values()
        }
        if len(found) > 1:
            raise ConfigError(
                f"this rank's parameters are on {', '.join(sorted(found))}: acpfs.training knows "
                "what one device has done"
            )

    def _made_end(self, policy: Policy) -> EndMark | EndDigest:
        state = self._state
        is_done = self._progress.wait_updated if self.groups.device.is_behind else None
        if not isinstance(state, OwnState):
            return EndMark(
                *(state.live, policy.copies_bytes_max), is_told=self._follows, is_done=is_done
            )
        (shard,) = self.layout.holders
        if state.is_live:
            return EndMark(
                *(lambda: state.live(shard), policy.copies_bytes_max),
                is_told=self._follows,
                is_done=is_done,
            )
        if is_done is not None:
            raise ConfigError(
                "state= gives copies, which are compared behind each update: that would wait for "
                "the device each time; have state= give the tensors themselves"
            )
        if self._follows:
            raise ConfigError(
                "state= gives copies, or other things than tensors, which cannot be brought back "
                "to the end of an update, "
                "so after_update= might be done twice: have state= give the tensors themselves, "
                "or do what "
                "follows an update before end_update"
            )
        return EndDigest(lambda: {shard: state.digest(shard)})

    def _made_writer(self, save: Callable[[int, Path], None] | None) -> Writer:
        if save is not None:
            return SingleWriter(save, self.layout)
        if isinstance(self._state, OwnState):
            raise ConfigError("acpfs knows nothing of a state of your own: give save= too")
        if isinstance(self._state, LocalState):
            return DistributedWriter(self._state, self._host, self.number)
        return self._state.writer(self._host, self.number)

    def _made_gate(self, use: Callable[[tuple[float, ...]], None] | None) -> Gate:
        if use is not None:
            return ImplicitGate(use)
        return (
            NoGate()
            if self.layout.gate is messages.Gate.NONE
            else ExplicitGate(self.groups.make(), votes=self._copies)
        )

    def install(self) -> None:
        """From here on updates move the marks."""
        self._end.note()
        if not self._by_hand:
            self.hooks.install()

    def remove(self) -> None:
        self.hooks.remove()
        self._give_back()
        if self._copies is not None:
            self._copies.end()

    def abort(self) -> int:
        """End all collectives; from any thread. How many connections and groups that were."""
        # the accelerator's first: each in a thread of its own, so that none holds up another
        return self._aborts.begin() + self.groups.abort()

    @property
    def gate_result(self) -> GateResult | None:
        return self._gate.result

    def finish(self, gate: GateResult | None) -> None:
        """The update that is ready, alone."""
        self.hooks.finish_alone(None if gate is None else gate.values)
        self._settle()

    def finish_begun(self) -> None:
        """The rest of an update that was left between two optimizers; what was launched is done.

        Ends this process where its device does not answer: then it holds nothing, and the others
        count it as dead.
        """
        self._settle()
        self.hooks.finish_begun()
        self._settle()

    def _settle(self) -> None:
        if not self.groups.device.is_behind:
            return
        policy = self._policy
        try:
            self.groups.device.enter_thread()
            if not self._aborts.over(policy.abort_s):
                raise LostError(f"an abort has not come back in {policy.abort_s:g} s")
            self._progress.settle(self._any_tensor, policy.probe_s)
        except Exception as error:  # noqa: BLE001  # whatever it is, nothing can be read here
            log.error("this rank's state is lost: others may hold it", why=str(error))
            last_words.tell(f"acpfs: this rank's state is lost: {error}")
            os._exit(messages.ExitStatus.TAKEN_FOR_LOST)

    def _any_tensor(self) -> Any:
        """One that is read to see whether any can be."""
        (shard, *_) = self.layout.holders
        live = self._state.live(shard) if isinstance(self._state, OwnState) else self._state.live()
        for parameters in live.values():
            for values in parameters.values():
                if isinstance(values[""], torch.Tensor):
                    return local(values[""])
        raise LostError("it has no tensors")

    def _may_end_everything(self) -> bool:
        return not self.marks.updating and self._progress.has_updated()

    def _ready(self, step: int) -> None:
        if isinstance(self._state, LocalState):
            self._state.follow()
        self._end.look()
        self._host.take(step)

    def keep(self) -> None:
        """Something begins that may change parameters, and changes them back."""
        if not self.marks.updating:
            self._end.keep()

    def torn(self) -> tuple[Shard, ...]:
        return self._end.torn()

    def digests(self) -> Mapping[Shard, str]:
        with suppress(ChangedError):  # told when it stopped; nobody will have it write
            self._end.bring()
        return {shard: self._state.digest(shard) for shard in self.layout.holders}

    def save(self, order: Save, directory: Path, ask: Ask) -> tuple[SavedFile, ...]:
        """Write what the cover gives this rank, in a group of the savers; everything is then at the
        end of that step.
        """
        self._writer.prepare(order.step)
        member = order.savers.index(self.number)
        self.groups.regroup(LinkStore(ask), member, len(order.savers))
        if order.copies:
            return self._save_copies(order, directory, member)
        if self._follows:  # it may change parameters, and a save may be tried again
            self._end.keep()
        self._end.bring()
        self._host.bring(order.step)
        with own_failures(member):
            return self._writer.write(
                directory,
                order,
                tuple(shard for shard, rank in order.cover.items() if rank == self.number),
            )

    def _save_copies(self, order: Save, directory: Path, member: int) -> tuple[SavedFile, ...]:
        """This rank goes back to its own copy, and writes what was kept of those that are lost."""
        assert self._copies is not None
        assert isinstance(self._state, LocalState)
        assert isinstance(self._writer, DistributedWriter)
        tag = (0, order.step)
        own = self._copies.parcel(self.number, tag)
        for contents in own.shards.values():
            self._state.fill(contents)
        self._host.bring_back(unpacked(own.host))
        whose = {
            shard: order.copies[shard] for shard, rank in order.cover.items() if rank == self.number
        }
        mine = tuple(shard for shard, rank in whose.items() if rank == self.number)
        others = {
            shard: self._copies.parcel(rank, tag)
            for shard, rank in whose.items()
            if rank != self.number
        }
        with own_failures(member):
            return self._writer.write_with(directory, order, mine, others)


def trouble_kind(error: BaseException) -> TroubleKind:
    """Whether an exception is this rank's own, or that of a collective or a store with somebody who
    is gone.

    What was raised while one of these was handled is of the same kind: a loop that wraps it, or
    that fails to tidy up after it.
    """
    return (
        TroubleKind.COLLECTIVE
        if any(_is_of_others(one) for one in _chain(error))
        else TroubleKind.ERROR
    )


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def _is_of_others(error: BaseException) -> bool:
    """torch's own types, and what it raises as a plain RuntimeError: gloo's transport, and a store
    in Python that was called from C++.
    """
    said = type(error) is RuntimeError and _OF_OTHERS.search(str(error)) is not None
    return said or isinstance(
        error, dist.DistError | GenerationOverError | GoneError | SuspectError
    )
