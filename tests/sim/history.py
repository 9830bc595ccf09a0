"""One history from its seed to its verdict: programs, lives that follow each other, one storage."""

from __future__ import annotations

import math
import random
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from acpfs.backing.leftovers import WITHDRAWN
from acpfs.writeback.commits.given_back import BARE_MODE
from acpfs.writeback.copies.journal_marks import mark_path
from tests.sim.aims import knobs_of
from tests.sim.choices import HAVE_CREWS, Choices, Profile
from tests.sim.crew import Crew, SharedFile
from tests.sim.habits import JobProgram
from tests.sim.kernel import WAIT_S, Process, Serving
from tests.sim.life import Life
from tests.sim.oracles import Told, judge_mirrored, judge_order, judge_shown
from tests.sim.passthrough import DeadWriter, Passthrough
from tests.sim.programs import Calls, Died, Opened, Program, whole_pieces
from tests.sim.readers import Reader
from tests.sim.rights import judge_in_order
from tests.sim.rounds import MachineClock, Rounds
from tests.sim.scheduler import Killed
from tests.sim.shown import MODE, PREFIX, XATTR, Shown, attribute, bare, below, differences
from tests.sim.status import judge_clean, judge_persisted, waits
from tests.sim.storage import Storage
from tests.sim.trace import Finding, Trace, causes
from tests.sim.virtual import MACHINE

DRAIN_MAX_S = 3000.0
"""Virtual time in which everything is persisted, once faults have stopped."""
LOOK_S = 0.5
IN_VAIN_MAX_S = 5.0
"""For which a file is kept back when there is room for a copy: a daemon looks each second."""
ENDS_LOOKS = 1000
"""Within them ends what goes on after the last call: bytes that come to RAM."""
RAM_LOST = 0.6
"""Share of deaths of everything in which RAM is lost, where there is a mirror."""
STATUS_LOOKS = 0.2
"""Share of looks that ask for the status."""
TIDIES_S = (0.01, 0.05, 0.3)
EMPTIES = 0.7
"""Share of those times at which all of them are removed, where they may be."""
TEARS_MAX = 30
"""Whoever has removed so much has lost patience, too: beside calls of which a third fail nothing
would ever get done.
"""
TEARS_IN_VAIN_MAX = 3000
"""In a row: whoever waits for what never comes waits for thousands of seconds."""
FIRST_UID = 1000
"""Owner of what the first program makes, where each has a share of RAM."""
DEAD_WRITES_MAX = 8
DEAD_PAUSES_S = (0.0, 0.001, 0.02, 0.5, 4.0)
DEAD_SIZES = (1, 5000, 60_000)
"""Of what is written by those whose session is over."""


@dataclass
class Outcome:
    """What came of a history."""

    choices: Choices
    trace: Trace
    failure: BaseException | None = None
    counts: Counter[str] = field(default_factory=Counter)


class History(Serving):
    """Makes the lives, and carries calls to the one that there is."""

    def __init__(self, choices: Choices, base: Path) -> None:
        """`base`: a directory for RAM tiers, best on a tmpfs."""
        super().__init__(knobs_of(choices))
        self.choices = choices
        self.base = base
        self.trace = Trace()
        self.storage = Storage()
        self.storage.counts_subdirectories = self.knobs.counts_subdirectories
        self.storage.features = replace(self.storage.features, acls=self.knobs.has_acls)
        self._power = choices.stream("power")
        self._status = choices.stream("status")
        self.storage.reuses_numbers = self.knobs.reuses_numbers
        self.storage.keep_times_to(10**9 if self.knobs.has_coarse_times else 1)
        MACHINE.begin(choices.seed, self.storage, stamps=self.knobs.has_passthrough)
        if self.knobs.has_passthrough:
            self.passthrough = Passthrough(self.storage, self.trace, self.most_s())
        self.counts: Counter[str] = Counter()
        has_shares = self.knobs.share_bytes > 0
        self.processes = [
            Process(self, FIRST_UID + number if has_shares else 0)
            for number in range(self.knobs.programs)
        ]
        self.programs = list[Program]()
        self.crews = list[Crew]()
        for one in enumerate(self.processes):
            if choices.profile in HAVE_CREWS:
                self.crews.append(self._crew(*one))
            else:
                self.programs.append(self._program(*one))
        self.storage.notes_attributes = any(crew.has_rights for crew in self.crews)
        self.reader = Process(self) if self.knobs.has_reader else None
        self.told = [program.told for program in self.programs]
        self.told += [file.told for crew in self.crews for file in crew.files]
        if self.knobs.forget_rate:
            self.storage.settle()  # what was there before anybody mounted it stays
        self.storage.fill(self.knobs.free_bytes)
        for told in self.told:
            told.may_remove_early = self.knobs.free_bytes is not None
        self._losses = 0
        """Of names on the storage, as far as they were looked at."""
        self._mends = False
        self._is_ram_lost = False
        """Since what a death left was last judged."""
        self._kept_back: dict[str, set[bytes]] = {}
        """What writers of a dead session have made of files."""
        self._synced_left: dict[str, bytes] = {}
        """What writers of the last session had synced, and the storage did not show yet as it
        ended.
        """
        self._changing: dict[str, tuple[int, list[bytes]]] = {}
        """Files that were kept back as programs went on with what the mount shows: how long each is
        as long as it is kept back, and what dead writers have made of it.
        """
        self._in_vain_s: dict[str, float] = {}
        """Files that are kept back though RAM has room for a copy; since when."""
        self._halves_of = 0
        """The latest life with programs: what the mount shows of those is known to be whole
        since.
        """

    def _program(self, number: int, process: Process) -> Program:
        name = f"p{number}"
        chance = self.choices.stream("inherited", number)
        at_first: Shown = {}
        if self.knobs.inherited_files:
            at_first[f"{name}/".encode()] = b""
            for file in range(self.knobs.inherited_files):
                data = chance.randbytes(chance.choice(self.knobs.sizes))
                at_first[f"{name}/old{file}".encode()] = data
        for path, content in at_first.items():
            self.storage.put(path, content)
        for path in list(at_first):
            at_first[attribute(path, MODE)] = b"755" if path.endswith(b"/") else b"644"
        told = Told(f"{name}/".encode(), at_first)
        return JobProgram(name, Calls(process), self.choices, self.knobs, self.trace, told)

    def _crew(self, number: int, process: Process) -> Crew:
        name = f"p{number}"
        chance = self.choices.stream("inherited", number)
        self.storage.put(f"{name}/".encode(), b"")
        files = []
        for letter in "ab"[: chance.choice((1, 1, 2))]:
            path = f"{name}/{letter}"
            content = chance.randbytes(100_000)
            at_first = {path.encode(): content} if chance.random() < 0.7 else {}
            for place in at_first:
                self.storage.put(place, content)
            told = Told(path.encode(), at_first)
            files.append(SharedFile(path, told, content if at_first else b"", bool(at_first)))
        parts = (Calls(process), self.choices, self.knobs, self.trace)
        return Crew(name, *parts, files, self.table, self.counts)

    # -- the history

    def run(self) -> Outcome:
        outcome = Outcome(self.choices, self.trace, counts=self.counts)
        try:
            trio.run(self._main, clock=MachineClock())
        except BaseException as failure:
            if isinstance(failure, KeyboardInterrupt):
                raise
            outcome.failure = worst(failure)
        finally:
            if self.life is not None:
                self.life.turns.is_over = True
                self.life.bury()
            if self.passthrough is not None:
                self._count_kernel(self.passthrough)
                self.passthrough.end_all()
            shutil.rmtree(self.base, ignore_errors=True)
        return outcome

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            rounds = Rounds(self, nursery.cancel_scope.cancel)
            nursery.start_soon(self._lives)
            nursery.start_soon(self._make_room)
            nursery.start_soon(self._tidy)
            nursery.start_soon(self._tear)
            async with trio.open_nursery() as programs:
                for one in zip(self.programs, self.processes, strict=bool(self.programs)):
                    programs.start_soon(self._run, *one)
                for crew in self.crews:
                    programs.start_soon(crew.run)
                if self.reader is not None:
                    parts = (self.choices, self.knobs, self.trace, self.counts)
                    reader = Reader(self.reader, self.programs, *parts)
                    programs.start_soon(self._run, reader, self.reader)
            await self._end()
            nursery.cancel_scope.cancel()
        if rounds.failure is not None:
            raise rounds.failure

    # -- turns (`rounds.Takes`)

    def step(self) -> bool:
        """The life's."""
        return self.life is not None and self.life.step()

    def is_anyone_ready(self) -> bool:
        """See `Takes`."""
        life = self.life
        return life is not None and not life.turns.is_over and life.turns.is_anyone_ready

    def next_s(self) -> float:
        """See `Takes`."""
        return math.inf if self.life is None else self.life.timers.next_s()

    # -- lives

    async def _lives(self) -> None:
        base = self.base / "life-0"
        for number in range(self.knobs.lives):
            life = Life(
                number,
                base,
                self.storage,
                self.choices,
                self.knobs,
                self.trace,
                processes=self.table,
                passthrough=self.passthrough,
            )
            self.counts["lives"] += 1
            self.life = life
            life.at_join = self._judge_mirrored
            if number and not self.knobs.keeps_session:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._judge_after_death, life)
                    await life.live()
                    nursery.cancel_scope.cancel()
            else:
                await life.live()
            assert life.left is not None
            base = life.left
            self._count(life)
            self._lose_ram(life)
            for program in () if self.knobs.keeps_session else self.programs:
                program.lets_go()
            if self.passthrough is not None and not self.knobs.keeps_session:
                self.passthrough.begin_anew()
                for program in self.programs:
                    program.may_count_closes()
                self._leave_writers(self.passthrough, number)
            life.bury()
            self.storage.forget_descriptors()
            if self.knobs.is_torn:
                self._give_mode(self._torn())
            self.look()

    def _lose_ram(self, life: Life) -> None:
        """The machine has ended with its RAM; its disk stays."""
        if not self.knobs.mirrors:
            return
        chance = self.choices.stream("lost RAM", life.number)
        if chance.random() < RAM_LOST or self.choices.profile is Profile.OUTDATED:
            self._is_ram_lost = True
            assert life.left is not None
            self.trace.note("world", "RAM is lost", (), "")
            self.counts["RAM was lost"] += 1
            shutil.rmtree(life.left / "tier")
            self.storage.staged_alone()
            if self.storage.own_content(mark_path(self.storage.node)) in (None, WITHDRAWN):
                # nobody knows what was not flushed; the storage has done so long before the
                # machine is there again
                self.storage.settle()
                for told in self.told:  # the disk failed, and status says that it is off
                    told.mirrored_at = 0
                self._give_mode(self._directories())  # what would have given it is lost

    def _leave_writers(self, passthrough: Passthrough, number: int) -> None:
        """Those who live longer than the session of that life."""
        self._synced_left.clear()
        stored = set(self.storage.visible().values())
        for program in self.programs:
            is_closing = program.under_way.startswith("close")
            for file in () if is_closing else program.written_files():
                dead = passthrough.left.pop(file.ino, None)
                if dead is None:
                    continue
                self.counts["writers who outlived their session"] += 1
                file.outlived.append(file.content)
                is_synced = bool(file.later) and not file.is_changed
                if is_synced and file.content not in stored:
                    self._synced_left[file.path] = file.content
                chance = self.choices.stream("dead writer", number, file.path)
                self._nursery.start_soon(self._write_on, passthrough, dead, file, chance)
        for dead in passthrough.left.values():
            passthrough.end(dead)
        passthrough.left.clear()

    async def _write_on(
        self, passthrough: Passthrough, dead: DeadWriter, file: Opened, chance: random.Random
    ) -> None:
        """For nobody from when the next mount begins (S506): from then on no mount has anything of
        it, but of a file that is kept back.
        """
        for _time in range(chance.randrange(1, DEAD_WRITES_MAX)):
            await trio.sleep(chance.choice(DEAD_PAUSES_S))
            at = chance.choice((0, chance.randrange(len(file.content) + 1)))
            data = chance.randbytes(chance.choice(DEAD_SIZES))
            at, data = whole_pieces(at, data)
            is_behind = self._is_left_behind(dead)
            if not is_behind:
                former_bytes = len(file.content)
                file.becomes(at, data)
                file.comes_in_pages(former_bytes)
                if self.life is not None:
                    path = self.life.kept_back_as(dead.tier_id)
                    if path in self._changing:
                        shown_bytes, later = self._changing[path]
                        later.append(file.content[:shown_bytes])
                        self.changed_unseen.add(path)
            await passthrough.write_on(dead, at, data, chance)
            if not is_behind and self.life is not None:
                path = self.life.kept_back_as(dead.tier_id)
                self._kept_back.setdefault(path, set()).add(file.content)
        await trio.sleep(chance.choice(DEAD_PAUSES_S))
        passthrough.end(dead)

    def _note_kept_back(self, life: Life) -> None:
        """What the mount shows of such files others may change until there is a copy (S506)."""
        self._changing.clear()
        self.changed_unseen.clear()
        for path in life.kept_back():
            for told in self.told:
                content = told.now.get(path.encode())
                if content is not None:
                    later = told.became.setdefault(content, [content])
                    self._changing[path] = (len(content), later)

    def _is_left_behind(self, dead: DeadWriter) -> bool:
        """Whether a mount has begun since, and does not need the file any more that he writes."""
        life = self.life
        if life is None or not life.is_serving or life.turns.is_over:
            return False
        return not life.kept_back_as(dead.tier_id)

    async def _make_room(self) -> None:
        """Somebody has tidied up the storage."""
        await trio.sleep(self.knobs.full_s)
        self.storage.fill(None)

    async def _tidy(self) -> None:
        chance = self.choices.stream("tidy")
        in_vain = 0
        removed = 0
        while self.knobs.is_tidied and in_vain < TEARS_IN_VAIN_MAX and removed < TEARS_MAX:
            in_vain += 1
            await trio.sleep(chance.choice(TIDIES_S))
            life = self.life
            if life is None or life.number == self.knobs.lives - 1:
                continue
            all_of_them = self.knobs.is_emptied and chance.random() < EMPTIES
            if names := self.storage.tidy(chance, all_of_them=all_of_them):
                self.trace.note("somebody", "removes", tuple(names))
                in_vain = 0
                removed += 1

    async def _tear(self) -> None:
        """Somebody removes empty directories: acpfs makes them again for what comes there."""
        chance = self.choices.stream("tear")
        in_vain = 0
        removed = 0
        while self.knobs.is_torn and in_vain < TEARS_IN_VAIN_MAX and removed < TEARS_MAX:
            in_vain += 1
            await trio.sleep(chance.choice(TIDIES_S))
            life = self.life
            if life is None or life.number == self.knobs.lives - 1 or not life.is_serving:
                continue
            self.look()
            stored = self.storage.visible()
            for program in self.programs:
                places = removable(program.told, stored)
                if program.told.pending is None and places:
                    place = chance.choice(places)
                    program.told.torn.add(place)
                    program.told.were_torn.add(place)
                    self.trace.note("somebody", "removes", (place,))
                    self.storage.remove_directory(place)
                    in_vain = 0
                    removed += 1
                    self.counts["directories removed by others"] += 1

    def _give_mode(self, places: Iterable[bytes]) -> None:
        """A life that ends as it makes a directory leaves it without its mode (S522): somebody
        gives it to those of them that have none.
        """
        for place in sorted(places):
            if self.storage.give_mode(place, BARE_MODE, 0o755):
                self.trace.note("somebody", "gives its mode", (place,))

    def _torn(self) -> set[bytes]:
        return {place for told in self.told for place in told.torn | told.were_torn}

    def _directories(self) -> list[bytes]:
        return [path for path in self.storage.visible() if path.endswith(b"/")]

    def _count_kernel(self, passthrough: Passthrough) -> None:
        self.counts["writes that were held up"] += passthrough.held_up
        self.counts["writes for nobody"] += passthrough.writes_for_nobody
        self.counts["mappings"] += passthrough.mappings
        self.counts["files that ended with their mapping"] += passthrough.ended_with_mapping

    def _count(self, life: Life) -> None:
        self.counts["turns"] += life.turns.count
        self.counts["kills"] += life.left is not None
        self.counts["answers"] += life.answered
        for name, value in life.reached().items():
            self.counts[f"lives with {name}"] += value > 0

    async def _run(self, program: Program | Reader, process: Process) -> None:
        while True:
            try:
                await program.run()
            except Died as death:
                # what it has left is being looked at
                while process.mount <= death.mount:  # noqa: ASYNC110 - in virtual time
                    await trio.sleep(WAIT_S)
            else:
                return

    def stored(self) -> Shown:
        """See `Serving`."""
        return self.storage.visible()

    def stored_attributes(self) -> Shown:
        """See `Serving`."""
        return self.storage.attributes()

    def look(self) -> None:
        states = self.storage.shown
        attributes = self.storage.shown_attributes
        self.storage.shown = []
        self.storage.shown_attributes = []
        if self._is_mending():
            states.clear()
            attributes.clear()
        if self.storage.notes_attributes:
            files = [
                (file.path, file.told, file.rights) for crew in self.crews for file in crew.files
            ]
            for state, its_attributes in zip(states, attributes, strict=True):
                judge_order(self.told, [state])
                judge_in_order(files, self.told, its_attributes)
        else:
            judge_order(self.told, states)
        if self.knobs.is_torn:
            stored = self.storage.visible()
            for told in self.told:
                told.torn -= stored.keys()
        self._judge_status()
        self._judge_kept_back()

        if self.knobs.looks_for_power_loss:
            left = self.storage.after_power_loss(self._power, any_order=False)
            for told in self.told:
                told.left(below(left, told.directory))

    def _is_mending(self) -> bool:
        """Whether names that the storage has lost may not be there again: then it shows earlier
        moments, and some of what acpfs puts back before the rest.
        """
        life = self.life
        if self.storage.losses > self._losses:
            self._losses = self.storage.losses
            self._mends = True
            for told in self.told:
                told.at = told.durable_at
        was_mending = self._mends
        if life is not None and life.is_serving and not life.turns.is_over and not len(life.log):
            self._mends = False
        return was_mending

    def _judge_status(self) -> None:
        """Now and then: what is said to be persisted is so."""
        life = self.life
        if life is None or not life.is_serving or life.turns.is_over:
            return
        self._judge_mirrored()
        if self._status.random() < STATUS_LOOKS:
            told = [program.told for program in self.programs]
            stored = self.storage.visible()
            left = self._left()
            self.counts["files said to be persisted"] += judge_clean(life, told, stored, left)

    def _judge_mirrored(self) -> None:
        """What is mirrored now is not lost with RAM."""
        if not self._is_ram_lost and self.life is not None and self.life.is_mirrored():
            self.counts["looks at which all was mirrored"] += 1
            for one in self.told:
                one.is_mirrored()

    def _judge_kept_back(self) -> None:
        """As long as a file is kept back, nothing is stored of it (S506)."""
        life = self.life
        if (
            not (self._kept_back or self._synced_left)
            or life is None
            or not life.is_serving
            or life.turns.is_over
        ):
            return
        stored = set(self.storage.visible().values())
        kept_back = life.kept_back()
        now_s = MACHINE.moment_s
        in_vain = life.kept_back_in_vain()
        self._in_vain_s = {path: self._in_vain_s.get(path, now_s) for path in in_vain}
        for path, since_s in self._in_vain_s.items():
            if now_s - since_s > IN_VAIN_MAX_S:
                raise Finding("KEPT BACK", f"{path} is kept back, and RAM has room for a copy")
        self.counts["looks at what is kept back"] += len(kept_back)
        for path in kept_back:
            is_stored = self._synced_left.get(path) in stored
            if is_stored or not self._kept_back.get(path, set()).isdisjoint(stored):
                raise Finding("KEPT BACK", f"{path} is kept back, and stored")

    def _left(self) -> Shown:
        return self.storage.after_power_loss(self._status, any_order=False)

    def moments(self) -> list[int]:
        """See `Serving`."""
        return [len(program.told.moments) - 1 for program in self.programs]

    def judge_persisted(self, moments: list[int]) -> None:
        """See `Serving`."""
        self.counts["waits that ended"] += 1
        told = [program.told for program in self.programs]
        judge_persisted(told, moments, self.storage.visible(), self._left())

    def waits(self, life: Life) -> str:
        """See `Serving`."""
        return waits(life, self.programs)

    def judge_durable(self, path: bytes, content: bytes) -> None:
        """What an fsync said."""
        left = self.storage.after_power_loss(self._power, any_order=False)
        judge_shown("DURABLE", {path: left.get(path, b"")}, {path: content})

    async def _judge_after_death(self, life: Life) -> None:
        """All processes died: what does the mount show? Halves are discarded, as an operator
        would.
        """
        process = Process(self)
        process.mount = life.number
        calls = Calls(process)
        try:
            await self._until_made_again(process)
            got = await calls.tree("")
            if self._halves_of == life.number - 1 and not self._is_ram_lost:
                for program in self.programs:
                    program.judge_halves(got)
            if self.knobs.leaves_writers:
                await self._judge_untouched(calls, life, got)
            life.discard_halves()
            got = await calls.tree("", attributes=True)
        except (Died, Killed):
            return
        if self._is_ram_lost:
            self._is_ram_lost = False
            judge_mirrored(self.told, got, is_mirrored=life.salvaged is not None)
            self.counts["RAM came back"] += life.salvaged is not None
        for program, its_process in zip(self.programs, self.processes, strict=True):
            program.died(below(got, program.told.directory))
            its_process.begin_at(life.number)
        if self.knobs.leaves_writers:
            self._note_kept_back(life)
            self._nursery.start_soon(self._decide, life)
        if self.reader is not None:
            self.reader.begin_at(life.number)
        self._halves_of = life.number
        self.look()

    async def _judge_untouched(self, calls: Calls, life: Life, shown: Shown) -> None:
        """Nobody has called this mount, so its files stay as they are, whatever a dead session's
        writers do; but for those that are kept back until there is a copy (S506).
        """
        chance = self.choices.stream("untouched", life.number)
        kept_back = set(life.kept_back_at_first)
        for _time in range(2):
            await trio.sleep(chance.choice(DEAD_PAUSES_S))
            kept_back.update(life.kept_back())
            now = await calls.tree("")
            for path in shown.keys() - {one.encode() for one in kept_back}:
                if now.get(path) != shown[path]:
                    wanted = {path: shown[path]}
                    words = differences({one: now[one] for one in wanted if one in now}, wanted)
                    raise Finding("FOREIGN", f"is changed by nobody of this mount: {words}")
            self.counts["looks at what nobody changes"] += 1

    async def _decide(self, life: Life) -> None:
        """What was kept back as an operator wanted it stored, he wants stored later."""
        while life.undecided and not life.turns.is_over:
            await trio.sleep(LOOK_S)
            if not life.turns.is_over:
                life.decide_once_more()

    async def _until_made_again(self, process: Process) -> None:
        """A directory that somebody has removed cannot be listed until acpfs has made it again."""
        began_s = MACHINE.moment_s
        while any(told.torn for told in self.told):
            await trio.sleep(WAIT_S)
            process.check_alive()
            self.look()
            if MACHINE.moment_s - began_s > DRAIN_MAX_S:
                raise Finding("LIVENESS", "what somebody has removed is not made again")

    # -- its end

    async def _end(self) -> None:
        """Faults have stopped when the last life lives; then everything is persisted, and equal."""
        began_s = math.inf
        kill_s = MACHINE.moment_s + DRAIN_MAX_S
        while True:
            life = await self.serving()
            if MACHINE.moment_s > kill_s and life.number < self.knobs.lives - 1:
                life.death.turn = 0
                kill_s = MACHINE.moment_s + DRAIN_MAX_S
            self.look()
            is_judged = self.knobs.keeps_session or self.processes[0].mount == life.number
            if is_judged and not len(life.log):
                if life.number == self.knobs.lives - 1:
                    break
                life.death.turn = 0  # what it leaves is all that there is
            if life.number == self.knobs.lives - 1:
                began_s = min(began_s, MACHINE.moment_s)
                if life.log.parked_count:  # else it has to go on by itself
                    life.engine.retry()
                if self.knobs.leaves_writers:
                    life.store_kept_back()
            if MACHINE.moment_s - began_s > DRAIN_MAX_S:
                kinds = [op.kind.name for op in life.log][:3]
                raise Finding(
                    "LIVENESS", f"not drained {DRAIN_MAX_S:.0f} s after faults stopped: {kinds}"
                )
            await trio.sleep(LOOK_S)
        await self._judge_end(life)

    async def _judge_end(self, life: Life) -> None:
        for told in self.told if self.knobs.leaves_writers else ():
            # of what was kept back others wrote until there was room (S506)
            told.overwrite(below(self.storage.visible(), told.directory))
        wanted = {path: data for told in self.told for path, data in told.now.items()}
        for crew in self.crews:
            wanted |= {f"{crew.name}/".encode(): b"", **crew.attributes()}
        calls = Calls(self.processes[0])
        judge_shown("SHOWN AT THE END", await calls.tree("", attributes=True), wanted)
        stored = {**self.storage.visible(), **self.storage.attributes()}
        judge_shown("STORED AT THE END", stored, wanted)
        for _time in range(3):
            left = self.storage.after_power_loss(self._power, any_order=True)
            judge_shown("PERSISTED AT THE END", left, bare(wanted))
        wrong = [
            violation
            for piece in life.inner.invariants.pieces()
            for place in piece
            for violation in life.inner.invariants.wrong(place)
        ]
        if wrong:
            raise Finding("INVARIANT", str(wrong[:3]))
        if conflicts := life.engine.statistics().conflicts_total:
            raise Finding("CONFLICT", f"{conflicts} changes of its own were taken for others'")
        for _look in range(ENDS_LOOKS):  # what was just read may be on its way to RAM
            if life.tier.reserved_bytes:
                await trio.sleep(LOOK_S)
        if life.tier.reserved_bytes:
            raise Finding("ROOM", f"{life.tier.reserved_bytes} bytes stay reserved")
        self._count(life)


def removable(told: Told, stored: Shown) -> list[bytes]:
    """Directories that are empty on the storage, and into which something is about to come."""
    now = told.now
    return [
        path
        for path in sorted(bare(now))
        if path.endswith(b"/")
        and path in stored
        and now.get(attribute(path, MODE)) == b"755"  # acpfs makes it as most are
        and not any(key.startswith(path + PREFIX + XATTR) for key in now)
        and not any(key.startswith(path) and key != path for key in stored)
        and any(_is_coming(one, path, stored) for one in bare(now))
    ]


def _is_coming(one: bytes, directory: bytes, stored: Shown) -> bool:
    return (
        one.startswith(directory)
        and b"/" not in one[len(directory) :]
        and one != directory
        and one not in stored
    )


def worst(failure: BaseException) -> BaseException:
    """The one of a group that says most."""
    found = causes(failure)
    findings = [one for one in found if isinstance(one, Finding)]
    others = [one for one in found if not isinstance(one, Killed | trio.Cancelled)]
    return (findings or others or found)[0]
