"""What a user holds: `with protect(…):` around the training loop.

The life of a protected rank, and its end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from acpfs.errors import ConfigError
from acpfs.logger import get_logger
from acpfs.training import last_words
from acpfs.training.boot import JOBS, boot
from acpfs.training.drill import Drill, parsed
from acpfs.training.guard import theirs
from acpfs.training.interrupt import Charge, Interrupted, Interrupter
from acpfs.training.member import Collectives, Member
from acpfs.training.messages import Hello, Leave, Trouble, TroubleKind
from acpfs.training.mounted import tell_where, wait_safe
from acpfs.training.park import CutOffError, Park, ParkCalls, ReplacedError, told
from acpfs.training.policy import Policy

if TYPE_CHECKING:
    from acpfs.training.boot import Boot
    from acpfs.training.torch.gate import Passage
    from acpfs.training.torch.rank import TorchRank

log = get_logger(__name__)


def protect(
    directory: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    save: Callable[[int, Path], None] | None = None,
    copies: Mapping[str, Any] | None = None,
    step: int = 0,
    after_update: Callable[[], None] | None = None,
    update: Callable[[], None] | None = None,
    gate: Callable[[tuple[float, ...]], None] | None = None,
    on_stopped: Callable[[], None] | None = None,
    on_settled: Callable[[int], None] | None = None,
    on_saved: Callable[[Path], None] | None = None,
    policy: Policy | None = None,
    **settings: object,
) -> Protection:
    """Protection of this rank's state: called by all ranks, when groups, model and optimizer are
    made.

    Args:
        directory: where gasps go, in an acpfs mount; the job's own files are in `.acpfs-job` there.
        model: the module, as it is trained (DDP, FSDP2).
        optimizer: one, or several that make one update.
        scheduler: one, or several, that step once per update.
        scaler: the GradScaler, if there is one.
        state: further objects with `state_dict` and `load_state_dict`, by name. Or, in place of
            model and optimizer, a function: what has to be equal in all ranks at the end of a step,
            by name. Then `save` and `update` have to be given.
        save: `save(step, directory)` writes a checkpoint in the script's own format; without it, a
            torch distributed checkpoint.
        copies: of parameters that DDP ignores, such as experts: the beginning of their names → the
            group whose ranks have equal ones.
        step: updates that were completed before, where the loop goes on from a checkpoint.
        after_update: what the loop does from an update to the end of its step; by default the
            schedulers' and the scaler's steps.
        update: does one update without any communication, where `begin_update` and `end_update` are
            called by hand.
        gate: for a loop with a collective over all ranks between gradients and update, inside `with
            protection.gate():`; what this rank does with the values that it gave before the update,
            such as clipping. There is no other collective for a gate then.
        on_stopped: called when this rank has stopped, before anything is sent or saved. May be
            called again.
        on_settled: called with the step that this rank is at when it has done the update that it
            could. May be called again.
        on_saved: called in each survivor with the path of the checkpoint that they left, before the
            process ends.
        policy: all settings; without it, those of the environment.
        settings: single settings, by name.

    Raises:
        ConfigError: something that cannot be protected.
    """
    from acpfs.training.torch.rank import LoopCalls, OnHost, TorchRank, Trained

    own = state if callable(state) else None
    if (own is None) is (model is None):
        raise ConfigError(
            "protect needs model= and optimizer=, or state= as a function, with save= and update="
        )
    if own is not None and update is None:
        raise ConfigError(
            "acpfs knows nothing of a state of your own: give update=, and call begin_update and "
            "end_update"
        )
    policy = policy or Policy.from_environment(None, **settings)
    rank = TorchRank(
        Trained(model, _several(optimizer), own=own, copies=copies),
        OnHost(_several(scheduler), scaler, None if callable(state) else state),
        LoopCalls(save, after_update, update, gate),
        policy,
        step,
    )
    return Protection(Path(directory), rank, policy, on_stopped, on_settled, on_saved)


def _several(value: Any) -> Sequence[Any]:
    return () if value is None else value if isinstance(value, list | tuple) else (value,)


class Protection:
    """A context manager; made by `protect`."""

    def __init__(
        self,
        directory: Path,
        rank: TorchRank,
        policy: Policy,
        on_stopped: Callable[[], None] | None = None,
        on_settled: Callable[[int], None] | None = None,
        on_saved: Callable[[Path], None] | None = None,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._policy = policy
        self._on_stopped = on_stopped
        self._on_settled = on_settled
        self._on_saved = on_saved
        self._member: Member | None = None
        self._park: Park | None = None
        self._charge: Charge | None = None
        self._pid = os.getpid()
        self._handlers = ExitStack()
        """Gives signal and exception handlers back."""
        self.guard = rank.guard

    # -- life

    def __enter__(self) -> Protection:
        rank = self._rank
        policy = self._policy
        self._directory.mkdir(parents=True, exist_ok=True)
        if int(os.environ.get("LOCAL_RANK") or rank.number) == 0:
            tell_where(self._directory)  # once on each node
        return self.enter(boot(rank.number, rank.groups.gathered, self._directory, policy))

    def enter(self, booted: Boot) -> Protection:
        """Begin, with coordinators that are there."""
        rank = self._rank
        policy = self._policy
        interrupter = Interrupter(
            *(threading.get_ident(), lambda: rank.marks.updating),
            *(policy.interrupt_after_s, policy.interrupt_every_s, policy.stuck_s),
            spins=lambda: rank.groups.device.is_behind,
        )
        hello = Hello(
            *(
                rank.number,
                rank.world,
                booted.node,
                os.getpid(),
                _started(),
                rank.layout.gate,
                rank.layout.holders,
            ),
            name=policy.name,
            begun=rank.marks.now.done,
        )
        self._charge = Charge(interrupter, lambda: self._fault(None))
        member = Member(
            booted.job,
            hello,
            rank.marks,
            Collectives(rank.abort, rank.groups.clues),
            interrupter,
            policy,
            booted.call,
            on_stuck=self._charge.stand_in,
        )
        self._member = member
        self._park = Park(
            member,
            interrupter,
            rank.marks,
            rank,
            rank.number,
            self._directory,
            policy,
            ParkCalls(
                is_mine=lambda: self._charge is not None and self._charge.is_mine,
                at=rank.points,
                on_stopped=self._on_stopped,
                on_settled=self._on_settled,
            ),
        )
        try:
            member.start(booted.links, policy.protected_s)
        except BaseException:
            member.end()
            raise
        self.guard.begin(lambda: member.stopped, self._switch_off)
        rank.install()
        if policy.drill:
            rank.points.follow(
                Drill(
                    parsed(policy.drill),
                    rank.number,
                    rank.marks,
                    self._directory / JOBS / booted.job,
                )
            )
        self._handle_signals()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # under a hold a loop may exit for what an aborted collective has left in a number
        is_fault = not _in_order(value) or (value is not None and self._rank.marks.held)
        if self._member is not None and not self.guard.is_off and is_fault:
            self.guard.last(self._fault, value)
        for close in (self._handlers.close, self._rank.remove):
            self.guard.last(close)
        if not self.guard.last(self._end_member):
            self.guard.last(self._switch_off, "its end failed")

    def _end_member(self) -> None:
        if self._member is not None:
            self._member.end()

    def _switch_off(self, why: str) -> None:
        """Acpfs has failed in this rank: the others are told, and the loop is as it was before."""
        if self._member is not None:
            self._member.leave(why)
        if threading.current_thread() is threading.main_thread():
            self._handlers.close()

    def _fault(self, error: BaseException | None) -> None:
        """Do what the coordinator says, and end the process; comes back where nobody says
        anything.
        """
        while True:
            try:
                return self._handle_fault(error)
            except (Interrupted, ReplacedError):  # the first: between two lines of what handles it
                continue

    def _handle_fault(self, error: BaseException | None) -> None:
        from acpfs.training.torch.rank import trouble_kind

        assert self._park is not None
        assert self._charge is not None
        if not self._charge.take():
            return
        kind = TroubleKind.ERROR if error is None else trouble_kind(error)
        try:
            leave = self._park.run(
                Trouble(kind, told(error) if error is not None else "end of the loop")
            )
        except CutOffError as cut_off:
            log.error("no gasp: there is no coordinator", error=str(cut_off))
            self._charge.give_up()
            return
        self._leave(leave, error)

    def _leave(self, leave: Leave, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Interrupted):
            last_words.tell_error(error)
        log.warning("this rank ends", status=leave.status, text=leave.text, gasp=leave.gasp)
        if self._on_saved is not None and leave.gasp:
            try:
                self._on_saved(self._directory / leave.gasp)
            except BaseException:  # the checkpoint is there, and the status says so
                log.exception("on_saved failed")
        if self._member is not None:
            self._member.end()
        durability = self._policy.durability
        if leave.gasp and durability != "ram":  # while SIGTERM is still held off
            tracker = self._directory / self._policy.tracker if self._policy.tracker else None
            is_safe = wait_safe(
                self._directory / Path(leave.gasp).name, tracker, durability, self._policy.durable_s
            )
            log.warning(
                f"the gasp is {durability}" if is_safe else f"the gasp is not {durability} yet",
                gasp=leave.gasp,
            )
        if (
            threading.current_thread() is threading.main_thread()
        ):  # no other may set signal handlers
            self._handlers.close()
        last_words.end_process(leave.status)

    # -- what a loop may say

    def begin_update(self) -> None:
        """Gradients are complete; returns when all ranks' are. For loops that gave `update=`."""
        self._rank.hooks.begin()

    def end_update(self) -> None:
        """The local update is complete."""
        self._rank.hooks.end()

    def gate(self) -> AbstractContextManager[Passage]:
        """Around the loop's own collective over all ranks between gradients and update, for loops
        that gave `gate=`.

        All gradients are complete where the block begins. The loop sets `values` of what this
        gives. After the block it does with them what the function given as `gate=` does, and the
        update, and nothing that waits for another rank.
        """
        return self._rank.hooks.implicit_gate()

    @contextmanager
    def long_operation(self) -> Iterator[None]:
        """Evaluation, or a step that compiles: nobody takes this rank for one that hangs.

        Whatever is done to parameters in it, such as averaged ones swapped in, is in no checkpoint.
        """
        self.guard.ours(self._begin_long)
        try:
            yield
        finally:
            self.guard.ours(self._end_long)

    def _begin_long(self) -> None:
        if self._member is not None:
            self._member.long_operation = True
            self._rank.keep()

    def _end_long(self) -> None:
        if self._member is not None:
            self._member.long_operation = False

    def at(self, reached: Callable[[str], object]) -> None:
        """Have this called with the name of each point that this rank reaches; for drills."""
        self._rank.points.follow(lambda point: theirs(reached, point))

    # -- signals

    def _handle_signals(self) -> None:
        """SIGTERM is a fault like others: a launcher sends it when another rank has died, a
        scheduler when it wants the node.
        """
        self._handlers.callback(setattr, sys, "excepthook", sys.excepthook)
        sys.excepthook = self._last_net
        if threading.current_thread() is threading.main_thread():
            self._handlers.callback(
                signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, self._terminated)
            )

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self.guard.ours(self._answer_sigterm)
        if self.guard.is_off:
            if signal.getsignal(signal.SIGTERM) == self._terminated:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)  # to the handler that was there before

    def _answer_sigterm(self) -> None:
        if os.getpid() != self._pid:  # a data loader's worker, forked while this was the handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif (
            self._member is not None and not self._member.stopped
        ):  # one that is parked ends soon, whoever commands
            if self._member.cut_off_since is None:
                self._member.tell(Trouble(TroubleKind.ERROR, "SIGTERM"))
            else:  # nobody would hear of it, and only SIGKILL could end this process
                self._handlers.close()
                os.kill(os.getpid(), signal.SIGTERM)

    def _last_net(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        """An `Interrupted` that came between the loop and `__exit__`."""
        if self._member is not None and self._member.stopped and not self.guard.is_off:
            self.guard.last(self._fault, value)
        sys.__excepthook__(kind, value, trace)


def _in_order(error: BaseException | None) -> bool:
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))


def _started() -> int:
    """Field 22 of /proc/self/stat."""
    return int(
        Path("/proc/self/stat")
        .read_text(encoding="ascii", errors="replace")
        .rpartition(")")[2]
        .split()[19]
    )
