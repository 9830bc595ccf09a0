"""A coordinator that says what a test wants: over a socket pair, in the test's own thread."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from acpfs.training.interrupt import Interrupted, Interrupter
from acpfs.training.marks import Marks
from acpfs.training.member import Collectives, Member
from acpfs.training.messages import (
    Active,
    Ask,
    Beat,
    FromCoordinator,
    FromMember,
    Gate,
    GateResult,
    Header,
    Hello,
    Protected,
    Save,
    SavedFile,
    Sent,
    Welcome,
)
from acpfs.training.policy import Policy
from acpfs.training.wire import SocketLink

JOB = "job"
ANSWER_S = 120.0
Said = TypeVar("Said", bound=FromMember)


class ScriptedCoordinator:
    """One end of a link; `member_end` is the other."""

    def __init__(self, number: int = 0) -> None:
        own, self.member_end = (SocketLink(end) for end in socket.socketpair())
        self.link = own
        self.number = number
        self.generation = 0
        self.term = 1
        self.beats: list[Beat] = []

    def say(
        self,
        message: FromCoordinator,
        *,
        generation: int | None = None,
        term: int | None = None,
        job: str = JOB,
    ) -> None:
        own = self.generation if generation is None else generation
        self.link.send(
            Sent(
                Header(job, own, self.term if term is None else term, f"coordinator {self.number}"),
                message,
            )
        )

    def hears(self, kind: type[Said]) -> Said:
        """The next message that is no beat: it has to be of this kind."""
        while True:
            message = self.link.receive(ANSWER_S).message
            if isinstance(message, Beat) and kind is not Beat:
                self.beats.append(message)
                continue
            assert isinstance(message, kind), message
            return message

    def welcome(self) -> Hello:
        """Register the only rank."""
        hello = self.hears(Hello)
        self.say(Welcome(self.number, True, {}))
        self.say(Active(self.term, self.number))
        self.say(Protected())
        return hello


class FakeRank:
    """Tensors of nobody."""

    gate_result: GateResult | None = None

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.done: list[str] = []
        self.fails: Exception | None = None
        self.during_save = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def finish_begun(self) -> None:
        """Its updates are never left half-way."""

    def finish(self, gate: GateResult | None) -> None:
        self.marks.begin(settling=True)
        self.done.append("finish")
        if self.fails:
            raise self.fails
        self.marks.end()

    def torn(self) -> tuple[str, ...]:
        return ()

    def digests(self) -> Mapping[str, str]:
        return {"ranks-0-1": f"digest of {self.marks.now.done}"}

    def copies(self) -> Mapping[int, tuple[int, ...]]:
        return {}

    def save(self, order: Save, directory: Path, ask: Ask) -> tuple[SavedFile, ...]:
        self.done.append(f"save {order.step}")
        directory.mkdir(exist_ok=True)
        self.during_save.set()
        while not self.goes_on.wait(0.01):
            pass
        (directory / "weights").write_bytes(b"w")
        return (SavedFile("weights", 1, "00"),)


class Rig:
    """A member with its scripted coordinators; the thread that made it is the main thread."""

    def __init__(
        self,
        coordinators: int = 1,
        policy: Policy | None = None,
        world: int = 2,
        *,
        silent_ones_stay: bool = True,
    ) -> None:
        """`silent_ones_stay`: the scripted ones answer no beat, and whoever plays them may be slow:
        nobody is voted away for that.
        """
        self.policy = policy or Policy(
            beat_s=0.05, interrupt_after_s=0.01, interrupt_every_s=0.01, command_s=0.05
        )
        self.coordinators = [ScriptedCoordinator(number) for number in range(coordinators)]
        self.marks = Marks()
        self.aborted = threading.Event()
        self.clues: Callable[[], Mapping[str, int]] = dict
        self.interrupter = Interrupter(
            threading.get_ident(),
            lambda: self.marks.updating,
            self.policy.interrupt_after_s,
            self.policy.interrupt_every_s,
        )
        holders = tuple(range(world))
        hello = Hello(
            0,
            world,
            "node",
            os.getpid(),
            1,
            Gate.EXPLICIT,
            {f"ranks-{'-'.join(map(str, holders))}": holders},
        )
        self.member = Member(
            JOB,
            hello,
            self.marks,
            Collectives(self._abort, lambda: self.clues()),
            self.interrupter,
            self.policy,
        )
        if silent_ones_stay:
            self.member._look_at_active = lambda: None  # type: ignore[method-assign]

    def _abort(self) -> int:
        self.aborted.set()
        return 1

    @property
    def coordinator(self) -> ScriptedCoordinator:
        return self.coordinators[0]

    def start(self) -> None:
        """Register; the coordinators' part in a thread."""
        welcoming = threading.Thread(target=self._welcome)
        welcoming.start()
        self.member.start({one.number: one.member_end for one in self.coordinators}, ANSWER_S)
        welcoming.join()

    def gets_out(self, say: Callable[[], object]) -> None:
        """What is said gets the main thread out of a loop.

        `Interrupted` may come before that has begun, and once more behind it.
        """
        try:
            try:
                say()
                while True:
                    pass
            except Interrupted:
                self.interrupter.disarm()
        except Interrupted:  # on the way to the line above
            self.interrupter.disarm()

    def _welcome(self) -> None:
        for standby in self.coordinators[1:]:
            standby.hears(Hello)
            standby.say(Welcome(standby.number, False, {}), term=0)
        self.coordinator.welcome()

    def close(self) -> None:
        for one in self.coordinators:
            one.link.close()
        self.member.end()
        self.interrupter.disarm()  # a save that nobody commands any more is interrupted
