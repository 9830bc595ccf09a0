"""Whether what acpfs says of itself is so: what is persisted, and for what somebody waits.

`clean` (S417: persisted) is said of bytes that are on the storage, also after a loss of power. So
does the answer of a wait. A call that nobody answers is told with all that it may wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.sim.life import Life
from tests.sim.oracles import Told, is_mixed
from tests.sim.programs import Program
from tests.sim.shown import Shown
from tests.sim.trace import Finding


def judge_clean(life: Life, programs: Iterable[Told], stored: Shown, left: Shown) -> int:
    """Of each file that is said to be persisted, the content is stored; how many were.

    `left`: by a loss of power. Its name may be another one there, until a rename is persisted.
    """
    with life.fs.lock:
        clean = {row.path for row in life.fs.files_report() if row.state == "clean"}
    judged = 0
    for told in programs:
        if told.pending is not None:
            continue
        for path in clean & told.now.keys():
            content = told.now[path]
            judged += 1
            for where, found in (("on the storage", stored), ("there after a loss of power", left)):
                later = told.became.get(content, ())  # of the kernel: exception X11
                if not any(one == content or is_mixed(one, later) for one in found.values()):
                    raise Finding(
                        "STATUS", f"{path.decode()} is said to be persisted, and not {where}"
                    )
    return judged


def judge_persisted(
    programs: Sequence[Told], moments: Sequence[int], stored: Shown, left: Shown
) -> None:
    """A wait has ended: all that had been told when it began is there."""
    for told, moment in zip(programs, moments, strict=True):
        if told.may_remove_early:
            continue
        at = told.latest(told.seen(stored))
        if at < moment:
            raise Finding(
                "STATUS",
                f"a wait has ended that began at moment {moment} of {told.directory.decode()},"
                f" and the storage shows moment {at}",
            )
        told.durable_at = max(told.durable_at, moment)
        told.left(told.seen(left))


def waits(life: Life, programs: Sequence[Program]) -> str:
    """For people: who waits for whom, and what acpfs says of it."""
    statistics = life.fs.statistics()
    paths = [one.path.decode() for one in statistics.waiting]
    waiting = [one for one in programs if any(path.startswith(f"{one.name}/") for path in paths)]
    holders = [one.name for one in programs if one.open]
    words = [chain(one.name, [two.name for two in waiting], holders) for one in waiting[:1]]
    words += map(_of, programs)
    words += [
        f"{one.path.decode()} waits for {one.wanted_bytes} bytes: {one.reason}"
        for one in statistics.waiting
    ]
    queue = life.engine.statistics().queue[:3]
    words += [f"{entry.operation} {entry.name}: {entry.why}" for entry in queue]
    return "; ".join(words)


def chain(first: str, waiting: Sequence[str], holders: Sequence[str]) -> str:
    """Who waits for whom, from one who waits for bytes on: until one comes again, or does not wait.

    `holders`: who has files open, whose bytes are there until they are closed.
    """
    names = [first]
    while names[-1] in waiting:
        after = next((one for one in holders if one not in names), None)
        after = after or next(iter(holders), None)
        if after is None:
            return f"{' waits for '.join(names)}, and for nobody"
        names.append(after)
        if after in names[:-1]:
            return f"in a circle, {' waits for '.join(names)}"
    return f"{' waits for '.join(names)}, who does not wait"


def _of(program: Program) -> str:
    has = f" and has open {', '.join(sorted(program.open))}" if program.open else ""
    doing = "stands still" if program.stands_still else f"is in `{program.under_way}`"
    return f"{program.name} {doing}{has}"
