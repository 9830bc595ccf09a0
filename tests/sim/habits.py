"""What applications do as a whole: several calls in a row, each of which comes alone, too.

Calls that are drawn one by one hardly ever come to places that jobs come to each day: a log that is
synced as it is written, a file that outgrows RAM and stays open while others are saved. A history
has habits or not (`Choices.has_habits`), by a stream of chance of its own: so those without them
are what they were before there were any.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

from tests.sim.choices import AIMED, MAPPED_PREFIX, Profile
from tests.sim.programs import OPEN_MAX, Calls, Opened, Program

Habit = Callable[[random.Random], Awaitable[None]]

SHARE = 0.25
"""Of the calls of a program that has habits."""
AIMED_SHARE = 0.6
"""The same, where they aim at a place."""
PIECE_BYTES = 20_000
SYNCED_BYTES = (140_000, 200_000)
"""More than what is copied where it is synced."""
COPIED_S = (0.001, 0.05, 0.5, 6.0)
"""Until what was synced may be copied, also for the second time."""
SYNCS_MAX = 4
STORES_MAX = 4
BEYOND_RAM_BYTES = 300_000
OTHERS_BYTES = (60_000, 100_000, 300_000)
OTHERS_MAX = 4
MANY_OPEN = 9
MANY_TURNS = 12
GROWS_BYTES = (20_000, 40_000)
OLD = "old"
"""In the names of files that nobody has made here."""
KINDS = "bcdefgh"
SAME_BYTES = (1, 5000)
TIMES_MAX = 4
RELEASE_PAUSES_S = (0.0, 0.0, 0.001, 0.05, 0.5)
"""The kernel sends RELEASE when it has time."""


class JobProgram(Program):
    """One that has habits, where its history has them."""

    def __init__(self, name: str, calls: Calls, *parts: Any) -> None:
        """See `Program`."""
        super().__init__(name, calls, *parts)
        self._closes = 0
        if self._choices.has_habits:
            calls.release_pause_s = self._release_pause_s

    def _release_pause_s(self) -> float:
        chance = self._choices.stream(self.name, self.number, "release", self._closes)
        self._closes += 1
        return chance.choice(RELEASE_PAUSES_S)

    def habit(self) -> Habit | None:
        """See `Program`."""
        if not self._choices.has_habits or not self._files():
            return None
        chance = self._choices.stream(self.name, self.number, "habit")
        is_aimed = self._choices.profile in AIMED
        if chance.random() >= (AIMED_SHARE if is_aimed else SHARE):
            return None
        return chance.choice(self._habits())

    def _aimed_habits(self) -> list[Habit]:
        """Of a profile that aims at a place; else none."""
        habits: dict[Profile, list[Habit]] = {
            Profile.FORGETTING: [
                self._changes_and_rewrites,
                self._changes_and_rewrites,
                self._makes_a_tree,
                self._remakes,
                self._puts_one_over_the_other,
            ],
            Profile.COLD: [self._changes_what_is_cold],
            Profile.NARROW: [
                self._puts_one_over_the_other,
                self._rewrites,
                self._links_and_rewrites,
                self._links_and_rewrites,
                self._remakes,
            ],
            Profile.OUTDATED: [
                *4 * [self._goes_on_behind_a_copy],
                self._syncs_as_it_goes,
            ],
            Profile.LEFT: [*3 * [self._syncs_as_it_goes], self._outgrows_and_goes_on],
            Profile.HELD: [self._keeps_many_open],
            Profile.MAPPED: [self._stores_to_what_is_synced],
        }
        return habits.get(self._choices.profile, [])

    def _habits(self) -> list[Habit]:
        if aimed := self._aimed_habits():
            return aimed
        habits: list[Habit] = [
            self._remakes,
            self._rewrites,
            self._makes_a_tree,
            self._changes_attributes,
            self._exchanges_and_writes,
        ]
        profile = self._choices.profile
        if profile is Profile.MIRRORED_LANE:
            habits += [self._syncs_as_it_goes, self._outgrows_and_goes_on]
            habits += 4 * [self._goes_on_behind_a_copy]
        if profile is Profile.LANE:
            habits += 2 * [
                self._syncs_as_it_goes,
                self._outgrows_and_goes_on,
                self._reads_as_it_writes,
                self._stores_to_what_is_synced,
            ]
        if profile is Profile.SHORT:
            habits += 3 * [self._deletes_what_outgrew_ram]
        return habits

    def _answered(self) -> None:
        self._calls.kernel.answered()

    def _kind(self, chance: random.Random) -> str:
        """A path of another kind than those before: of how long such files are nothing is known."""
        letters = "".join(chance.choice(KINDS) for _letter in range(3))
        directory = self._pick(chance, self._directories())
        return f"{directory}/{letters}{self.number}"

    async def _begin_large(self, chance: random.Random, size: int) -> Opened | None:
        """An open file of that many bytes; None: there are too many open ones."""
        if len(self.open) >= OPEN_MAX:
            return None
        file = await self._begin_file(self._kind(chance))
        await self._write_into(file, 0, chance.randbytes(size))
        self._answered()
        return file

    # -- names

    async def _remakes(self, chance: random.Random) -> None:
        """A file is removed, or moved away, and made anew under its name, a few times."""
        path = self._pick(chance, self._files())
        for time in range(chance.randrange(1, TIMES_MAX)):
            if chance.random() < 0.5:
                await self._delete_file(path)
            else:
                await self._rename_file(path, f"{path}.{self.number}.{time}")
            self._answered()
            await self._save_as(path, chance.randbytes(chance.choice(SAME_BYTES)))
            self._answered()

    async def _rewrites(self, chance: random.Random) -> None:
        """As large as before, a few times in a row."""
        path = self._pick(chance, self._files())
        size = chance.choice(SAME_BYTES)
        for _time in range(chance.randrange(2, TIMES_MAX + 1)):
            await self._rewrite(path, chance.randbytes(size), keeps=False)
            self._answered()

    async def _makes_a_tree(self, chance: random.Random) -> None:
        """A directory has one for what is temporary, which goes; what comes then stays."""
        directory = self._kind(chance)
        await self._make_directory_as(directory)
        self._answered()
        await self._make_directory_as(f"{directory}/tmp")
        self._answered()
        await self._pause(chance)
        await self._remove_directory_at(f"{directory}/tmp")
        self._answered()
        await self._pause(chance)
        await self._save_as(f"{directory}/{self.number}", chance.randbytes(100))

    async def _exchanges_and_writes(self, chance: random.Random) -> None:
        """Two files change places, and one of them is written on at once."""
        files = self._files()
        a = chance.choice(files)
        b = chance.choice(files)
        await self._exchange_files(a, b)
        self._answered()
        await self._rewrite(chance.choice((a, b)), chance.randbytes(100), keeps=True)

    async def _changes_attributes(self, chance: random.Random) -> None:
        """Some of one file, which is read then."""
        path = self._pick(chance, self._files())
        for _time in range(chance.randrange(1, TIMES_MAX)):
            change = chance.choice((self._set_time_of, self._set_xattr_of))
            await change(chance, path)
            self._answered()
        await self._read_file(path)

    async def _puts_one_over_the_other(self, chance: random.Random) -> None:
        """A file is made beside another one and renamed over it, a few times in a row."""
        path = self._pick(chance, self._files())
        size = chance.choice(SAME_BYTES)
        for time in range(chance.randrange(2, TIMES_MAX + 1)):
            beside = f"{path}.{self.number}.{time}"
            await self._save_as(beside, chance.randbytes(size))
            self._answered()
            await self._rename_file(beside, path)
            self._answered()

    async def _links_and_rewrites(self, chance: random.Random) -> None:
        """A file gets another name, and another content, which comes to both."""
        path = self._pick(chance, self._files())
        await self._link_to(path, f"{self._kind(chance)}")
        self._answered()
        if chance.random() < 0.5:
            await self._pause(chance)
        for _time in range(chance.randrange(1, TIMES_MAX)):
            await self._rewrite(path, chance.randbytes(chance.choice(SAME_BYTES)), keeps=False)
            self._answered()

    async def _changes_and_rewrites(self, chance: random.Random) -> None:
        """Attributes of a file are set, it is written anew, and they are set again."""
        path = self._pick(chance, self._files())
        await self._set_some(chance, path)
        await self._rewrite(path, chance.randbytes(chance.choice(SAME_BYTES)), keeps=False)
        self._answered()
        if chance.random() < 0.5:
            await self._set_some(chance, path)
        await self._note_time(path)

    async def _set_some(self, chance: random.Random, path: str) -> None:
        change = chance.choice((self._set_time_of, self._set_xattr_of, self._set_mode_of))
        await change(chance, path)
        self._answered()

    async def _changes_what_is_cold(self, chance: random.Random) -> None:
        """What nobody has opened yet gets other attributes, or another name, and is opened."""
        files = [path for path in self._files() if OLD in path] or self._files()
        path = chance.choice(files)
        for _time in range(chance.randrange(1, TIMES_MAX)):
            if chance.random() < 0.5:
                await self._set_some(chance, path)
            else:
                await self._exchange_files(path, chance.choice(files))
                self._answered()
        if chance.random() < 0.5:
            await self._pause(chance)
        if chance.random() < 0.3:
            await self._read_file(path)
            return
        await self._rewrite(path, chance.randbytes(100), keeps=chance.random() < 0.7)

    # -- open files

    async def _keeps_many_open(self, chance: random.Random) -> None:
        """More than RAM has room for, and each is written on in turn."""
        while len(self.open) < MANY_OPEN:
            await self._begin_file(self._kind(chance) + f".{len(self.open)}")
            self._answered()
        for _turn in range(chance.randrange(1, MANY_TURNS)):
            file = self.open[chance.choice(sorted(self.open))]
            data = chance.randbytes(chance.choice(GROWS_BYTES))
            await self._write_into(file, len(file.content), data)
            self._answered()

    async def _syncs_as_it_goes(self, chance: random.Random) -> None:
        """A large file is synced, written on, and synced again, without a pause."""
        file = await self._begin_large(chance, chance.choice(SYNCED_BYTES))
        if file is None:
            return
        for _time in range(chance.randrange(1, SYNCS_MAX + 1)):
            await self._sync_file(file)
            self._answered()
            at = chance.choice((len(file.content), 0))
            await self._write_into(file, at, chance.randbytes(chance.choice(SAME_BYTES)))
            self._answered()

    async def _goes_on_behind_a_copy(self, chance: random.Random) -> None:
        """A large file is synced, and written on in place once there is a copy of it."""
        file = await self._begin_large(chance, chance.choice(SYNCED_BYTES))
        if file is None:
            return
        for _time in range(chance.randrange(1, STORES_MAX + 1)):
            if chance.random() < 0.5:
                await self._sync_file(file)
                self._answered()
            await self._calls.pause(chance.choice(COPIED_S))
            at = chance.choice((0, chance.randrange(len(file.content))))
            await self._write_into(file, at, chance.randbytes(chance.choice(SAME_BYTES)))
            self._answered()

    async def _stores_to_what_is_synced(self, chance: random.Random) -> None:
        """The same, through a mapping."""
        if len(self.open) >= OPEN_MAX or not any(self._knobs.kinds[-4:-1]):
            return
        directory = self._pick(chance, self._directories())
        path = f"{directory}/{MAPPED_PREFIX.decode()}{self.number}"
        file = await self._map_as(path, chance.randbytes(chance.choice(SYNCED_BYTES)))
        self._answered()
        for _time in range(chance.randrange(1, STORES_MAX + 1)):
            await self._sync_file(file)
            self._answered()
            await self._pause(chance)
            if file.mapping is not None:
                self._store_to(chance, file)

    async def _outgrows_and_goes_on(self, chance: random.Random) -> None:
        """A file outgrows RAM, is synced and stays open, while others are saved."""
        size = self._knobs.ram_bytes + BEYOND_RAM_BYTES
        file = await self._begin_large(chance, size)
        if file is None:
            return
        if chance.random() < 0.7:
            await self._sync_file(file)
            self._answered()
        for other in range(chance.randrange(1, OTHERS_MAX)):
            data = chance.randbytes(chance.choice(OTHERS_BYTES))
            await self._save_as(f"{self._kind(chance)}.{other}", data)
            self._answered()
        await self._write_into(file, chance.randrange(size), chance.randbytes(PIECE_BYTES))

    async def _reads_as_it_writes(self, chance: random.Random) -> None:
        """A file that cannot leave RAM, as its own program reads it, becomes larger than that."""
        if not self._reads_on or self._has_reader():
            return
        file = await self._begin_large(chance, PIECE_BYTES)
        if file is None:
            return
        if file.in_kernel:
            await self._calls.open_reader(file)
        while len(file.content) < self._knobs.ram_bytes + BEYOND_RAM_BYTES:
            await self._write_into(file, len(file.content), chance.randbytes(3 * PIECE_BYTES))
        self._answered()

    async def _deletes_what_outgrew_ram(self, chance: random.Random) -> None:
        """It has a name no more, and is read all the same."""
        file = await self._begin_large(chance, self._knobs.ram_bytes + PIECE_BYTES)
        if file is None:
            return
        if chance.random() < 0.7:
            await self._sync_file(file)
            self._answered()
        await self._pause(chance)
        await self._delete_open_file(chance, file)
