"""`python -m tests.sim.training --seeds N`, `--seed N --trace`: histories of a job's coordinators
and members, each from a seed.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import trio
import trio._core._run as trio_run
import trio.testing

from tests.sim.training.crew import CrewWorld
from tests.sim.training.shrinking import shrink
from tests.sim.training.world import ANY, CREW, PROFILES, World, broken_in


def history(
    seed: int, profile: str = ANY, without: frozenset[int] = frozenset()
) -> tuple[World, str | None]:
    """One, and the rule that it broke."""
    random.seed(seed)
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    trio_run._r.seed(seed)
    with tempfile.TemporaryDirectory(prefix="acpfs-sim-", ignore_cleanup_errors=True) as name:
        world = (CrewWorld if profile == CREW else World)(seed, Path(name), profile, without)
        try:
            trio.run(world.run, clock=trio.testing.MockClock(autojump_threshold=0))
        except BaseException as error:
            found = broken_in(error)
            if found is None:
                traceback.print_exc()
                raise
            return world, found
        return world, None


def shortened(world: World, broken: str) -> tuple[World, str | None]:
    """The same failure with fewer harms."""
    rule = broken.partition(":")[0]

    def fails(without: frozenset[int]) -> bool:
        found = history(world.seed, world.profile, without)[1]
        return found is not None and found.partition(":")[0] == rule

    without = shrink(world.harms, fails)
    numbers = ",".join(map(str, sorted(without)))
    print(f"--profile {world.profile} --seed {world.seed} --without {numbers}")
    return history(world.seed, world.profile, without)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.training", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, metavar="N")
    parser.add_argument("--from", type=int, default=0, metavar="N", dest="first")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--profile", choices=PROFILES, default=ANY)
    parser.add_argument("--trace", action="store_true", help="all events")
    parser.add_argument("--without", default="", metavar="N,N", help="leave these harms out")
    parser.add_argument("--shrink", action="store_true", help="leave out what no failure needs")
    parser.add_argument("--stop", action="store_true", help="at the first that is bad")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    logging.disable(logging.CRITICAL)
    begun = time.monotonic()
    without = frozenset(int(word) for word in options.without.split(",") if word)
    bad = 0
    counts = Counter[str]()
    for seed in [options.seed] if options.seed is not None else seeds:
        world, broken = history(seed, options.profile, without)
        if broken and options.shrink:
            world, broken = shortened(world, broken)
        counts.update(world.counts)
        if broken or options.seed is not None:
            print("\n".join(world.trace if options.trace else world.trace[-40:]))
            print(f"seed {seed}, digest {world.digest}: {broken or 'nothing is wrong'}")
        bad += broken is not None
        if broken and options.stop:
            break
    for what, number in sorted(counts.items()):
        print(f"{number:6}  {what}")
    print(f"{bad} bad, {time.monotonic() - begun:.1f} s")
    sys.exit(bad > 0)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        words = [sys.executable, "-m", "tests.sim.training", *sys.argv[1:]]
        os.execve(sys.executable, words, environment)
    main()
