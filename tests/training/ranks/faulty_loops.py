"""One loop again and again, on two ranks: each function of acpfs that it reaches fails once, in one
of them.

The loop has to end as without.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from acpfs.training.protection import Protection
from tests.training.injection import Coordinator, Path_, Seen
from tests.training.ranks.forked import Ranks, join_group

WORLD = 2
FAILS = 1
UPDATES = 2
"""Ranks, the one in which acpfs fails, and updates of a loop."""
Values = list[Any]
Trains = Callable[[Path], Values]
"""A script as it is with a framework: trains to its end, and gives what has to be equal.

The directory is its own.
"""


def agreed(value: Any) -> Any:
    """What the rank in which acpfs fails says, in all ranks."""
    found = [value]
    dist.broadcast_object_list(found, FAILS)
    return found[0]


def each_fails(
    name: str, values_of: Callable[[Seen], tuple[Values, str]], expected: Values
) -> None:
    """As a rank. `values_of`: what the loop comes to, and what protection ended with."""
    seen = Seen()
    assert_values(values_of(seen)[0], expected, "without a fault")
    assert len(seen.paths) > UPDATES
    ended = 0
    for path, where in agreed_paths(seen):
        fails = Seen(path if dist.get_rank() == FAILS else None)
        found, why = values_of(fails)
        assert_values(found, expected, where)
        assert fails.has_failed == (dist.get_rank() == FAILS), where
        assert not why or why.startswith("InjectedError") or why == "its end failed", why
        ended += bool(why)
    assert bool(ended) == (dist.get_rank() == FAILS)
    print(name, len(seen.paths), "calls,", ended, "of them ended protection")


def agreed_paths(seen: Seen) -> list[tuple[Path_ | None, str]]:
    names = agreed(list(seen.paths.values()))
    own = list(seen.paths) if dist.get_rank() == FAILS else [None] * len(names)
    return list(zip(own, names, strict=True))


def assert_values(found: Values, expected: Values, when: str) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other), when


# -- with a framework, which begins and ends protection by itself


@contextlib.contextmanager
def begun_with(seen: Seen) -> Iterator[list[Coordinator]]:
    """From where protection begins in here, acpfs fails as `seen` says; the coordinators that it
    had.
    """
    coordinators: list[Coordinator] = []
    entering = Protection.__enter__

    def enter(protection: Protection) -> Protection:
        coordinators.append(Coordinator())
        protection.enter(coordinators[-1].boot())
        sys.setprofile(seen)
        return protection

    # to mypy a method is nothing that changes
    setattr(Protection, "__enter__", enter)  # noqa: B010
    try:
        yield coordinators
    finally:
        sys.setprofile(None)
        setattr(Protection, "__enter__", entering)  # noqa: B010


def under_a_framework(made: Callable[[bool], Trains], directory: Path) -> None:
    """As a rank. `made`: a script, protected or not."""
    numbers = iter(range(1000))

    def values_of(seen: Seen) -> tuple[Values, str]:
        before = signal.getsignal(signal.SIGTERM), sys.excepthook
        with begun_with(seen) as coordinators:
            found = made(True)(directory / str(next(numbers)))
        assert (signal.getsignal(signal.SIGTERM), sys.excepthook) == before
        (coordinator,) = coordinators
        return found, coordinator.heard().why

    expected = made(False)(directory / "unprotected")
    each_fails(made.__name__, values_of, expected)


def assert_goes_on(made: Callable[[bool], Trains], tmp_path: Path) -> None:
    """In ranks of their own."""

    def main(rank: int) -> None:
        join_group(rank, WORLD, tmp_path / "store")
        under_a_framework(made, tmp_path / f"run-{rank}")

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # what torch imports here no rank has to
    with Ranks(WORLD, tmp_path, main) as ranks:
        assert ranks.statuses(1200) == [0] * WORLD, ranks.said()
    print(ranks.said())
