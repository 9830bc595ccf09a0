"""What a coordinator's state machine (`phases`, `crew`) wants to be done.

Records only: the server carries them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from acpfs.training.messages import FromCoordinator

RUN = 0
"""What claims are about: the run of the job as a whole.

Whoever replaces ranks asks no witness, so there is one run per job.
"""


@dataclass(frozen=True, slots=True)
class Send:
    """To these ranks, under the machine's generation and term."""

    ranks: tuple[int, ...]
    message: FromCoordinator


@dataclass(frozen=True, slots=True)
class Tell:
    """A line for the log."""

    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """A line for `faults.jsonl`."""

    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AskWitness:
    """Claim this run of the job; answer with `claimed`."""

    generation: int
    majority: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """Nobody is left to speak to."""


Command = Send | Tell | Record | AskWitness | Finish


class Commands:
    """Those of one event, until the server takes them."""

    def __init__(self) -> None:
        self._found: list[Command] = []

    def add(self, command: Command) -> None:
        self._found.append(command)

    def send(self, ranks: Iterable[int], message: FromCoordinator) -> None:
        """To nobody is nothing."""
        if to := tuple(ranks):
            self._found.append(Send(to, message))

    def take(self, *, is_over: bool) -> list[Command]:
        """All of them. `is_over`: the server is to finish with them, if they do not say so
        already.
        """
        if is_over and not any(isinstance(command, Finish) for command in self._found):
            self._found.append(Finish())
        found = self._found
        self._found = []
        return found
