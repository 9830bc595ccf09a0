"""Faults of the faulty file system: which call meets which, and how long it waits.

Owns rules, freezes, the bandwidth bucket, the space left and the counters; does not know FUSE or
files. Lives in one trio task loop, so nothing here is locked.
"""

from __future__ import annotations

import errno
import fnmatch
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

CHANGING = frozenset(
    "setattr mknod mkdir unlink rmdir symlink rename link create write fsync fsyncdir "
    "setxattr removexattr".split()
)
"""Operations that the word "writes" stands for in a rule."""
READING = frozenset(
    "lookup getattr readlink open read flush release opendir readdir statfs getxattr "
    "listxattr".split()
)
"""All others; FLUSH is among them because closing a file that was only read sends it too."""
ACTIONS = frozenset({"fail", "delay", "tear", "short", "flip", "freeze", "lose"})
"""tear: half of a write, then EIO; short: half of a write; flip: one bit wrong; lose: carried out,
but the answer is an error.
"""
BURST_S = 0.02
"""How far ahead the bandwidth bucket may run; keeps small writes from sleeping for less than the
clock can.
"""


class FaultyError(OSError):
    """An error that a rule ordered."""


@dataclass
class Rule:
    """When a call of one of `ops` on a path like `glob` meets `action`; `nth` counts matching calls
    from 1.
    """

    action: str
    ops: frozenset[str] = frozenset()
    glob: str = "*"
    error: int = errno.EIO
    nth: int | None = None
    probability: float = 1.0
    seed: int = 0
    times: int | None = None
    seconds: float = 0.0
    jitter_s: float = 0.0
    id: int = 0
    matched: int = 0
    hits: int = 0
    random: random.Random = field(default_factory=random.Random)

    def applies(self, op: str, paths: Callable[[], tuple[str, ...]]) -> bool:
        """Whether this call meets the rule; counts it."""
        if self.ops and op not in self.ops:
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        if self.glob != "*" and not any(_like(path, self.glob) for path in paths()):
            return False
        self.matched += 1
        if self.nth is not None and self.matched != self.nth:
            return False
        if self.probability < 1.0 and self.random.random() >= self.probability:
            return False
        self.hits += 1
        return True


def _like(path: str, glob: str) -> bool:
    return fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(path.rsplit("/", 1)[-1], glob)


def rule_from(words: dict[str, Any]) -> Rule:
    """A rule from what came over the control socket.

    Raises:
        ValueError: unknown action, operation or key.
    """
    ops: set[str] = set()
    for op in words.pop("ops", None) or ():
        ops |= {"writes": CHANGING, "reads": READING}.get(op) or {op}
    unknown = ops - CHANGING - READING
    if unknown:
        raise ValueError(f"unknown operations {sorted(unknown)}")
    error = words.pop("errno", "EIO")
    rule = Rule(ops=frozenset(ops), error=getattr(errno, error), **words)
    if rule.action not in ACTIONS:
        raise ValueError(f"unknown action {rule.action!r}")
    rule.random.seed(rule.seed)
    return rule


@dataclass
class Features:
    """What the file system can do; switching one off makes it like some distributed one."""

    xattrs: bool = True
    hard_links: bool = True
    symlinks: bool = True
    chown: bool = True
    rename_flags: bool = True
    fsync_directory: bool = True
    fine_times: bool = True
    link_counts: bool = True
    """Else everything has one link, directories too: as over SFTP, and of directories on btrfs."""
    read_only: bool = False


class Faults:
    """Everything that can be wrong, and the counters that tests look at."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.features = Features()
        self.fsync_s = 0.0
        self.bandwidth = 0
        self.space_left: int | None = None
        self.counters: Counter[str] = Counter()
        self.frozen = 0
        self.trace = False
        self.calls: list[str] = []
        self._free_at = 0.0
        self._last_rule = 0
        self._changed = trio.Event()

    def add(self, rule: Rule) -> int:
        """Put a rule behind the others; returns its number."""
        self._last_rule += 1
        rule.id = self._last_rule
        self.rules.append(rule)
        return rule.id

    def remove(self, rule_id: int | None, action: str | None = None) -> None:
        """Take out one rule, all of one action, or all; frozen calls that no rule holds any more go
        on.
        """
        self.rules = [
            r
            for r in self.rules
            if (rule_id is not None and r.id != rule_id)
            or (action is not None and r.action != action)
        ]
        self.tell()

    def tell(self) -> None:
        """Wake whoever waits for a change of counters or rules."""
        changed = self._changed
        self._changed = trio.Event()
        changed.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; looked at after every call and every change of rules."""
        while not condition():
            await self._changed.wait()

    async def meet(self, op: str, paths: Callable[[], tuple[str, ...]]) -> str:
        """Count a call and let it meet the rules.

        Returns the rest of the action that the call itself must carry out ("tear", "short", "flip",
        "lose") or "". Raises FaultyError.
        """
        self.counters[op] += 1
        if self.trace:
            self.calls.append(f"{op} {' '.join(paths())}")
        self.tell()
        todo = ""
        for rule in list(self.rules):
            if not rule.applies(op, paths):
                continue
            if rule.action == "fail":
                raise FaultyError(rule.error, "ordered by a rule")
            if rule.action == "delay":
                await trio.sleep(rule.seconds + rule.random.random() * rule.jitter_s)
            elif rule.action == "freeze":
                await self._hang(rule)
            else:
                todo = rule.action
        return todo

    async def _hang(self, rule: Rule) -> None:
        self.frozen += 1
        self.tell()
        try:
            await self.wait_until(lambda: rule not in self.rules)
        finally:
            self.frozen -= 1

    async def spend(self, size: int) -> None:
        """Wait for `size` bytes of the bandwidth, which readers and writers share."""
        if not self.bandwidth:
            return
        now = trio.current_time()
        self._free_at = max(self._free_at, now) + size / self.bandwidth
        if self._free_at - now > BURST_S:
            await trio.sleep(self._free_at - now)

    def take_space(self, size: int) -> None:
        """Account for `size` new bytes (negative: freed).

        Raises ENOSPC when the file system is full.
        """
        if self.space_left is None:
            return
        if size > max(self.space_left, 0):
            raise FaultyError(errno.ENOSPC, "full")
        self.space_left -= size

    def state(self) -> dict[str, Any]:
        """What the control socket's `state` answers."""
        rules = [
            {"id": r.id, "action": r.action, "matched": r.matched, "hits": r.hits}
            for r in self.rules
        ]
        return {
            "counters": dict(self.counters),
            "frozen": self.frozen,
            "rules": rules,
            "space_left": self.space_left,
            "bandwidth": self.bandwidth,
            "features": asdict(self.features),
            "calls": self.calls,
        }
