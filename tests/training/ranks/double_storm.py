"""A storm of kills on the double: each job loses one rank at any moment, from the first update on,
with each layout and way to update; what is left, or what goes on, is compared bit for bit.

    python -m tests.training.ranks.double_storm --kills 200 --seconds 1800 [--libraries DIR]

An abort that ends a further rank is one more fault, and no torn state: such jobs are counted by
themselves, and what they leave has to be right as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SPINS_EVERY = 4
RIGHT = "right"
TOO_LATE = "the loop had ended"
TOO_EARLY = "nothing to save yet"
MORE_FAULTS = "right, and another rank had ended by the abort"
GONE = "all holders of a shard had ended"
NO_COPY = "no copy was whole yet"
"""Of ranks that hold what nobody else holds."""


def protected(fault_seed: int, kind: str, directory: Path, yardsticks: Path) -> tuple[str, str]:
    """(how one job with `protect` ended, what is to be told)."""
    from acpfs.training.manifest import verify
    from acpfs.training.messages import ExitStatus
    from tests.training.ranks import behind
    from tests.training.ranks.forked import Ranks
    from tests.training.ranks.gasps import STEPS, WORLD, assert_is_its_step

    place = behind.OnDouble()
    expected = behind.yardstick(kind, yardsticks, place)
    fault = behind.drawn(kind, random.Random(fault_seed), first=1)
    with Ranks(
        WORLD, directory, lambda rank: behind.protected(rank, fault, directory, place)
    ) as ranks:
        statuses = ranks.statuses()
        said = ranks.said()
    told = f"{kind} {dict(fault.ranks)} update {fault.number} {statuses}"
    others = [
        status
        for rank, status in enumerate(statuses)
        if rank not in fault.ranks and status not in (0, ExitStatus.SAVED)
    ]
    latest = directory / "run" / "latest"
    if not latest.exists():
        if 0 in statuses:
            return TOO_LATE, told
        if fault.number == 1 and ExitStatus.SAVED not in statuses:
            return TOO_EARLY, told  # nobody who is left had done an update
        died = any(status != ExitStatus.NOT_SAVED for status in others)
        if kind == "fsdp" and not died:
            return NO_COPY, told
        return GONE if died else "nothing was left", f"{told}\n{said}"
    step = verify(directory / "run" / latest.read_text().strip()).step
    if step > STEPS:
        return "corrupted", told
    try:
        assert_is_its_step(kind, directory / "run", expected)
    except AssertionError as error:
        return "corrupted", f"{told} step {step}: {str(error)[:2000]}\n{said}"
    return MORE_FAULTS if others else RIGHT, f"{told} step {step}"


def replaced(fault_seed: int, kind: str, directory: Path, yardsticks: Path) -> tuple[str, str]:
    """The same with `resilient`."""
    from tests.training.ranks import behind, replaced_behind

    fault = behind.drawn(kind, random.Random(fault_seed), first=1)
    found = replaced_behind.verdict(fault, directory, yardsticks)
    told = f"{kind} {dict(fault.ranks)} update {fault.number}"
    kinds = {"right": RIGHT, "too late": TOO_LATE}
    return kinds.get(found, "corrupted"), told if found in kinds else f"{told}: {found}"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument(
        "--spins-every",
        type=int,
        default=SPINS_EVERY,
        help="in one of so many jobs the host spins for its device; in the others it blocks",
    )
    parser.add_argument("--libraries", help="where what acpfs depends on is, if not here")
    given = parser.parse_args()
    if given.libraries:
        sys.path.append(given.libraries)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from tests.training.ranks.asynchronous import Waiting
    from tests.training.ranks.behind import LAYOUTS

    chance = random.Random(given.seed)
    until_s = time.monotonic() + given.seconds
    found: dict[str, Counter[str]] = {"protect": Counter(), "resilient": Counter()}
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="acpfs-double-") as base:
        for number in range(given.kills):
            if time.monotonic() > until_s:
                break
            how = chance.choice(("protect", "protect", "resilient"))
            kind = chance.choice(sorted(LAYOUTS) if how == "protect" else ("ddp", "fsdp", "hsdp"))
            Waiting.spins = number % given.spins_every == 0
            directory = Path(base) / str(number)
            directory.mkdir()
            judge = protected if how == "protect" else replaced
            what, told = judge(chance.randrange(1 << 30), kind, directory, Path(base))
            found[how][what] += 1
            is_wrong = what not in (RIGHT, TOO_LATE, TOO_EARLY, MORE_FAULTS, GONE, NO_COPY)
            wrong += is_wrong
            row = {"number": number, "how": how, "what": what}
            print(json.dumps({**row, "told": told if is_wrong or what == GONE else told[:200]}))
            sys.stdout.flush()
    print(json.dumps({"seed": given.seed, **{how: dict(one) for how, one in found.items()}}))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
