"""Lets each function of acpfs that a loop reaches fail once: which ones these are is found by
running the loop. No torch.

A path is who is called and by which way in; what the way in itself is, and what it leaves to the
guard, is the test's to say.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import CodeType, FrameType

from acpfs import compatible, training
from acpfs.training.boot import Boot
from acpfs.training.messages import Goodbye, Message, Trouble
from tests.training.scripted_coordinator import JOB, ScriptedCoordinator

TREES = tuple(str(Path(package.__file__ or "").parent) for package in (training, compatible))
IN_STEP = frozenset(
    {
        "hooks._before",
        "hooks._after",
        "hooks.begin",
        "hooks._begin",
        "hooks.end",
        "hooks.implicit_gate",
        "hooks.__init__",
        "hooks.__call__",
        "hooks._has_overflowed",
        "gate.wait",
        "gate.__init__",
        "held_signals.deliver",
        "protection.begin_update",
        "protection.end_update",
        "protection.gate",
        "protection.long_operation",
        "protection.__exit__",
        "protection._terminated",
        "protection._in_order",
    }
)
"""What is called by the loop or stays in step with other ranks, and leaves all else to the
guard.
"""
CALLBACKS = frozenset(
    {
        "lightning.on_train_end",
        "lightning.on_exception",
        "lightning._end",
        "lightning.on_validation_start",
        "lightning.on_validation_end",
        "lightning.on_train_batch_start",
        "lightning.state_dict",
        "lightning.load_state_dict",
        "transformers.on_train_end",
        "transformers._long_evaluate",
    }
)
"""What frameworks call."""
AROUND = frozenset({"transformers._protected_train", "framework.wrapper"})
"""What the whole loop is called by: no way in of what the loop calls."""
DEEP = 5
"""So many of acpfs's functions inside each other: what fails below goes the same way up."""
ADAPTERS = str(Path(TREES[0]) / "frameworks")
"""How deep ever: what is called here as a part of the program is acpfs's own all the same."""
Path_ = tuple[CodeType, ...]


class InjectedError(Exception):
    """A bug."""


def name_of(code: CodeType) -> str:
    return f"{Path(code.co_filename).stem}.{code.co_name}"


class Seen:
    """Calls of acpfs's functions by who calls them, and by the way in; one of them fails, at its
    first time.

    Give it to `sys.setprofile`.
    """

    def __init__(self, fails_at: Path_ | None = None, ways_in: frozenset[str] = IN_STEP) -> None:
        self.paths: dict[Path_, str] = {}
        self.fails_at = fails_at
        self.has_failed = False
        self._ways_in = ways_in | AROUND

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(TREES):
            return
        if name_of(code) in self._ways_in or code.co_filename.endswith("guard.py"):
            return
        whole = self._path(frame)
        if name_of(code) in CALLBACKS and len(whole) <= 2:  # deeper it is another one of that name
            return
        name = " > ".join(name_of(one) for one in reversed(whole))
        if "wire." in name:  # how often is a matter of time
            return
        if len(whole) > DEEP and not code.co_filename.startswith(ADAPTERS):
            return
        path = (*whole[:2], whole[-1])
        self.paths.setdefault(path, name)
        if path == self.fails_at and not self.has_failed:
            self.has_failed = True
            raise InjectedError(name)

    def _path(self, frame: FrameType | None) -> Path_:
        found: list[CodeType] = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(TREES) and name_of(code) not in AROUND:
                found.append(code)
            frame = frame.f_back
        return tuple(found)


class Coordinator:
    """Of one rank, in a thread; ends with its connection."""

    def __init__(self) -> None:
        self.scripted = ScriptedCoordinator()
        self.goodbyes: list[Goodbye] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self.scripted.welcome()
        while not self.goodbyes:
            message = self.scripted.link.receive(600).message
            if isinstance(message, Goodbye):
                self.goodbyes.append(message)
            self.hears(message)
        self.scripted.link.close()

    def hears(self, message: Message) -> None:
        """Nobody is there any more for a loop that is left by an exception; tests may want another
        answer.
        """
        if (
            isinstance(message, Trouble) and message.text != "SIGTERM"
        ):  # which loops here send themselves
            self.goodbyes.append(Goodbye(why=f"trouble: {message.text}"))

    def boot(self) -> Boot:
        return Boot(JOB, "node", {0: self.scripted.member_end}, lambda _: self.scripted.member_end)

    def heard(self) -> Goodbye:
        self._thread.join()
        return self.goodbyes[0]
