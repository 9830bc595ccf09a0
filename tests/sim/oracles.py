"""What decides that a history is wrong, by what anybody can see: answers, the mount, the storage.

No oracle looks into the engine. Each program works below a directory of its own and remembers what
it was told (`Told`). What the storage shows must be, for each program, one of the moments of its
history, never an earlier one than before; and over all programs, nothing without what was told
before it began.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tests.sim.shown import (
    LINKS,
    MODE,
    MTIME,
    PREFIX,
    SAME,
    Shown,
    as_asked,
    attribute,
    bare,
    below,
    differences,
    expected,
    is_as_told,
    is_free,
    names_of,
    write,
)
from tests.sim.trace import Finding

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Moment:
    """What a program's directory was, from when it was told on."""

    shown: Shown
    began: int
    told: int
    """Numbers of events of all programs: the first of its call, and its answer."""
    is_gradual: bool = False
    """It changes a file with several names, which others see one by one."""
    is_owed: bool = True
    """Nothing that begins later is shown without it."""
    contents: Shown = field(init=False, repr=False, compare=False)
    """Without attributes: in these there is no order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "contents", bare(self.shown))

    def is_halfway(self, shown: Shown, before: Moment) -> bool:
        """Some files have the content of this moment, some the one of that earlier moment."""
        return shown.keys() == self.contents.keys() and all(
            content in (self.contents[path], before.contents.get(path))
            for path, content in shown.items()
        )


@dataclass(slots=True)
class LateClose:
    """A file that was mapped still when all of acpfs was killed: its close counts (S466), with what
    was in it then, or what was stored through the mapping since.
    """

    contents: Sequence[bytes]
    first: int
    """The number of the moment at which it was closed: the close has its place there or later."""
    end: int | None = None
    """Of the moment from which on it is told; None: it has not been seen."""

    def is_of(self, at: int, content: bytes | None) -> bool:
        """Whether that can be the file's content at that moment, which does not know of the
        close.
        """
        is_within = self.first <= at and (self.end is None or at < self.end)
        return is_within and content is not None and is_mixed(content, self.contents)


class Told:
    """The history of one program, as it was told."""

    _events = itertools.count(1)

    def __init__(self, directory: bytes, at_first: Shown) -> None:
        self.directory = directory
        self.moments = [Moment(at_first, 0, 0)]
        self.pending: Moment | None = None
        """A call is under way that would make it so."""
        self.at = 0
        """The earliest moment that the storage can be at now."""
        self.pending_was_shown = False
        self.durable_at = 0
        """The moment that a loss of power must not take any more."""
        self.mirrored_at = 0
        """The moment that a loss of RAM must not take any more."""
        self.became: dict[bytes, list[bytes]] = {}
        """A large content that was synced while the kernel went on writing it, and what came of it:
        exception X11.
        """
        self.late_closes: dict[bytes, LateClose] = {}
        self.torn: set[bytes] = set()
        """Directories that somebody else has removed on the storage, until they are made again."""
        self.were_torn: set[bytes] = set()
        """All that were, at some time."""
        self.may_remove_early = False
        """The storage is full: deletions make room, so they may pass what waits for that."""
        self.let_go: set[bytes] = set()
        """Files that had no name any more when their writer died with the machine: of one that
        outgrew RAM the place of an earlier fsync goes with it (S435), and nothing waits for that.
        """

    @property
    def now(self) -> Shown:
        return self.moments[-1].shown

    def event(self) -> int:
        """The number of something that happens now."""
        return next(self._events)

    def seen(self, shown: Shown) -> Shown:
        """What a tree shows of the program's directory, with what somebody else has removed."""
        found = below(shown, self.directory)
        for directory in self.torn:
            found.setdefault(directory, b"")
        return found

    def begin(self, shown: Shown, *, is_gradual: bool = False, since: int = 0) -> None:
        """A call that makes it so.

        `since`: it may have had its place in the order since that event.
        """
        self.pending = Moment(shown, since or self.event(), 0, is_gradual)

    def end(self, *, is_owed: bool = True) -> None:
        """It was told that the call is done. `is_owed`: and has its place in the order."""
        assert self.pending is not None
        if self.pending.shown != self.now:
            self.moments.append(replace(self.pending, told=next(self._events), is_owed=is_owed))
        self.pending = None
        self.pending_was_shown = False

    def is_mirrored(self) -> None:
        """Status says that a loss of RAM would lose nothing now."""
        self.mirrored_at = len(self.moments) - 1

    def left_of_ram(self, got: Shown) -> list[int]:
        """RAM was lost, and the mount shows this: which moments it can be, the call that was under
        way last.
        """
        moments = [*self.moments, *([self.pending] if self.pending else [])]
        found = self.of_contents(got)
        return [at for at in found if is_as_told(got, moments[at].shown)] or found

    def of_contents(self, got: Shown) -> list[int]:
        """The same by contents alone: the mount may show attributes that came after what was
        lost.
        """
        least = max(self.at, self.mirrored_at)
        moments = [*self.moments, *([self.pending] if self.pending else [])]
        contents = bare(got)
        found = [at for at in range(least, len(moments)) if self._is_like(moments[at], contents)]
        halfway = -1 if found else self._halfway_from(contents, least)
        return found if halfway < 0 else [halfway]

    def go_back(self, found: Sequence[int], got: Shown, *, is_mirrored: bool) -> None:
        """What came after those moments was lost with RAM, but for attributes, which have no order:
        a content may have those of a later moment, or, where there was no mirror, earlier ones;
        also those that it got under another name.
        """
        at = found[-1]
        first = found[0] if is_mirrored else 0
        moments = [*self.moments, *([self.pending] if self.pending else [])]
        shown = dict(moments[at].shown)
        links = {} if is_mirrored else expected(shown)
        for path, content in bare(got).items():
            key = attribute(path, LINKS)
            # where nobody ends what was begun, also two that have the same content
            is_another = key in got and got[key] != links.get(key, got[key])
            if shown[path] != content or is_another:  # names of one file that are two by now
                for name in names_of(shown, path):
                    shown.pop(attribute(name, SAME), None)
                shown[path] = content
        for key in [key for key in {*shown, *got} if is_free(key)]:
            values = set(_values(moments, at, first, key))
            if key.endswith(PREFIX + MTIME) and None in values:
                shown.pop(key, None)  # at one of them nobody knew
            elif got.get(key) in values - {shown.get(key)}:
                shown.pop(key, None)
                shown.update({key: got[key]} if key in got else {})
        if at == len(self.moments):
            self.end()
        else:
            self.pending = None
            del self.moments[at + 1 :]
        self.moments[-1] = replace(self.moments[-1], shown=shown)

    def since_owed(self) -> list[Shown]:
        """What it was at the last moment that has a place in the order, and at those that came
        since.
        """
        owed = max(at for at, moment in enumerate(self.moments) if moment.is_owed)
        return [moment.contents for moment in self.moments[max(owed, self.at) :]]

    def never(self) -> None:
        """The call was not carried out, as anybody can see."""
        if self.pending_was_shown:
            raise Finding("ORDER", f"the storage showed what {self.directory.decode()} never was")
        self.pending = None

    def found(self, shown: Shown) -> None:
        """The storage shows this of the program's directory."""
        for at in range(self.at, len(self.moments)):
            if self._is_shown(at, shown):
                if self._may_be_before(at, shown):
                    return
                self.at = self._first_but_for_removed(shown, at) if self.may_remove_early else at
                return
        if self._halfway_from(shown, self.at) >= 0:
            return
        if self.may_remove_early and self._but_for_removed(shown) >= 0:
            return
        if self.let_go and self._but_for_removed(shown, self.let_go) >= 0:
            return
        if self._is_pending(shown):
            self.pending_was_shown = True
            return
        raise Finding("ORDER", f"the storage shows what never was: {self.nearest(shown)}")

    def _may_be_before(self, at: int, shown: Shown) -> bool:
        """What is that moment may also be halfway to an earlier one: of a file with two names one
        has its new content, and the other one gets this old content again later.
        """
        between = self.moments[self.at + 1 : at]
        return (
            any(moment.is_gradual for moment in between)
            and 0 <= self._halfway_from(shown, self.at) < at
        )

    def _halfway_from(self, shown: Shown, least: int) -> int:
        """The latest moment from which that is halfway to a later one; -1: none."""
        moments = [*self.moments, *([self.pending] if self.pending else [])]
        pairs = itertools.combinations(range(least, len(moments)), 2)
        found = [
            at
            for at, to in pairs
            if any(moment.is_gradual for moment in moments[at + 1 : to + 1])
            and moments[to].is_halfway(shown, moments[at])
        ]
        return max(found, default=-1)

    def _is_pending(self, shown: Shown) -> bool:
        pending = self.pending
        return pending is not None and pending.contents == self._but_late_closes(
            len(self.moments), pending, shown
        )

    def _is_shown(self, at: int, shown: Shown) -> bool:
        """It is that moment, but for later writes of the kernel into what was synced, and for
        closes that count late.
        """
        moment = self.moments[at]
        return self._is_like(moment, self._but_late_closes(at, moment, shown))

    def _is_like(self, moment: Moment, shown: Shown) -> bool:
        """It is that moment, but for later writes of the kernel into what was synced."""
        return moment.contents == shown or (
            bool(self.became)
            and shown.keys() == moment.contents.keys()
            and all(
                content == moment.contents[path]
                or is_mixed(content, self.became.get(moment.contents[path], ()))
                for path, content in shown.items()
            )
        )

    def _but_late_closes(self, at: int, moment: Moment, shown: Shown) -> Shown:
        """`shown` as that moment has it, where it is only such a close that makes another of it."""
        for path, close in self.late_closes.items():
            if close.is_of(at, shown.get(path)):
                shown = {key: content for key, content in shown.items() if key != path}
                if path in moment.contents:
                    shown[path] = moment.contents[path]
        return shown

    def count_closes(self, got: Shown) -> None:
        """The mount shows this after a death of everything: such closes as it has are told."""
        for path, close in self.late_closes.items():
            content = got.get(path)
            if close.end is not None or content is None or not is_mixed(content, close.contents):
                continue
            pending = self.pending
            was_shown = self.pending_was_shown
            close.end = len(self.moments)
            self.begin(_with(self.now, path, content))
            self.end()
            if pending is not None:  # it may have been done, too
                self.pending = replace(pending, shown=_with(pending.shown, path, content))
                self.pending_was_shown = was_shown

    def overwritten(self, shown: Shown, got: Shown) -> Shown:
        """`shown` with later writes of the kernel, as far as `got` has them."""
        return {
            path: got[path]
            if path in got and is_mixed(got[path], self.became.get(content, ()))
            else content
            for path, content in shown.items()
        }

    def overwrite(self, got: Shown) -> None:
        """So it is from now on: who wrote has died."""
        now = self.overwritten(self.now, got)
        for path, content in now.items():
            if content != self.now[path]:
                self.became.setdefault(content, self.became[self.now[path]])
        self.moments[-1] = replace(self.moments[-1], shown=now)

    def _but_for_removed(self, shown: Shown, among: Collection[bytes] | None = None) -> int:
        """The latest moment that it is but for names that were removed at later ones, or halfway
        from that to a later one; -1: none. `among`: but for these names alone.
        """
        later = [moment.contents for moment in self.moments[self.at :]]
        later += [] if self.pending is None else [self.pending.contents]
        for at in reversed(range(len(later))):
            removed = {
                path: content
                for path, content in later[at].items()
                if path not in shown
                and (among is None or path in among)
                and any(path not in one for one in later[at + 1 :])
            }
            filled = {**shown, **removed}
            if filled == later[at] or self._halfway_from(filled, self.at + at) >= 0:
                return self.at + at
        return -1

    def _first_but_for_removed(self, shown: Shown, until: int) -> int:
        """The earliest moment that it can be: where names were removed before their turn, it looks
        like a later one.
        """
        later = [moment.contents for moment in self.moments]
        for at in range(self.at, until):
            missing = later[at].keys() - shown.keys()
            removed = {
                path: later[at][path]
                for path in missing
                if any(path not in one for one in later[at + 1 :])
            }
            if len(missing) == len(removed) and {**shown, **removed} == later[at]:
                return at
        return until

    def left(self, shown: Shown) -> None:
        """A loss of power would leave this."""
        is_one = self._is_pending(shown) or any(
            self._is_shown(at, shown) for at in range(self.durable_at, len(self.moments))
        )
        if not is_one and self._halfway_from(shown, self.durable_at) < 0:
            raise Finding(
                "POWER",
                f"a loss of power would leave what never was, or was before what is durable"
                f" ({self.durable_at}): {self.nearest(shown, self.durable_at)}",
            )

    def latest(self, shown: Shown) -> int:
        """The latest moment that this can be."""
        if self._is_pending(shown):
            return len(self.moments)
        found = [at for at in range(self.at, len(self.moments)) if self._is_shown(at, shown)]
        if found:
            return found[-1]
        halfway = self._halfway_from(shown, self.at)
        if halfway < 0 and self.let_go:
            return self._but_for_removed(shown, self.let_go)
        return halfway

    def nearest(self, shown: Shown, least: int | None = None) -> str:
        """For people: what it is like."""
        moments = [*self.moments, *([] if self.pending is None else [self.pending])]
        distance = [
            sum(shown.get(path) != moment.contents.get(path) for path in {*shown, *moment.contents})
            for moment in moments
        ]
        first = self.at if least is None else least
        at = min(range(first, len(moments)), key=lambda one: distance[one])
        return (
            f"nearest is moment {at} (before it showed {self.at}, now is {len(self.moments) - 1}):"
            f" {differences(shown, moments[at].contents)}"
        )


def _values(moments: Sequence[Moment], at: int, first: int, key: bytes) -> Iterator[bytes | None]:
    """All that an attribute of what is there at moment `at` was from `first` on. What has the same
    content under another name is the same file.
    """
    path, _zero, name = key.partition(PREFIX)
    content = moments[at].contents.get(path)
    for moment in moments[first:]:
        yield moment.shown.get(key)
        for other, others in moment.contents.items() if content else ():
            if others == content and other != path:
                yield moment.shown.get(attribute(other, name))


def _with(shown: Shown, path: bytes, content: bytes) -> Shown:
    """The same with a file of that content."""
    found = dict(shown)
    write(found, path, content)
    found.setdefault(attribute(path, MODE), b"644")
    return found


def is_mixed(content: bytes, later: Sequence[bytes]) -> bool:
    """Whether each page of it is one of what was there later, or was before that; its length is one
    of these, or one in the middle of a write.
    """
    return _is_a_length(len(content), later) and all(
        any(one[at : at + len(page)] == page for one in later)
        for at in range(0, len(content), PAGE_BYTES)
        for page in (content[at : at + PAGE_BYTES],)
    )


def _is_a_length(count: int, later: Sequence[bytes]) -> bool:
    """A write makes a file longer page by page."""
    return any(count == len(one) for one in later) or (
        count % PAGE_BYTES == 0
        and any(len(one) < count < len(after) for one, after in itertools.pairwise(later))
    )


def is_under_way(content: bytes, later: Sequence[bytes]) -> bool:
    """The same of a file that somebody is writing: it may be of any length in between, and what he
    has left out until now is zeros.
    """
    return len(content) <= max(map(len, later)) and all(
        page == bytes(len(page)) or any(one[at : at + len(page)] == page for one in later)
        for at in range(0, len(content), PAGE_BYTES)
        for page in (content[at : at + PAGE_BYTES],)
    )


def judge_order(programs: Sequence[Told], states: Iterable[Shown]) -> None:
    """Prefix consistency, of each program and over all of them."""
    for shown in states:
        for program in programs:
            program.found(program.seen(shown))
        if len(programs) > 1 and not any(program.may_remove_early for program in programs):
            _judge_between(programs, shown)


def _judge_between(programs: Sequence[Told], shown: Shown) -> None:
    """Nothing is shown without what another program was told before it began."""
    for first, second in itertools.permutations(programs, 2):
        at = first.latest(first.seen(shown))
        owed = next((moment for moment in first.moments[at + 1 :] if moment.is_owed), None)
        if owed is None or second.at == 0:
            continue
        if second.moments[second.at].began > owed.told:
            raise Finding(
                "ORDER",
                f"{second.directory.decode()} is shown as of moment {second.at}, and"
                f" {first.directory.decode()} only as of {at} of {len(first.moments) - 1}, where"
                f" the next was told earlier",
            )


def judge_mirrored(programs: Sequence[Told], got: Shown, *, is_mirrored: bool) -> None:
    """RAM was lost: the mount shows a moment of each program that is not before what was mirrored,
    nor before what the storage has shown, and none without what another one was told earlier.

    `is_mirrored`: it goes on from a mirror; else all that there is is the storage, which is judged
    by itself.

    From here on what came after it was never done.
    """
    found = list[list[int]]()
    for program in programs:
        shown = below(got, program.directory)
        at = program.left_of_ram(shown)
        if not at:
            least = max(program.at, program.mirrored_at)
            raise Finding(
                "MIRROR",
                f"RAM was lost, and the mount shows no moment of {program.directory.decode()} from"
                f" {least} on: {program.nearest(bare(shown), least)}",
            )
        found.append(at)
    for first, second in itertools.permutations(programs, 2):
        its, others = (one.of_contents(below(got, one.directory)) for one in (first, second))
        lost = next((one for one in first.moments[its[-1] + 1 :] if one.is_owed), None)
        moments = [*second.moments, *([second.pending] if second.pending else [])]
        if is_mirrored and lost is not None and moments[others[0]].began > lost.told:
            raise Finding(
                "MIRROR",
                f"RAM was lost: of {second.directory.decode()} there is what began after what"
                f" was lost of {first.directory.decode()}",
            )
    for program, at in zip(programs, found, strict=True):
        program.go_back(at, below(got, program.directory), is_mirrored=is_mirrored)


def judge_shown(oracle: str, got: Shown, wanted: Shown) -> None:
    """The same, or a finding. Attributes of which nothing is wanted are not compared."""
    wanted = expected(wanted)
    got = as_asked(got, wanted)
    if got != wanted:
        raise Finding(oracle, differences(got, wanted))
