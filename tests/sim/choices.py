"""What a seed decides: the knobs of a history, and a stream of chance for each decision.

A decision draws from its own stream, which its name says (`stream`): a call of a program, a fault
of a life. So one that is left out (`Choices.without_calls`) changes none of the others, and a
history that fails can be made shorter.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from typing import ClassVar

from acpfs.config import FsyncMode, WhenFull

LIVES_MAX = 5
KINDS = {
    "save": 3,
    "overwrite": 1,
    "append": 1,
    "cut": 1,
    "make directory": 1,
    "delete": 1,
    "link": 1,
    "rename": 1,
    "replace": 1,
    "exchange": 1,
    "move directory": 1,
    "remove directory": 1,
    "change mode": 1,
    "set time": 1,
    "set xattr": 1,
    "read": 1,
    "open new": 1,
    "open old": 1,
    "write on": 3,
    "delete open": 1,
    "fsync": 2,
    "wait until persisted": 1,
    "close": 1,
}
"""How often each comes; a history may draw others (`Knobs.kinds`)."""
MAPPING_KINDS = {"map new": 2, "store": 4, "unmap": 1}
"""The same, where programs map files."""
LANE_KINDS = {"be killed": 1}
"""The same, in the passthrough lane alone."""
HABITS = 0.3
"""Share of histories whose programs do several calls in a row, as jobs do (`habits`)."""
LANE_HABITS = 0.7
"""The same of the lane with a mirror, where habits have what was synced written on."""
HABITS_NUMBER = 29580
"""With it, no history that failed before there were habits has any: they are what they were."""
MEMBERS_HABITS_NUMBER = 11
"""The same, of members, of which checkpoints begin as something changes then (`members.plan`)."""
TIDIED = 0.4
"""Share of those in which staging files are tidied up, beside what others have of that."""
NOT_IN_LANE = ("link",)
"""Of files with several names others see later writes of the kernel one by one."""
LEAVES_WRITERS = 0.6
"""Share of histories of that lane whose programs may live longer than their session."""
TORN = 0.3
"""Share of histories of `plain` and `session` in which directories are removed by others."""
MAPS = 0.5
"""Share of those whose programs map files."""
LANE_HANG_RATES = (0.0, 0.0, 0.03)
LANE_OUTAGES_S = (0.0, 0.3, 3.0)
"""What lasts longer than a mount has to begin has versions that a dead session's writers have."""
MIRROR_HANG_RATES = (0.0, 0.1, 0.3)
"""The same of the lane with a mirror: a stream reads what was synced while it is written on."""
MIRROR_OUTAGES_S = (0.0, 3.0, 20.0)
"""The same of the lane with a mirror: what was synced is in RAM and its copy alone for so long."""
SOUND = 0.5
"""Share of histories of the passthrough lane in which the storage does not fail."""
LESS_RAM = 0.3
"""Share of those in which later mounts have less RAM."""
LAST_FAULTS_S = (0.0, 0.0, 0.5, 5.0)
EVERYTHING = 0.4
"""Share of histories in which each kind of call comes as often as `KINDS` says."""


class Profile(enum.Enum):
    """Which knobs a seed may turn."""

    PLAIN = "plain"
    """Everything is killed at once, daemon and programs; the next daemon mounts anew."""
    SESSION = "session"
    """The daemon alone is killed; the next one takes over what is open and what is not answered."""
    POWER = "power"
    """As plain, and after each call: what would the storage have after a loss of power now?"""
    DURABLE = "durable"
    """As power, where an fsync says that the file outlives one."""
    FULL = "full"
    """The storage has too little room, for some time."""
    SHORT = "short"
    """RAM has room for two or three files; the storage does not fail."""
    HANG = "hang"
    """Calls on the storage take long."""
    MEMBERS = "members"
    """Several daemons over one storage (`tests/sim/members`)."""
    LANE = "lane"
    """Programs write in the passthrough lane: the daemon does not see it, RAM is short, and whoever
    writes is held.
    """
    MIRROR = "mirror"
    """What is complete is copied to a disk, with the log, and RAM is lost (`spill_mode`)."""
    MIRRORED_LANE = "mirrored-lane"
    """As lane, with the mirror: writers go on behind an fsync, and RAM is lost."""
    SHARED = "shared"
    """Several processes have the same files open, some have copies of descriptors, some are killed
    (`crew`).
    """
    FORGETTING = "forgetting"
    """A flush that fails has lost names that were not flushed, as where a server has ended."""
    COLD = "cold"
    """Most files are on the storage alone, which answers slowly, and change as they are read."""
    NARROW = "narrow"
    """Few names, at which one content follows the other; staging files are removed, their numbers
    come again, and lives end as the storage has just been changed.
    """
    OUTDATED = "outdated"
    """As mirrored-lane: lives end as a copy is outdated, always with their RAM."""
    LEFT = "left"
    """As lane: writers outlive their session, and later mounts have no room for what they have."""
    HELD = "held"
    """As lane: programs have more open than RAM has room for, and nothing else goes on."""
    MAPPED = "mapped"
    """As lane: what is mapped is synced, and its staging files are removed."""
    HANDED_ON = "handed-on"
    """As shared: one file, which children write and others rename, and lives end soon."""
    RETURNING = "returning"
    """As members: one ends as it has just renamed something, is forgotten, and comes back."""


HAVE_LANE = (
    Profile.LANE,
    Profile.MIRRORED_LANE,
    Profile.OUTDATED,
    Profile.LEFT,
    Profile.HELD,
    Profile.MAPPED,
)
HAVE_BARE_LANE = (Profile.LANE, Profile.LEFT, Profile.HELD, Profile.MAPPED)
HAVE_MIRRORED_LANE = (Profile.MIRRORED_LANE, Profile.OUTDATED)
HAVE_MIRROR = (Profile.MIRROR, *HAVE_MIRRORED_LANE)
HAVE_MEMBERS = (Profile.MEMBERS, Profile.RETURNING)
HAVE_CREWS = (Profile.SHARED, Profile.HANDED_ON)
AIMED = (
    Profile.FORGETTING,
    Profile.COLD,
    Profile.NARROW,
    Profile.OUTDATED,
    Profile.LEFT,
    Profile.HELD,
    Profile.MAPPED,
    Profile.HANDED_ON,
    Profile.RETURNING,
)
"""At places to which the others hardly ever come (`aims`)."""
UNSETTLED = (Profile.FORGETTING, Profile.LEFT)
"""Run by name alone: some of their histories fail, and nobody knows yet whether acpfs does."""
HAVE_READERS = (Profile.PLAIN, Profile.SESSION, Profile.SHORT)
READERS = 0.5
"""Share of histories of those in which somebody reads what others write."""
HAVE_HABITS = tuple(one for one in Profile if one not in HAVE_CREWS)
HAVE_SPILL = (Profile.SHORT, Profile.LANE)
SPILLS = 0.35
"""Share of histories of those that have a spill directory."""
ERRORS = 0.25
"""Share of those in which a write fails that RAM has no room for."""
SHARES = 0.3
"""Share of histories of those that have little RAM in which each program has an owner of its own,
and each owner a part of RAM (`ram_per_user`).
"""
FULL_RAM = 0.25
"""Share of histories with short RAM in which others fill its tmpfs at times."""
FULL_RAM_S = (0.1, 2.0, 20.0)
"""For how long."""
FULL_RAM_UNTIL_S = 10.0
SPILL_BYTES = (150_000, 1_000_000, 16 << 20)
MAY_KEEP = (Profile.HANG, Profile.FULL, Profile.SHORT, Profile.LANE)
"""Profiles in which a seed says whether the session outlives the daemon."""
SIZES = (0, 1, 100, 5000, 60_000, 200_000)
DATA_SIZES = (1, 5000, 60_000)
MAPPED_PREFIX = b"m"
"""Of the names of files that programs map."""
MAPPED_BYTES_MAX = 100_000
"""Of a file that is mapped; what acpfs expects of one."""
LANE_DATA_SIZES = (1, 5000, 60_000, 200_000)
LANE_SIZES = (0, 100, 5000, 100_000, 300_000, 1_200_000)
"""The last one outgrows RAM."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Which history, and what is left out of it."""

    seed: int
    profile: Profile
    without_calls: frozenset[tuple[str, int]] = frozenset()
    """(program, number of its call)."""
    without_faults: bool = False
    lives_max: int = LIVES_MAX
    in_order: bool = False
    """Threads have their turns in the order in which they came."""

    LIVES_MAX: ClassVar[int] = LIVES_MAX

    @property
    def has_habits(self) -> bool:
        """By a stream of its own: the others are what they were before there were any."""
        if self.profile in AIMED:
            return self.profile in HAVE_HABITS
        number = MEMBERS_HABITS_NUMBER if self.profile is Profile.MEMBERS else HABITS_NUMBER
        share = LANE_HABITS if self.profile is Profile.MIRRORED_LANE else HABITS
        return self.profile in HAVE_HABITS and self.stream("habits", number).random() < share

    def stream(self, *name: object) -> random.Random:
        """The chance of one decision."""
        return random.Random(f"{self.seed}/{self.profile.value}/{name}")


def _ram_bytes(choices: Choices, chance: random.Random) -> int:
    if choices.profile is Profile.SHORT:
        return chance.choice((160, 400)) << 10
    if choices.profile in HAVE_LANE:
        return chance.choice((512, 768, 2048)) << 10
    return 8 << 20


def _later_ram_bytes(choices: Choices, ram_bytes: int) -> int:
    """Less makes no room for copies of what writers of a dead session have."""
    chance = choices.stream("later RAM")
    is_less = choices.profile is Profile.LANE and chance.random() < LESS_RAM
    return min(ram_bytes, chance.choice((128, 256, 384)) << 10) if is_less else ram_bytes


def _spill_bytes(choices: Choices) -> int | None:
    chance = choices.stream("spill")
    if choices.profile in HAVE_MIRROR:
        return chance.choice((600_000, 64 << 20, 64 << 20))
    spills = choices.profile in HAVE_SPILL and chance.random() < SPILLS
    return chance.choice(SPILL_BYTES) if spills else None


def _lane_hang_rate(choices: Choices, *, faulty: bool) -> float:
    chance = choices.stream("hangs of the lane")
    if choices.profile in HAVE_MIRRORED_LANE:
        return chance.choice(MIRROR_HANG_RATES) * (not choices.without_faults)
    return chance.choice(LANE_HANG_RATES) * (faulty and choices.profile in HAVE_BARE_LANE)


def _lane_outage_s(choices: Choices, *, faulty: bool) -> float:
    chance = choices.stream("outages of the lane")
    if choices.profile in HAVE_MIRRORED_LANE:
        return chance.choice(MIRROR_OUTAGES_S) * (not choices.without_faults)
    return chance.choice(LANE_OUTAGES_S) * (faulty and choices.profile in HAVE_BARE_LANE)


def _share_bytes(choices: Choices, ram_bytes: int) -> int:
    chance = choices.stream("shares")
    has_shares = choices.profile in HAVE_SPILL and chance.random() < SHARES
    return ram_bytes // chance.choice((1, 2, 4)) if has_shares else 0


def _full_ram_s(choices: Choices) -> tuple[tuple[float, float], ...]:
    chance = choices.stream("full RAM")
    if choices.profile is not Profile.SHORT or chance.random() >= FULL_RAM:
        return ()
    begins = sorted(chance.uniform(0, FULL_RAM_UNTIL_S) for _time in range(chance.randrange(1, 5)))
    return tuple((begin, begin + chance.choice(FULL_RAM_S)) for begin in begins)


def _when_full(choices: Choices, chance: random.Random, *, waits: bool) -> WhenFull:
    """`waits`: what an application asked to have past RAM fails with the storage."""
    drawn = chance.choice((WhenFull.WAIT, WhenFull.NATIVE))
    if choices.profile in HAVE_SPILL and choices.stream("error").random() < ERRORS:
        return WhenFull.ERROR
    return WhenFull.WAIT if waits else drawn


def _kinds(choices: Choices, *, maps: bool) -> tuple[float, ...]:
    """`maps`: programs map files.

    Programs that do few things often come to places where those that do everything at times do
    not.
    """
    chance = choices.stream("kinds")
    kinds = tuple(map(float, KINDS.values()))
    if choices.profile in HAVE_LANE:
        kinds = tuple(often * (kind not in NOT_IN_LANE) for kind, often in KINDS.items())
        kinds += tuple(often * maps for often in MAPPING_KINDS.values())
        kinds += tuple(map(float, LANE_KINDS.values()))
    if chance.random() < EVERYTHING:
        return kinds
    kinds = tuple(often * chance.choice((0, 1, 1, 5)) for often in kinds)
    return kinds if any(kinds) else (1.0,) * len(kinds)


@dataclass(frozen=True, slots=True)
class Knobs:
    """The world of one history."""

    programs: int
    lives: int
    calls: int
    """Of each program."""
    error_rate: float
    hang_rate: float
    free_bytes: int | None
    """That the storage has beside what is there at first."""
    full_s: float
    """For how long."""
    fsync: FsyncMode
    looks_for_power_loss: bool
    """Share of the storage's calls that fail, before or after they had their effect."""
    when_full: WhenFull
    ram_bytes: int
    later_ram_bytes: int
    """The budget of the lives after the first: somebody may mount again with less."""
    share_bytes: int
    """Of RAM that the files of one program may have (`ram_per_user`); 0: there is no limit."""
    full_ram_s: tuple[tuple[float, float], ...]
    """From when to when, in seconds of the history, the tmpfs has no page left."""
    keeps_session: bool
    counts_subdirectories: bool
    reuses_numbers: bool
    has_coarse_times: bool
    inherited_files: int
    """Of each program, on the storage before anybody mounts it."""
    sizes: tuple[int, ...]
    data_sizes: tuple[int, ...]
    """Of one write to a file that stays open."""
    leaves_writers: bool
    """Where a session ends, who has a file open to write, or mapped, may write on."""
    is_torn: bool
    """Another program removes empty directories into which something is about to come."""
    spill_bytes: int | None
    """That a spill directory takes; None: there is none."""
    mirrors: bool
    """With a copy of the log there, so that what is complete survives the loss of RAM."""
    journal_error_rate: float
    journal_hang_rate: float
    """Share of the journal's calls on its disk that do so."""
    has_reader: bool
    """Somebody reads what the programs write."""
    reads_on: bool
    """A program reads what it writes, and keeps it open for that."""
    kinds: tuple[float, ...]
    """How often each kind of call comes."""
    outage_s: float
    """For how long at the begin of a life the storage refuses every change."""
    last_faults_s: float
    """For how long the storage fails in the last life, too.

    What failed there has to go on by itself: no new daemon begins everything anew.
    """
    stands_still: bool
    """Programs that have files open do nothing for very long, now and then: nobody else may have to
    wait for that.
    """
    sees_writers: bool
    """The lane of files tells who writes."""
    unknown_bytes: int | None
    """That a file is taken for, like which none was seen; None: nobody says."""
    slack_bytes: int
    """Of the tmpfs, beyond RAM's budget."""
    has_passthrough: bool
    is_tidied: bool
    """Another program removes staging files."""
    has_acls: bool
    """Where it hangs, what is made gets a narrower mode than asked for, as nobody knows what ACL it
    inherits: then it has none.
    """
    forget_rate: float = 0.0
    """Share of flushes that fail as the server has ended, and lose names."""
    slow_rate: float = 0.0
    """Share of questions that the storage answers late."""
    is_emptied: bool = False
    """Who removes staging files removes all that there are."""

    @classmethod
    def drawn(cls, choices: Choices) -> Knobs:
        chance = choices.stream("knobs")
        profile = choices.profile
        is_short = profile is Profile.SHORT
        is_lane = profile in HAVE_LANE
        mirrors = profile in HAVE_MIRROR
        spares_lane = is_lane and choices.stream("storage of the lane").random() < SOUND
        faulty = not (choices.without_faults or is_short or spares_lane)
        # what is stored through a mapping leaves no trace by which a copy could be outdated
        maps = is_lane and not mirrors and choices.stream("maps").random() < MAPS
        lives = chance.randrange(1, LIVES_MAX + 1)
        journal = choices.stream("journal")
        return cls(
            programs=chance.choice((1, 1, 2, 3)),
            lives=min(choices.lives_max, lives),
            calls=chance.randrange(4, 14 * lives + 4),
            error_rate=chance.choice((0.0, 0.03, 0.1, 0.1 if is_lane else 0.3)) * faulty,
            hang_rate=chance.choice((0.01, 0.1)) * (faulty and profile is Profile.HANG)
            or _lane_hang_rate(choices, faulty=faulty),
            free_bytes=(
                chance.randrange(1, 500_000) if faulty and profile is Profile.FULL else None
            ),
            full_s=chance.choice((1.0, 20.0, 100.0)),
            fsync=FsyncMode.DURABLE if profile is Profile.DURABLE else FsyncMode.ORDERED,
            looks_for_power_loss=profile in (Profile.POWER, Profile.DURABLE),
            when_full=_when_full(choices, chance, waits=is_lane and faulty),
            ram_bytes=(ram_bytes := _ram_bytes(choices, chance)),
            later_ram_bytes=_later_ram_bytes(choices, ram_bytes),
            share_bytes=_share_bytes(choices, ram_bytes),
            full_ram_s=() if choices.without_faults else _full_ram_s(choices),
            keeps_session=profile in (Profile.SESSION, *HAVE_CREWS)
            or (profile in MAY_KEEP and chance.random() < 0.5),
            counts_subdirectories=chance.random() < 0.7,
            reuses_numbers=chance.random() < 0.5,
            has_coarse_times=chance.random() < 0.2,
            inherited_files=chance.choice((0, 0, 3)),
            sizes=LANE_SIZES if is_lane else (*SIZES, *(300_000,) * is_short),
            data_sizes=LANE_DATA_SIZES if is_lane else DATA_SIZES,
            reads_on=is_lane and choices.stream("reads on").random() < 0.5,
            is_torn=(
                faulty
                and profile in (Profile.PLAIN, Profile.SESSION)
                and choices.stream("torn").random() < TORN
            ),
            spill_bytes=_spill_bytes(choices),
            mirrors=mirrors,
            journal_error_rate=journal.choice((0.0, 0.0, 0.01, 0.05)),
            journal_hang_rate=journal.choice((0.0, 0.0, 0.01, 0.05)),
            has_reader=profile in HAVE_READERS and choices.stream("reader").random() < READERS,
            unknown_bytes=0 if is_lane else None,
            slack_bytes=3 << 20,
            has_passthrough=is_lane,
            kinds=_kinds(choices, maps=maps),
            leaves_writers=is_lane
            and not mirrors
            and choices.stream("dead writers").random() < LEAVES_WRITERS,
            outage_s=chance.choice((0.0, 0.0, 0.0, 0.3, 3.0)) * faulty
            or _lane_outage_s(choices, faulty=faulty),
            last_faults_s=choices.stream("last life").choice(LAST_FAULTS_S) * faulty,
            stands_still=is_short and choices.stream("still").random() < 0.5,
            sees_writers=profile in HAVE_CREWS,
            # where RAM is lost, a staging file may be the only copy
            is_tidied=faulty
            and (
                chance.random() < 0.2
                or (choices.has_habits and choices.stream("tidied").random() < TIDIED)
            )
            and not mirrors,
            has_acls=chance.random() < 0.7 and profile not in (Profile.HANG, *HAVE_MIRRORED_LANE),
        )

    def _mirror_words(self) -> str:
        return (
            f"mirrored to a disk of which {self.journal_error_rate:.0%} of calls fail and"
            f" {self.journal_hang_rate:.0%} hang"
        )

    def __str__(self) -> str:
        """For people: what is unusual."""
        words = [
            f"{self.programs} program{'s' * (self.programs > 1)}",
            f"{self.lives} {'life' if self.lives == 1 else 'lives'}",
            f"{self.calls} calls of each",
            "the session outlives the daemon" if self.keeps_session else "",
            f"{self.inherited_files} older files of each" if self.inherited_files else "",
            f"{self.error_rate:.0%} of changes fail" if self.error_rate else "",
            f"{self.hang_rate:.0%} of calls hang" if self.hang_rate else "",
            "" if self.free_bytes is None else f"{self.free_bytes} bytes for {self.full_s} s",
            f"{self.ram_bytes >> 10} KiB of RAM, then {self.when_full.value}",
            f"{self.share_bytes >> 10} KiB of it for each program" if self.share_bytes else "",
            f"later {self.later_ram_bytes >> 10}" if self.later_ram_bytes < self.ram_bytes else "",
            f"no changes for {self.outage_s} s of each life" if self.outage_s else "",
            f"also for {self.last_faults_s} s of the last one" if self.last_faults_s else "",
            f"its tmpfs is full {len(self.full_ram_s)} times" if self.full_ram_s else "",
            "programs stand still" if self.stands_still else "",
            "" if self.spill_bytes is None else f"{self.spill_bytes >> 10} KiB of spill",
            self._mirror_words() if self.mirrors else "",
            "somebody reads" if self.has_reader else "",
            "writers outlive their session" if self.leaves_writers else "",
            "staging files are tidied up" if self.is_tidied else "",
            "empty directories are removed" if self.is_torn else "",
            f"{self.forget_rate:.0%} of flushes lose names" if self.forget_rate else "",
            f"{self.slow_rate:.0%} of questions are answered late" if self.slow_rate else "",
            "fsync is durable" if self.fsync is FsyncMode.DURABLE else "",
            "inode numbers are used again" if self.reuses_numbers else "",
            "times to the second" if self.has_coarse_times else "",
            "" if self.counts_subdirectories else "directories have one link",
        ]
        return ", ".join(word for word in words if word)
