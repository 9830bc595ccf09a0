"""Makes a history that fails shorter, as long as it fails by the same rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.sim.aims import knobs_of
from tests.sim.choices import HAVE_MEMBERS, Choices
from tests.sim.members.plan import Plan

TRIES_MAX = 300

Call = tuple[str, int]


def shrink(choices: Choices, fails: Callable[[Choices], bool]) -> Choices:
    """`fails`: whether a history fails as the first one did. The shortest that was found."""
    search = _Search(choices, fails)
    search.narrow(replace(choices, without_faults=True))
    search.narrow(replace(search.best, in_order=True))
    for lives in range(1, knobs_of(search.best).lives):
        if search.narrow(replace(search.best, lives_max=lives)):
            break
    search.leave_out_calls()
    search.narrow(replace(search.best, without_faults=True))
    search.narrow(replace(search.best, in_order=True))
    return search.best


class _Search:
    def __init__(self, choices: Choices, fails: Callable[[Choices], bool]) -> None:
        self.best = choices
        self._fails = fails
        self._tries = 0

    def narrow(self, choices: Choices) -> bool:
        """Go on with this one if it fails, too."""
        if self._tries >= TRIES_MAX or choices == self.best:
            return False
        self._tries += 1
        if not self._fails(choices):
            return False
        self.best = choices
        return True

    def leave_out_calls(self) -> None:
        """Halves, quarters, …, single ones; from the end on, where most are of no use."""
        calls = _calls_in(self.best)
        size = max(1, len(calls) // 2)
        while True:
            for piece in _pieces(calls, size):
                if not piece <= self.best.without_calls:
                    without = self.best.without_calls | piece
                    self.narrow(replace(self.best, without_calls=without))
            if size == 1:
                return
            size //= 2


def _calls_in(choices: Choices) -> list[Call]:
    if choices.profile in HAVE_MEMBERS:
        return [("job", step) for step in range(1, Plan.drawn(choices).steps + 1)]
    knobs = knobs_of(choices)
    return [(f"p{one}", at) for one in range(knobs.programs) for at in range(knobs.calls)]


def _pieces(calls: list[Call], size: int) -> Iterator[frozenset[Call]]:
    for start in range(0, len(calls), size):
        yield frozenset(
            calls[
                len(calls) - start - size if start + size <= len(calls) else 0 : len(calls) - start
            ]
        )


def to_words(choices: Choices) -> str:
    """Options of the command that run it again."""
    words = [f"--profile {choices.profile.value} --seed {choices.seed}"]
    if choices.without_faults:
        words.append("--no-faults")
    if choices.in_order:
        words.append("--in-order")
    if choices.lives_max < Choices.LIVES_MAX:
        words.append(f"--lives {choices.lives_max}")
    for program in sorted({name for name, _at in choices.without_calls}):
        numbers = sorted(at for name, at in choices.without_calls if name == program)
        words.append(f"--without {program}:{','.join(_ranges(numbers))}")
    return " ".join(words)


def _ranges(numbers: list[int]) -> Iterator[str]:
    start = numbers[0]
    last = start
    for number in [*numbers[1:], -1]:
        if number != last + 1:
            yield f"{start}" if start == last else f"{start}-{last}"
            start = number
        last = number


def calls_of(word: str) -> frozenset[Call]:
    """What `to_words` has said behind `--without`."""
    program, _colon, ranges = word.partition(":")
    found: set[Call] = set()
    for one in ranges.split(","):
        first, _dash, last = one.partition("-")
        found |= {(program, at) for at in range(int(first), int(last or first) + 1)}
    return frozenset(found)
