"""The command: runs histories, side by side, and says what came of them."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.sim import virtual
from tests.sim.aims import knobs_of
from tests.sim.choices import HAVE_MEMBERS, LIVES_MAX, UNSETTLED, Choices, Profile
from tests.sim.history import History, Outcome
from tests.sim.members.history import MembersHistory
from tests.sim.members.plan import Plan
from tests.sim.shrinking import calls_of, shrink, to_words
from tests.sim.trace import Finding

EVENTS_SHOWN = 40
CORPUS = Path(__file__).with_name("corpus.txt")


def run(arguments: list[str]) -> None:
    """Exit status 1 where a history failed."""
    options = _parser().parse_args(arguments)
    simulate()
    named = [Profile(name) for name in options.profile or ()]
    profiles = named or [one for one in Profile if one not in UNSETTLED]
    if options.seed is not None:
        failed = _these(profiles, options)
    elif options.corpus:
        failed = _many(list(corpus()), options)
    else:
        failed = _many(_drawn(profiles, options), options)
    sys.stdout.flush()
    os._exit(any(failed))  # threads of dead lives wait for turns that never come


def simulate() -> None:
    """From here on this process can run histories, and nothing else."""
    virtual.install()
    logging.disable(logging.CRITICAL)  # the trace says what failed, and that it was meant to
    _stay_on_one_processor()
    gc.disable()  # `history` collects, after each
    gc.freeze()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--profile", action="append", choices=[one.value for one in Profile])
    parser.add_argument(
        "--seeds", type=int, default=20, metavar="N", help="this many of each profile"
    )
    parser.add_argument("--from", type=int, default=0, metavar="N", dest="first")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes")
    parser.add_argument("--seed", type=int, metavar="N", help="this one alone")
    parser.add_argument("--corpus", action="store_true", help="those that failed once")
    parser.add_argument("--shrink", action="store_true", help="make it shorter first")
    parser.add_argument("--no-faults", action="store_true", help="the storage does not fail")
    parser.add_argument("--in-order", action="store_true", help="threads go on as they came")
    parser.add_argument("--lives", type=int, default=LIVES_MAX, metavar="N", help="at most")
    parser.add_argument("--without", action="append", default=[], metavar="PROGRAM:CALLS")
    parser.add_argument("--trace", action="store_true", help="all its events")
    parser.add_argument("--stop", action="store_true", help="at the first that fails")
    parser.add_argument("--digests", action="store_true", help="a line for each history")
    return parser


def corpus() -> Iterator[Choices]:
    """Every history that ever failed."""
    for line in CORPUS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            profile, seed, _why = line.split(" ", 2)
            yield Choices(int(seed), Profile(profile))


def _drawn(profiles: list[Profile], options: argparse.Namespace) -> list[Choices]:
    seeds = range(options.first, options.first + options.seeds)
    return [Choices(seed, profile) for seed in seeds for profile in profiles]


def _these(profiles: list[Profile], options: argparse.Namespace) -> list[bool]:
    without = frozenset[tuple[str, int]]().union(*map(calls_of, options.without))
    parts = (without, options.no_faults, options.lives, options.in_order)
    return [_one(Choices(options.seed, profile, *parts), options) for profile in profiles]


def _stay_on_one_processor() -> None:
    """One thread goes on at a time: handing on to one on another processor takes four times as
    long, and to one that goes on before whoever woke it has let go of the interpreter, twice.
    """
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[os.getpid() % len(processors)]})
    with suppress(OSError):  # a sandbox may forbid it; then it is only slower
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def history(choices: Choices) -> Outcome:
    """Run it, its RAM tiers in memory where possible."""
    with tempfile.TemporaryDirectory(dir=_memory(), prefix="acpfs-sim-") as base:
        is_of_members = choices.profile in HAVE_MEMBERS
        make = MembersHistory if is_of_members else History
        outcome = make(choices, Path(base) / "history").run()
    gc.collect()
    return outcome


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _one(choices: Choices, options: argparse.Namespace) -> bool:
    outcome = history(choices)
    if options.shrink and outcome.failure is not None:
        outcome = history(shrink(choices, partial(_fails_alike, rule_of(outcome))))
    if options.trace:
        print(*outcome.trace.events, sep="\n")
    print(report(outcome, 0 if options.trace else EVENTS_SHOWN))
    return outcome.failure is not None


def _many(todo: list[Choices], options: argparse.Namespace) -> list[bool]:
    began_s = virtual.REAL_CLOCK()
    began_cpu = os.times()
    failed = []
    counts = Counter[str]()
    done = 0
    for outcome in _outcomes(todo, options.jobs):
        done += 1
        name = f"{outcome.choices.profile.value} {outcome.choices.seed}"
        counts.update(outcome.counts)
        if options.digests:
            print(f"{name} {outcome.trace.digest:08x}", flush=True)
        if outcome.failure is not None:
            failed.append(True)
            print(f"FAILED {name}: {sentence(outcome)}", flush=True)
            if options.stop:
                break
    took_s = virtual.REAL_CLOCK() - began_s
    cpu = os.times()
    cpu_s = sum(cpu[:4]) - sum(began_cpu[:4])
    print(
        f"{done} histories, {len(failed)} failed, {took_s:.1f} s, {cpu_s:.1f} s of processors:"
        f" {60 * done / max(cpu_s, 1e-9):.0f} a minute of one; {dict(counts)}"
    )
    return failed


def _outcomes(todo: list[Choices], jobs: int) -> Iterator[Outcome]:
    if jobs <= 1:
        yield from map(history, todo)
        return
    context = multiprocessing.get_context("fork")
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with context.Pool(jobs, initializer=_stay_on_one_processor) as pool:
        yield from pool.imap_unordered(_bare_history, todo)


def _bare_history(choices: Choices) -> Outcome:
    """Without what another process needs not know."""
    outcome = history(choices)
    outcome.trace.events.clear()
    if outcome.failure is not None and not isinstance(outcome.failure, Finding):
        outcome.failure = Finding("ERROR", sentence(outcome))
    return outcome


def rule_of(outcome: Outcome) -> str:
    """By which it failed; "": not at all."""
    failure = outcome.failure
    if failure is None:
        return ""
    return failure.oracle if isinstance(failure, Finding) else type(failure).__name__


def _fails_alike(rule: str, choices: Choices) -> bool:
    return rule_of(history(choices)) == rule


def sentence(outcome: Outcome) -> str:
    """What was wrong."""
    failure = outcome.failure
    if failure is None:
        return "nothing"
    if isinstance(failure, Finding):
        return str(failure)
    place = traceback.extract_tb(failure.__traceback__)[-1]
    return f"{type(failure).__name__}: {failure} at {place.filename}:{place.lineno}"


def report(outcome: Outcome, events: int) -> str:
    """For people."""
    choices = outcome.choices
    is_of_members = choices.profile in HAVE_MEMBERS
    knobs = Plan.drawn(choices) if is_of_members else knobs_of(choices)
    lines = [f"history {choices.profile.value} {choices.seed}: {knobs}; {dict(outcome.counts)}"]
    if outcome.failure is not None:
        lines += map(str, list(outcome.trace.events)[-events:] if events else [])
        lines.append(f"FAILED {sentence(outcome)}")
        if not isinstance(outcome.failure, Finding):
            lines.append("".join(traceback.format_exception(outcome.failure)))
        lines.append(f"again: python -m tests.sim {to_words(choices)}")
    lines.append(f"digest {outcome.trace.digest:08x}")
    return "\n".join(lines)
