"""How far an operation has come, and whether it stands aside.

What is in no table here is a bug, and ends the worker.
"""

from __future__ import annotations

import enum


class Stage(enum.IntEnum):
    """In the order in which an operation goes through them; only the last three are persisted."""

    TENTATIVE_UNSEALED = enum.auto()
    """Both of the next two."""
    TENTATIVE = enum.auto()
    """A STORE whose descriptor was closed, but perhaps not for the last time (dup, fork): it waits
    for that.
    """
    UNSEALED = enum.auto()
    """A STORE whose staging file does not have all bytes yet; some are still in RAM.

    Known by its node's content.
    """
    LOGGED = enum.auto()
    """Nothing was done for it on the backing directory."""
    IN_DOUBT = enum.auto()
    """Handed to the backing directory at least once, which may have carried it out even if it said
    no, or nothing.
    """
    UNDER_WAY = enum.auto()
    """The same, by a group that the engine has not heard the end of."""
    COMMITTED = enum.auto()
    """Visible on the backing directory, but not yet flushed there."""


class Step(enum.Enum):
    """What happens to an operation, until it leaves the log."""

    CLOSED = "its descriptor was closed, perhaps not for the last time"
    CONFIRMED = "that was the last close, or somebody relies on it"
    OUTGROWN = "some of its bytes are in RAM, and nowhere else"
    SEALED = "its staging file has them all"
    BEGUN = "a group carries it out"
    TAKEN_BACK = "the group ended before anything was done for it"
    FAILED = "nobody knows whether that was done"
    CARRIED_OUT = "it is visible"
    LOST = "the backing directory has lost it before it was flushed"


class Aside(enum.Enum):
    """Where an operation stands beside the order, whatever its stage.

    Only `WITHHELD` and `PARKED` are persisted.
    """

    NONE = "none"
    """In the order."""
    HELD = "held"
    """In the order, but it waits for one that is not, and that it has to do with."""
    PUT_OFF = "put off"
    """A removal that waits for other members while all else goes on."""
    WITHHELD = "withheld"
    """It waits for a member that is missing."""
    PARKED = "parked"
    """The backing directory refused it for good; kept until `retry` or `discard`."""
    GUARDED = "guarded"
    """A deletion that the guard holds back."""


class IllegalStepError(Exception):
    """An operation cannot take that step from where it is."""


TABLE: dict[tuple[Stage, Step], Stage] = {
    (Stage.LOGGED, Step.CLOSED): Stage.TENTATIVE,
    (Stage.UNSEALED, Step.CLOSED): Stage.TENTATIVE_UNSEALED,
    (Stage.TENTATIVE_UNSEALED, Step.CLOSED): Stage.TENTATIVE_UNSEALED,  # through another descriptor
    (Stage.TENTATIVE, Step.CLOSED): Stage.TENTATIVE,
    (Stage.TENTATIVE, Step.CONFIRMED): Stage.LOGGED,
    (Stage.TENTATIVE_UNSEALED, Step.CONFIRMED): Stage.UNSEALED,
    (Stage.LOGGED, Step.OUTGROWN): Stage.UNSEALED,
    (
        Stage.TENTATIVE,
        Step.OUTGROWN,
    ): Stage.TENTATIVE_UNSEALED,  # a new worker sees that after the close
    (Stage.UNSEALED, Step.SEALED): Stage.LOGGED,
    (Stage.TENTATIVE_UNSEALED, Step.SEALED): Stage.TENTATIVE,
    (Stage.LOGGED, Step.BEGUN): Stage.UNDER_WAY,
    (Stage.IN_DOUBT, Step.BEGUN): Stage.UNDER_WAY,
    (
        Stage.UNDER_WAY,
        Step.BEGUN,
    ): Stage.UNDER_WAY,  # of a run, and alone now; or a group that nobody has heard of again
    (Stage.COMMITTED, Step.BEGUN): Stage.COMMITTED,  # to be flushed
    (Stage.UNDER_WAY, Step.TAKEN_BACK): Stage.LOGGED,
    (Stage.UNDER_WAY, Step.FAILED): Stage.IN_DOUBT,
    (
        Stage.COMMITTED,
        Step.FAILED,
    ): Stage.COMMITTED,  # what is folded into one that is carried out would never be given
    (Stage.UNDER_WAY, Step.CARRIED_OUT): Stage.COMMITTED,
    (Stage.IN_DOUBT, Step.CARRIED_OUT): Stage.COMMITTED,  # that is seen by where its file lies
    (Stage.COMMITTED, Step.LOST): Stage.IN_DOUBT,
}
"""Where each step leads."""
WAYS: dict[Aside, frozenset[Aside]] = {
    Aside.NONE: frozenset(Aside) - {Aside.NONE},
    Aside.HELD: frozenset(Aside) - {Aside.HELD, Aside.PUT_OFF},
    **dict.fromkeys(
        (Aside.PUT_OFF, Aside.WITHHELD, Aside.PARKED, Aside.GUARDED), frozenset({Aside.NONE})
    ),
}
"""From one to another: only the order, or what is held in it, is set aside, and what is aside comes
back first.
"""
