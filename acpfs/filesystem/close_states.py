"""What is known of the closes of an open file, and where what was written through it is.

Each open file has one state, and goes on by `Handle.take` only. What is in no table here is a bug,
and ends the worker. Whether somebody else holds back what was written, `file_writers` says; whether
a close was that of the file, `last_close` does.
"""

from __future__ import annotations

import enum


class CloseState(enum.Enum):
    """Of one open file that can write."""

    CLEAN = "clean"
    """Nothing was seen to be written through it that is in no version."""
    WRITTEN = "written"
    """It has changed the content since its last close, or is about to."""
    WAITING = "waiting"
    """It was closed, and what was written through it is in no version yet, as others are at the
    file.
    """
    LOGGED = "logged"
    """Its close has a version in the log (`Handle.store`), and it is not known to have been the
    last one. As long as nobody relies on that version, it is in doubt.
    """
    OVERTAKEN = "overtaken"
    """The same, and it was written through it since, so that the close was that of a copy: whoever
    looks next has the version withdrawn.
    """
    OVER = "over"
    """What /proc tells: its close was that of the file, and who has a copy does not write."""


class CloseEvent(enum.Enum):
    """What happens to an open file, or is heard of it."""

    WROTE = "it was written through it, or is about to be"
    CLOSED = "a descriptor of it was closed"
    PUBLISHED = "what it had written is in a version, which is in doubt"
    UNCHANGED = "there was nothing to publish"
    FIXED = "somebody says that what was written is good"
    WENT_ON = "the close that made its version was that of a copy of it"
    OTHER_WENT_ON = "the version was withdrawn, as another's close was that of a copy"
    ENDED = "its close was that of the file"
    FOUND = "the last worker's version for it is in doubt"


class IllegalCloseError(Exception):
    """Nothing of the kind can happen to an open file in that state."""


class _Ways(dict[tuple[CloseState, CloseEvent], CloseState]):
    """Where each event leads; whoever asks for one that leads nowhere has IllegalCloseError."""

    def __missing__(self, way: tuple[CloseState, CloseEvent]) -> CloseState:
        state, event = way
        raise IllegalCloseError(f"{state.value}: {event.value}")


_WAYS: dict[tuple[CloseState, CloseEvent], CloseState] = {
    (CloseState.CLEAN, CloseEvent.WROTE): CloseState.WRITTEN,
    (CloseState.WRITTEN, CloseEvent.WROTE): CloseState.WRITTEN,
    (CloseState.WAITING, CloseEvent.WROTE): CloseState.WRITTEN,
    # heard of by the kernel's lane, or by a call that was under way when the close came
    (CloseState.LOGGED, CloseEvent.WROTE): CloseState.OVERTAKEN,
    (CloseState.OVERTAKEN, CloseEvent.WROTE): CloseState.OVERTAKEN,
    (CloseState.OVER, CloseEvent.WROTE): CloseState.WRITTEN,
    (CloseState.WRITTEN, CloseEvent.CLOSED): CloseState.WAITING,
    (CloseState.WAITING, CloseEvent.PUBLISHED): CloseState.LOGGED,
    (CloseState.WAITING, CloseEvent.UNCHANGED): CloseState.CLEAN,
    # An overtaken version is relied on from then on. It stays known, as what is written next may
    # find it in the log still.
    **{
        (state, CloseEvent.FIXED): {
            CloseState.WRITTEN: CloseState.CLEAN,
            CloseState.WAITING: CloseState.CLEAN,
            CloseState.OVERTAKEN: CloseState.LOGGED,
        }.get(state, state)
        for state in CloseState
    },
    (CloseState.LOGGED, CloseEvent.WENT_ON): CloseState.WRITTEN,
    (CloseState.OVERTAKEN, CloseEvent.WENT_ON): CloseState.WRITTEN,
    # asked once more, when the session has ended
    (CloseState.OVER, CloseEvent.WENT_ON): CloseState.CLEAN,
    (CloseState.LOGGED, CloseEvent.OTHER_WENT_ON): CloseState.WAITING,
    (CloseState.OVERTAKEN, CloseEvent.OTHER_WENT_ON): CloseState.WRITTEN,
    (CloseState.LOGGED, CloseEvent.ENDED): CloseState.OVER,
    # what it was written since is in no version, whatever the close was
    (CloseState.OVERTAKEN, CloseEvent.ENDED): CloseState.WRITTEN,
    # In the kernel's lane it may have written what is in no version, or a call is under way.
    (CloseState.CLEAN, CloseEvent.ENDED): CloseState.OVER,
    (CloseState.WAITING, CloseEvent.ENDED): CloseState.WAITING,
    # of a worker that died before it had committed what it knew later
    (CloseState.CLEAN, CloseEvent.FOUND): CloseState.LOGGED,
    (CloseState.WAITING, CloseEvent.FOUND): CloseState.LOGGED,
    (CloseState.OVER, CloseEvent.FOUND): CloseState.LOGGED,
    (CloseState.WRITTEN, CloseEvent.FOUND): CloseState.OVERTAKEN,
}
CLOSE_STATES = _Ways(_WAYS)
