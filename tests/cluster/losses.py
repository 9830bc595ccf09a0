"""Whole nodes that are lost while they save, with `copies = 1`: all processes killed at a random
moment, and the RAM tier wiped, perhaps behind a network that was cut before. Their holders adopt
what they have, by themselves or when they are asked, and what was told to be copied must be on the
storage, in its order.

Each node saves checkpoints of its own (a shard, flushed; then its pointer, flushed; the oldest one
deleted, pointers apart) into a directory of its own, at a storage that is slow now and then. What
fsync has answered is written down, and looked at on the storage itself. `run` returns what was
seen; a node that is lost comes back under another node id.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acpfs.errors import AcpfsError
from tests.cluster.loss_outcome import Outcome
from tests.cluster.stand import HEARTBEAT_S
from tests.rig.flushed import stored, sync_directory
from tests.rig.mounts import AcpfsMount, CommandError, mounts_below, take_down
from tests.training.ranks.networks import Networks

NODES = 3
KEEP = 3
SHARD_BYTES = (1 << 12, 3 << 20)
BANDWIDTHS = ("0", "4M", "1M", "200K")
BETWEEN_SAVES_S = (0.2, 1.5)
"""Pointers that were withheld come one per heartbeat where those of two nodes alternate."""
SAVES_S = (0.3, 6.0)
CUT_S = (0.0, 14.0)
"""How long before its loss a node is cut off: to either side of the patience with a holder."""
NODE_TIMEOUT_S = 4.0
POINTERS_WAIT_S = 60.0
"""How long the other nodes' pointers may take once the lost one's log is drained: a heartbeat for
each, on a machine that does much else.
"""
SURELY_S = 0.2
"""Clocks are apart by so much at most, as far as nodes assume."""
WAIT_S = 240.0
LOOK_S = 0.05
ASKS_S = 1.0
"""Between two questions why a node is not adopted yet."""
RETIRED = 8
"""What a lost node has left is looked at once more when so many others are lost, and removed:
nothing of it has come late.
"""


@dataclass
class Told:
    """What one node wrote, and what it was told; its own thread writes, the drill reads."""

    directory: str
    """Below the mount, and below the backing directory."""
    digests: dict[int, str] = field(default_factory=dict)
    """Of the shards of all checkpoints, from before the first byte was written."""
    copied: set[int] = field(default_factory=set)
    """Checkpoints whose fsync has returned, but for those that were to be deleted."""
    pointer: int = 0
    """The newest one whose pointer's fsync has returned."""
    named_at: dict[int, float] = field(default_factory=dict)
    """When the pointer to each was there, wall clock."""
    deleted_until: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def shard(number: int) -> str:
    """Name of a checkpoint's only shard."""
    return f"iter_{number:06}/shard"


class Saver:
    """One node's job, in a thread of its own, until its mount is gone."""

    def __init__(self, mount: AcpfsMount, told: Told, seed: int) -> None:
        self.told = told
        self._random = random.Random(seed)
        self._mount = mount
        # as a process of that node: what lies beneath a mount that is gone is not written to
        self._fd = os.open(mount.path, os.O_PATH | os.O_DIRECTORY)
        self._root = Path(f"/proc/self/fd/{self._fd}") / told.directory
        self._stop = threading.Event()
        self.saves = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        with contextlib.suppress(OSError):  # the node is lost
            self._root.mkdir()
            while not self._stop.is_set():
                number += 1
                self._save(number)
                self.saves += 1
                self._stop.wait(self._random.uniform(*BETWEEN_SAVES_S))
        os.close(self._fd)

    def _save(self, number: int) -> None:
        told = self.told
        data = self._random.randbytes(self._random.randint(*SHARD_BYTES))
        with told.lock:
            told.digests[number] = hashlib.sha256(data).hexdigest()
        path = self._root / shard(number)
        path.parent.mkdir()
        stored(path, data)
        with told.lock:
            told.copied.add(number)
        new = self._root / "latest.new"
        stored(new, f"{number}".encode())
        new.rename(self._root / "latest")
        with told.lock:
            told.named_at[number] = time.time()
        sync_directory(self._root)
        with told.lock:
            told.pointer = number
            old = number - KEEP
            if old > 0:
                told.deleted_until = old
                told.copied.discard(old)
        if old > 0:
            (self._root / shard(old)).unlink()
            (self._root / shard(old)).parent.rmdir()

    def stop(self) -> None:
        """It saves no more."""
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


# -- what must be true of the storage


def pointed_at(directory: Path) -> int:
    """By the pointer; 0: there is none."""
    try:
        return int((directory / "latest").read_bytes())
    except FileNotFoundError:
        return 0


def is_there(directory: Path, told: Told, number: int) -> bool:
    """A checkpoint, whole."""
    try:
        data = (directory / shard(number)).read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(data).hexdigest() == told.digests.get(number)


def what_is_wrong(directory: Path, told: Told) -> list[str]:
    """With what one node left on the storage, when its log is drained: something that was told to
    be copied is not there, or is not what was written; something is there before what came ahead of
    it.
    """
    wrong = [
        f"{told.directory}: {shard(number)} was told to be copied, and is not there"
        for number in sorted(told.copied)
        if not is_there(directory, told, number)
    ]
    pointer = pointed_at(directory)
    if pointer < told.pointer:
        wrong.append(f"{told.directory}: the pointer says {pointer}, told was {told.pointer}")
    newest = 0
    for path in sorted(directory.glob("iter_*/shard")):
        number = int(path.parent.name.removeprefix("iter_"))
        newest = max(newest, number)
        if not is_there(directory, told, number):
            wrong.append(f"{told.directory}: {path.parent.name} is not what was written")
    return wrong + [
        f"{told.directory}: there is a later one, and not {shard(number)}"
        for number in range(told.deleted_until + 1, max(newest, pointer) + 1)
        if not is_there(directory, told, number)
    ]


class Watcher:
    """Looks at all pointers on the storage, all the time: each names something whole.

    What was read and was right is read again when the file is another one, or has changed.
    """

    def __init__(self, backing: Path, all_told: list[Told]) -> None:
        self._backing = backing
        self._told = all_told
        self._right: dict[str, tuple[int, ...]] = {}
        """Directory → what its pointer's checkpoint was when it was read."""
        self._stop = threading.Event()
        self.looks = 0
        self.violations: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            for told in list(self._told):
                directory = self._backing / told.directory
                pointer = pointed_at(directory)
                is_whole = not pointer or self._is_right(directory, told, pointer)
                # else it may have been deleted since it was named
                if not is_whole and pointed_at(directory) == pointer:
                    self.violations.append(f"{told.directory}: {pointer} is named too early")
                self.looks += 1

    def _is_right(self, directory: Path, told: Told, pointer: int) -> bool:
        try:
            now = (directory / shard(pointer)).stat()
        except FileNotFoundError:
            return False
        seen = (pointer, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        if self._right.get(told.directory) == seen:
            return True
        if is_whole := is_there(directory, told, pointer):
            self._right[told.directory] = seen
        return is_whole

    def stop(self) -> None:
        """It has seen enough."""
        self._stop.set()
        self._thread.join(WAIT_S)


# -- nodes


class Nodes:
    """A context manager: mounts over one directory, each a holder of another one's copies."""

    def __init__(
        self, tmp: Path, backing: Path, seed: int, networks: Networks | None, *, alone: bool
    ) -> None:
        """`networks`: one host per node; None: all on this one. `alone`: a holder adopts by itself
        where that is safe.
        """
        self._alone = alone
        self._tmp = tmp
        self._backing = backing
        self._random = random.Random(seed)
        self._networks = networks
        self.mounts: list[AcpfsMount] = []
        self.savers: list[Saver] = []
        self.all_told: list[Told] = []
        self._gone: list[tuple[Told, int]] = []
        """What lost nodes have left, with where each one's pointer was when it was judged."""
        self._born = 0
        self._evidence = 0

    def __enter__(self) -> Nodes:
        try:
            for number in range(NODES):
                self.mounts.append(self._made(number))
                self.mounts[-1].start()
            if self._alone:  # what doctor notes there is what holders go by
                words = ("doctor", str(self._backing), "--second", str(self._backing))
                self.mounts[0].run("acpfs", *words, check=False)
                if not (self._backing / ".acpfs" / "late-calls").exists():
                    raise RuntimeError(f"{self._backing} is on no local storage")
            for number in range(NODES):
                self.savers.append(self._saver(number))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_what: object) -> None:
        self.close()

    def close(self) -> None:
        """Whatever state they are in."""
        for mount in self.mounts:
            mount.abort()

    def _made(self, number: int) -> AcpfsMount:
        self._born += 1
        node = f"n{number}-{self._born}"
        at = "127.0.0.1" if self._networks is None else self._networks.address(number)
        settings: dict[str, Any] = {
            "heartbeat": HEARTBEAT_S,
            "clock_bound": 0.1,
            "node_timeout": NODE_TIMEOUT_S,
            "attr_timeout": 0.1,
            "retry_delay_min": 0.02,
            "retry_delay_max": 0.2,
            "ram": "128M",
            "copies": 1,
            "copies_ram": "50%",
            "fsync": "copied",
            "exchange": at,
            "failure_domain": node,
            "node_id": node,
            "adopt": "auto" if self._alone else "asked",
            "pointer_patterns": "latest",
            "no_keep_last_persisted": True,
        }
        return AcpfsMount(
            self._backing,
            self._tmp / node,
            "native",
            python=self._python(number),
            watchdog_s=24 * 3600.0,
            **settings,
        )

    def _python(self, number: int) -> str:
        """A Python whose processes are on that node's host."""
        if self._networks is None:
            return sys.executable
        script = self._tmp / f"python{number}"
        name = self._networks.names[number]
        script.write_text(
            f'#!/bin/sh\nexec nsenter --net=/run/netns/{name} {sys.executable} "$@"\n'
        )
        script.chmod(0o755)
        return str(script)

    def _saver(self, number: int) -> Saver:
        mount = self.mounts[number]
        mount.wait_status(lambda now: now["copies"]["state"] == "on")
        told = Told(mount.path.name)
        self.all_told.append(told)
        return Saver(mount, told, self._random.randrange(1 << 30))

    def vary(self) -> None:
        """Another speed of the storage, for each node."""
        for mount in self.mounts:
            with contextlib.suppress(AcpfsError, OSError):
                mount.ask("set", key="bandwidth", value=self._random.choice(BANDWIDTHS))

    def hurry(self, victim: int) -> None:
        """The storage is fast for all that are left: whose pointers wait for each other."""
        for number, mount in enumerate(self.mounts):
            if number != victim:
                mount.ask("set", key="bandwidth", value="0")

    def settle(self) -> None:
        """Each has a holder that has all that was told."""
        for mount in self.mounts:
            mount.wait_status(lambda now: now["copies"]["state"] == "on", WAIT_S)

    def lose(self, number: int) -> None:
        """All its processes are killed, and its RAM is gone."""
        mount = self.mounts[number]
        mount.kill()
        for one in mounts_below(mount.runtime_dir):
            subprocess.run(["umount", "-l", str(one)], check=True, timeout=60)

    def replace(self, number: int) -> None:
        """A node in the place of one that is lost."""
        take_down(self.mounts[number].path, self.mounts[number].runtime_dir)
        self.mounts[number] = self._made(number)
        self.mounts[number].start()
        self.savers[number] = self._saver(number)

    def retire(self, told: Told) -> list[str]:
        """A node that is lost has been judged; what is wrong with one that was long ago."""
        self._gone.append((told, pointed_at(self._backing / told.directory)))
        return self._removed() if len(self._gone) > RETIRED else []

    def keep_evidence(self) -> None:
        """Logs and what members say of themselves, as long as they are there: to trace what is
        wrong.
        """
        self._evidence += 1
        place = self._tmp / f"evidence{self._evidence}"
        shutil.copytree(self._backing / ".acpfs" / "nodes", place / "nodes")
        for log in self._tmp.glob("*.run/logs/*.log"):
            shutil.copy(log, place)
        for mount in self.mounts:
            with contextlib.suppress(AcpfsError, OSError, ValueError):
                (place / f"{mount.path.name}.json").write_text(json.dumps(mount.status(), indent=1))

    def end(self) -> list[str]:
        """What is wrong with those that are left."""
        wrong = []
        while self._gone:
            wrong += self._removed()
        return wrong

    def _removed(self) -> list[str]:
        told, pointer = self._gone.pop(0)
        self.all_told.remove(told)
        directory = self._backing / told.directory
        wrong = what_is_wrong(directory, told)
        if (now := pointed_at(directory)) != pointer:
            wrong.append(f"{told.directory}: the pointer says {now}, and said {pointer} before")
        if not wrong:
            (directory / "latest").unlink(missing_ok=True)  # first: the watcher may look now
            shutil.rmtree(directory)
        return [f"{line}, long after the loss" for line in wrong]

    def lost_since(self, number: int) -> float:
        """When the first file may have been closed that the adopter did not have; now: it is known
        that there is none.
        """
        if lost := self._record(number).get("lost"):
            return float(lost[0])
        return time.time()

    def holder_of(self, number: int) -> AcpfsMount | None:
        """Whose copy counts, by the mark on the storage; None: nobody's, as all was persisted."""
        node = self.mounts[number].path.name
        with contextlib.suppress(FileNotFoundError):
            mark = json.loads((self._backing / ".acpfs" / "mirrors" / node).read_bytes())
            for mount in self.mounts:
                if mount.path.name == mark.get("holder"):
                    return mount
        return None

    def wait_missed(self, number: int) -> str:
        """By all others; its node id."""
        node = self.mounts[number].path.name
        others = [one for one in self.mounts if one.path.name != node]
        for one in others:
            one.wait_status(lambda now: node in now["cluster"]["missing"], WAIT_S)
        return node

    def forget(self, number: int) -> list[str]:
        """Nobody waits any more for what a lost node may not have copied; why they do, where they
        do.
        """
        node = self.mounts[number].path.name
        others = [one for one in self.mounts if one.path.name != node]
        try:
            others[0].run("acpfs-ctl", str(others[0].path), "nodes", "forget", node)
        except CommandError as error:
            return [f"{node}: not forgotten: {error.stderr.strip()[-300:]}"]
        return []

    def is_adopted_alone(self, number: int) -> bool:
        """Once its holder has drained it without being asked; False where that leaves it to a
        person, or takes too long.
        """
        node = self.mounts[number].path.name
        others = [one for one in self.mounts if one.path.name != node]
        began = time.monotonic()
        asks_at = began
        while (now := time.monotonic()) - began < WAIT_S:
            has_left = self._record(number).get("state") == "left"
            if has_left or now >= asks_at:
                held = [one for mount in others for one in mount.status()["held"]]
                told = [str(one["adoption"]) for one in held if one["node"] == node]
                if has_left and not told:
                    return True
                if any("acpfs-ctl adopt" in why for why in told):
                    return False
                asks_at = now + ASKS_S
            pause(0.1)
        return False

    def _record(self, number: int) -> dict[str, Any]:
        node = self.mounts[number].path.name
        with contextlib.suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads(
                (self._backing / ".acpfs" / "nodes" / node).read_bytes()
            )
            return found
        return {}

    def adopt(self, number: int) -> list[str]:
        """Have the log of a lost node drained by its holder; why not, where it was not."""
        node = self.wait_missed(number)
        holder = self.holder_of(number)
        if holder is None:
            return [f"{node}: no copy counts"]
        try:
            holder.run("acpfs-ctl", str(holder.path), "adopt", node, "--is-off")
        except (CommandError, subprocess.TimeoutExpired) as error:
            why = str(error.stderr).strip()[-300:]
            return [f"{node}: not adopted by {holder.path.name}: {why}"]
        return []


def run(
    tmp: Path,
    seed: int,
    losses: int,
    partitions: int,
    tell: Callable[[str], None] = lambda _line: None,
    *,
    alone: bool = False,
    until: float = math.inf,
    kept: Callable[[list[Outcome]], None] = lambda _outcomes: None,
) -> list[Outcome]:
    """Losses, and as many behind a network that was cut, which needs root and ip(8). `alone`:
    holders adopt without being asked; `until`: no further one after then, by the monotonic clock;
    `kept`: is given what was seen, after each loss.
    """
    (backing := tmp / "backing").mkdir()
    found = [Outcome("loss", [seed]), Outcome("loss behind a cut network", [seed])]
    kinds = [0] * losses + [1] * partitions
    chooser = random.Random(seed)
    chooser.shuffle(kinds)
    began = time.monotonic()

    def seen() -> list[Outcome]:
        return [one for one in found if one.times]

    with contextlib.ExitStack() as stack:
        networks = None if Networks.missing() else stack.enter_context(Networks(NODES))
        nodes = stack.enter_context(Nodes(tmp, backing, seed, networks, alone=alone))
        watcher = Watcher(backing, nodes.all_told)
        stack.callback(watcher.stop)
        for count, kind in enumerate(kinds, 1):
            if time.monotonic() > until:
                break
            outcome = found[kind]
            one = Loss(nodes, backing, networks if kind else None, chooser, alone=alone)
            one.happen(outcome)
            outcome.violations += watcher.violations
            watcher.violations.clear()
            outcome.took_s = round(time.monotonic() - began, 1)
            tell(
                f"{count} of {len(kinds)} after {outcome.took_s:.0f} s: {outcome.kind}; "
                f"{outcome.alone} adopted unasked, {outcome.found} of {outcome.told} found, "
                f"{outcome.undrained} were not persisted, "
                f"{len(outcome.violations)} violations {outcome.violations[-2:]}"
            )
            kept(seen())
        found[0].violations += nodes.end()
        kept(seen())
    return seen()


class Loss:
    """One."""

    def __init__(
        self,
        nodes: Nodes,
        backing: Path,
        networks: Networks | None,
        chooser: random.Random,
        *,
        alone: bool,
    ) -> None:
        """`networks`: the node is cut off before. `alone`: as `Nodes`."""
        self._alone = alone
        self._nodes = nodes
        self._backing = backing
        self._networks = networks
        self._random = chooser

    def happen(self, outcome: Outcome) -> None:
        """To a node that saves, as all others do."""
        nodes = self._nodes
        victim = self._random.randrange(NODES)
        told = nodes.savers[victim].told
        directory = self._backing / told.directory
        with step(outcome, "each has a holder"):
            nodes.settle()  # else it were two losses at once
        nodes.vary()
        with step(outcome, "saves"):
            pause(self._random.uniform(*SAVES_S))
        with self._cut_off(victim, outcome):
            lost_at = time.time()
            nodes.lose(victim)
        nodes.savers[victim].stop()
        lacking = [one for one in told.copied if not is_there(directory, told, one)]
        outcome.times += 1
        outcome.told += len(told.copied)
        outcome.undrained += len(lacking)
        nodes.hurry(victim)
        is_all_there = not lacking and pointed_at(directory) >= told.pointer
        # all that was told is persisted, and no copy needs to count; else it must
        wrong = []
        with step(outcome, "adoption"):
            if is_all_there and nodes.holder_of(victim) is None:
                nodes.wait_missed(victim)
            elif self._alone and nodes.is_adopted_alone(victim):
                outcome.alone += 1
            else:
                wrong = nodes.adopt(victim)
        outcome.adoptions_s.append(outcome.steps_s["adoption"][-1])
        wrong += what_is_wrong(directory, told)
        outcome.found += sum(is_there(directory, told, one) for one in told.copied)
        since = nodes.lost_since(victim)
        outcome.unknown_s.append(round(max(0.0, lost_at - since), 2))
        # what others closed before that comes by itself; the rest when somebody has decided
        with step(outcome, "pointers"):
            wrong += self._pointers_come(victim, outcome, since - SURELY_S, "after the adoption")
        with step(outcome, "forgotten, and pointers"):
            wrong += nodes.forget(victim)
            wrong += self._pointers_come(victim, outcome, time.time(), "when it was forgotten")
        wrong += nodes.retire(told)
        if wrong:
            nodes.keep_evidence()
        outcome.violations += wrong
        with step(outcome, "another node instead"):
            nodes.replace(victim)

    @contextlib.contextmanager
    def _cut_off(self, victim: int, outcome: Outcome) -> Iterator[None]:
        if self._networks is None:
            yield
            return
        self._networks.cut(victim)
        try:
            with step(outcome, "cut off"):
                pause(self._random.uniform(*CUT_S))
            yield
        finally:
            self._networks.join(victim)

    def _pointers_come(self, victim: int, outcome: Outcome, before: float, when: str) -> list[str]:
        """Nobody's of that time are withheld for what the lost node had."""
        began = time.monotonic()
        wrong = []
        for number, mount in enumerate(self._nodes.mounts):
            if number == victim:
                continue
            saver = self._nodes.savers[number]
            with saver.told.lock:
                named = [one for one, at in saver.told.named_at.items() if at < before]
            wanted = max(named, default=0)
            directory = self._backing / saver.told.directory
            while pointed_at(directory) < wanted:
                if time.monotonic() - began > POINTERS_WAIT_S:
                    why = [one["why"] for one in mount.status()["queue"][:3]]
                    wrong.append(f"{saver.told.directory}: {when}, pointer {wanted} waits: {why}")
                    break
                pause(0.05)
        outcome.pointers_s.append(round(time.monotonic() - began, 2))
        return wrong


@contextlib.contextmanager
def step(outcome: Outcome, name: str) -> Iterator[None]:
    """Write down how long the block took."""
    began = time.monotonic()
    yield
    outcome.steps_s.setdefault(name, []).append(round(time.monotonic() - began, 2))


def pause(seconds: float) -> None:
    """While the nodes save."""
    threading.Event().wait(seconds)
