"""A coordinator's process: connections, clocks and files around the state machine and the election,
which know of none of these.

Everything runs in one trio program and one thread, but for the witness's directory, which may hang.
Who is who: a connection is what its HELLO or WATCH said, and every later message on it must say the
same. Whoever has not the job's certificate does not come so far.
"""

from __future__ import annotations

import os
import ssl
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

from acpfs.errors import RefusedError
from acpfs.logger import get_logger
from acpfs.training.coordinator.commands import AskWitness, Command, Finish, Record, Send, Tell
from acpfs.training.coordinator.connections import FIRST_WORD_S, Connected, Connection
from acpfs.training.coordinator.crew import Crew
from acpfs.training.coordinator.electing import Elections
from acpfs.training.coordinator.election import Standing
from acpfs.training.coordinator.exiting import POLL_S, Processes
from acpfs.training.coordinator.faults_log import note_fault
from acpfs.training.coordinator.limits import Limits
from acpfs.training.coordinator.lingering import Lingering
from acpfs.training.coordinator.phases import Phases
from acpfs.training.coordinator.store import Store
from acpfs.training.coordinator.successors import Successors
from acpfs.training.coordinator.watchdog import Patience, Stall, Watchdog
from acpfs.training.coordinator.witness import Claimant, Witness
from acpfs.training.coordinator.working import LOOK_S, Working
from acpfs.training.credentials import HANDSHAKE_S, Credentials, make_credentials
from acpfs.training.credentials import NAME as CREDENTIALS
from acpfs.training.messages import (
    Active,
    Beat,
    Exited,
    Exiting,
    FromMember,
    Goodbye,
    Hello,
    Leave,
    Refused,
    Sent,
    ShowStacks,
    Stacks,
    StoreAsk,
    Voted,
    Vouching,
    Watch,
    Welcome,
)
from acpfs.training.records import MalformedError, NewerError, to_json
from acpfs.training.wire import LinkClosedError, TrioLink

_log = get_logger(__name__)
ACTIVE_EVERY_S = 1.0
REDIAL_S = 0.5
BACKLOG = 4096
CREDENTIALS_S = 50.0
"""So long a standby waits for the job's certificate to appear; less than its members wait for
it.
"""
LOOK_AGAIN_S = 0.05
STACKS_MAX = 16
"""Ranks whose stacks are asked for; more of them hang for one reason."""


@dataclass(frozen=True)
class Settings:
    """What a coordinator is started with."""

    job: str
    number: int
    directory: Path
    """The job's own, `.acpfs-job/ID` in the save directory."""
    node: str
    host: str = "127.0.0.1"
    port: int = 0
    advertised: str = ""
    """The host that others are to call; empty: `host`."""
    peers: dict[int, str] = field(default_factory=dict)
    first: bool = False
    """Commands in the first term, without a vote.

    Exactly one of a job's coordinators, and only the first time that it is started.
    """
    stands: bool = True
    """Whether it may ever command; one that may not only tells of its node's ranks."""
    tls: bool = True
    witness: Path | None = None
    """Where claims are made: the job's directory in the storage itself, not in the mount."""
    stall_is_fault: bool = False
    """Whether ranks that hang count as lost; otherwise they are named, and their stacks are
    logged.
    """
    replaces: bool = False
    """Whether ranks are replaced, and the job goes on; otherwise survivors leave a gasp."""
    coordinators: int = 0
    """So many the job is to have; those that were started and died count anyway."""
    patience: Patience = field(default_factory=Patience)
    limits: Limits = field(default_factory=Limits)


class Coordinator:
    """One per process."""

    def __init__(self, settings: Settings, successors: Successors | None = None) -> None:
        """`successors`: who starts one in the place of a coordinator that died; None: nobody
        does.
        """
        self._settings = settings
        self._successors = successors
        self._phases: Phases | Crew = (
            Crew(settings.job, settings.limits)
            if settings.replaces
            else Phases(settings.job, settings.limits, witness=settings.witness is not None)
        )
        self._standing = Standing(settings.number)
        self._connected = Connected(settings.job, settings.number, self._phases)
        limits = settings.limits
        self._witness = (
            Witness(settings.witness, limits.claim_s) if settings.witness is not None else None
        )
        self._elections = Elections(
            self._standing,
            self._phases,
            self._connected,
            self._witness,
            self._do,
            active_s=limits.active_s,
        )
        self._addresses: dict[int, str] = dict(settings.peers)
        self._dialled: set[int] = set()
        self._processes = Processes()
        self._working = Working(self._processes)
        self._store = Store()
        self._store_generation = 0
        self._watchdog = Watchdog(settings.patience)
        self._stall: Stall | None = None
        self._stacks: dict[int, str] = {}
        self._counts: Counter[str] = Counter()
        self._lingering = Lingering(
            trio.current_time(), knows_its_job=settings.first or settings.replaces
        )
        self._look_again = trio.Event()
        self._nursery: trio.Nursery
        self._credentials: Credentials | None = None
        self.address = ""

    async def run(self, announce: trio.MemorySendChannel[str] | None = None) -> None:
        """Until the job ends. `announce` gets the address when members may come."""
        settings = self._settings
        self._credentials = await self._job_credentials() if settings.tls else None
        listeners = await trio.open_tcp_listeners(
            settings.port, host=settings.host, backlog=BACKLOG
        )
        port = listeners[0].socket.getsockname()[1]
        self.address = f"{settings.advertised or settings.host}:{port}"
        async with trio.open_nursery() as self._nursery:
            if settings.first:
                self._elections.begin()
            self._nursery.start_soon(partial(trio.serve_listeners, self._serve, listeners))
            for task in (self._poll, self._vouch, self._tick, self._tell_active, self._end_unused):
                self._nursery.start_soon(task)
            if settings.stands:
                self._nursery.start_soon(self._elections.run)
            self._dial()
            _log.info(
                "coordinator",
                number=settings.number,
                address=self.address,
                tls=settings.tls,
                first=settings.first,
                pid=os.getpid(),
            )
            if announce is not None:
                await announce.send(self.address)
        if self._successors is not None:
            # one that was just being started would wait for ranks that have left
            self._successors.dismiss()
        self._processes.close()

    async def _job_credentials(self) -> Credentials:
        """The first one makes them, the others wait for them: on another node they are there when
        they are in the storage.

        Raises:
            RefusedError: they did not come.
        """
        if self._settings.first:
            return make_credentials(self._settings.directory)
        found = Credentials(self._settings.directory / CREDENTIALS)
        with trio.move_on_after(CREDENTIALS_S):
            while not found.directory.exists():  # noqa: ASYNC110  # nobody announces a file
                await trio.sleep(LOOK_AGAIN_S)
            return found
        raise RefusedError(f"{found.directory} does not appear on this node")

    # -- connections

    async def _serve(self, stream: trio.SocketStream) -> None:
        """Somebody connected."""
        peer = "?"
        try:
            peer = str(stream.socket.getpeername())
            stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
            link = TrioLink(await self._secured(stream, server=True))
        except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
            self._refuse("tls", peer, str(error.__cause__ or error))
            await trio.aclose_forcefully(stream)
            return
        connection = Connection(link)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.send_all)
            try:
                with trio.fail_after(FIRST_WORD_S):
                    first = await connection.receive()
                await self._admitted(connection, first, peer)
            except (LinkClosedError, trio.TooSlowError) as error:
                self._refuse("silent", peer, str(error))
            except NewerError as error:
                self._refuse("newer", peer, str(error))
                connection.post(self._connected.framed(Refused(str(error))))
            except MalformedError as error:
                self._refuse("malformed", peer, str(error))
            connection.cut()

    async def _secured(self, stream: trio.SocketStream, *, server: bool) -> trio.abc.Stream:
        """TLS over it, if TLS is on.

        Raises:
            OSError, trio.BrokenResourceError, trio.TooSlowError: the peer has not the job's
            certificate.
        """
        if self._credentials is None:
            return stream
        context = self._credentials.listening if server else self._credentials.calling
        secured = trio.SSLStream(stream, context, server_side=server, https_compatible=True)
        with trio.fail_after(HANDSHAKE_S):
            await secured.do_handshake()
        if not self._credentials.vouch_for(secured.getpeercert(True)):
            raise ssl.SSLError("another certificate than the job's")
        return secured

    def _refuse(self, why: str, peer: str, text: str) -> None:
        self._counts[f"refused_{why}"] += 1
        _log.warning("refused", why=why, peer=peer, text=text[:200])

    async def _admitted(self, connection: Connection, first: Sent, peer: str) -> None:
        """Whoever has the certificate says who they are."""
        if first.header.job != self._settings.job:
            self._refuse("job", peer, first.header.job)
            connection.post(
                self._connected.framed(
                    Refused(f"this is the coordinator of job {self._settings.job}")
                )
            )
        elif isinstance(first.message, Hello) and self._is_of_another_job(first.message):
            self._refuse("taken", peer, str(first.message.rank))
            connection.post(
                self._connected.framed(
                    Refused(
                        f"rank {first.message.rank} is another process: two jobs are called "
                        f"{self._settings.job}; give each a name of its own (--rdzv-id, ACPFS_JOB)",
                        is_other_job=True,
                    )
                )
            )
        elif isinstance(first.message, Hello):
            await self._member(connection, first.message, first)
        elif isinstance(first.message, Watch):
            await self._other(connection, first.message)
        else:
            self._refuse("stranger", peer, type(first.message).__name__)

    def _is_of_another_job(self, hello: Hello) -> bool:
        """A rank's first process, where another one has been that rank: a name is no identity."""
        known = self._phases.hellos.get(hello.rank)
        return (
            hello.first
            and known is not None
            and (known.node, known.pid, known.started) != (hello.node, hello.pid, hello.started)
        )

    async def _member(self, connection: Connection, hello: Hello, first: Sent) -> None:
        rank = hello.rank
        self._connected.members[rank] = connection
        if hello.node == self._settings.node:
            self._processes.watch(rank, hello.pid, hello.started)
        connection.post(self._connected.framed(self._welcome()))
        if self._standing.commands:
            connection.post(self._connected.framed(self._elections.active()))
        why = "its connection ended"
        try:
            sent: Sent | None = first
            while (
                sent is not None and self._connected.members.get(rank) is connection
            ):  # not the rank's process before this one
                self._from_member(rank, sent)
                ends = (
                    isinstance(sent.message, Goodbye)
                    or self._connected.members.get(rank) is not connection
                )
                sent = None if ends else await connection.receive()
        except LinkClosedError as error:
            why += "" if str(error) == "closed" else f": {error}"
        except MalformedError as error:
            why = f"it sent what is no message: {error}"
            self._counts["malformed"] += 1
        if self._connected.members.get(rank) is connection:
            del self._connected.members[rank]
            now = trio.current_time()
            self._lingering.needed(now)
            self._do(self._phases.lose(rank, why, now))

    def _from_member(self, rank: int, sent: Sent) -> None:
        now = trio.current_time()
        message = sent.message
        if sent.header.job != self._settings.job:
            self._counts["other_job"] += 1
        elif isinstance(message, Voted):
            self._elections.voted(rank, message, sent.header.generation)
        elif isinstance(message, StoreAsk):
            late = sent.header.generation != self._phases.generation
            self._answer(
                [(rank, answer) for rank, answer in self._store.ask(rank, message, now)]
                if not late
                else []
            )
        elif isinstance(message, Stacks):
            self._stacks[rank] = message.text
            _log.warning("stacks", rank=rank, text=message.text)
        elif isinstance(message, FromMember):
            self._elections.hears(sent.header.term, None)
            self._do(self._phases.arrived(rank, sent.header.generation, message, now))
            if (
                isinstance(message, Beat)
                and self._standing.commands
                and rank in self._connected.members
            ):
                self._connected.to_members(self._elections.active(), [rank])
                self._watchdog.heard(rank, message, now)
        else:
            self._counts["no_member_says"] += 1

    async def _other(self, connection: Connection, watch: Watch) -> None:
        """A coordinator or watcher called."""
        number = (
            watch.coordinator if watch.coordinator is not None else -1 - len(self._connected.others)
        )
        if (
            watch.coordinator is not None
            and watch.address
            and self._addresses.get(number) != watch.address
        ):
            self._addresses[number] = watch.address
            self._connected.to_members(self._welcome())
        connection.post(self._connected.framed(self._welcome()))
        await self._listen_to(connection, number)

    async def _listen_to(self, connection: Connection, number: int) -> None:
        self._connected.others[number] = connection
        if self._standing.commands:
            connection.post(self._connected.framed(self._elections.active()))
        try:
            while True:
                self._from_other(await connection.receive())
        except (LinkClosedError, MalformedError) as error:
            _log.info("a coordinator's connection ended", number=number, why=str(error))
        finally:
            if self._connected.others.get(number) is connection:
                del self._connected.others[number]
                self._elections.disconnected(number)

    def _from_other(self, sent: Sent) -> None:
        message = sent.message
        now = trio.current_time()
        if isinstance(message, Active):
            self._elections.hears(message.term, message.coordinator)
        elif isinstance(message, Welcome):
            self._addresses.update(message.coordinators)
            self._dial()
        elif isinstance(message, Leave) and sent.header.term >= self._standing.term:
            self._phases.ended(message)
        elif (
            isinstance(message, Exiting)
            and message.pid
            and self._pid_of(message.rank) != message.pid
        ):
            self._counts["exit_of_another_process"] += 1
        elif isinstance(message, Vouching):
            self._phases.vouched(message.ranks, now)
        elif isinstance(message, Exiting | Exited):
            self._do(self._phases.lose(message.rank, "its process is exiting", now))

    def _pid_of(self, rank: int) -> int:
        hello = self._phases.hellos.get(rank)
        return hello.pid if hello is not None else 0

    def _dial(self) -> None:
        """Call those that are known and have not called."""
        for number in self._addresses.keys() - self._dialled - {self._settings.number}:
            if (
                number in self._settings.peers
                or number < self._settings.number
                or not self._settings.stands
            ):
                self._dialled.add(number)
                self._nursery.start_soon(self._keep_calling, number)

    async def _keep_calling(self, number: int) -> None:
        while True:
            host, _, port = self._addresses[number].rpartition(":")
            try:
                stream = await trio.open_tcp_stream(host.strip("[]"), int(port))
                connection = Connection(TrioLink(await self._secured(stream, server=False)))
            except (OSError, ValueError, trio.BrokenResourceError, trio.TooSlowError):
                await trio.sleep(REDIAL_S)
                continue
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.send_all)
                mine = self._settings.number if self._settings.stands else None
                connection.post(
                    self._connected.framed(Watch(self._settings.node, mine, self.address))
                )
                await self._listen_to(connection, number)
                connection.cut()
            await trio.sleep(REDIAL_S)

    async def _tell_active(self) -> None:
        while True:
            if self._standing.commands:
                self._connected.to_others(self._elections.active())
                if (
                    self._successors is not None
                    and self._connected.members
                    and not self._lingering.is_dismissed
                ):
                    own = self._settings.number
                    self._successors.look(
                        {**self._addresses, own: self.address},
                        (own, *self._connected.others),
                        trio.current_time(),
                    )
            await trio.sleep(ACTIVE_EVERY_S)

    # -- clocks

    async def _poll(self) -> None:
        """Look at this node's ranks, and tell every coordinator."""
        while True:
            for rank in self._processes.exiting():
                _log.info("a process is exiting", rank=rank)
                self._connected.to_others(Exiting(rank, self._pid_of(rank)))
                self._do(self._phases.lose(rank, "its process is exiting", trio.current_time()))
            await trio.sleep(POLL_S)

    async def _vouch(self) -> None:
        """Say which of this node's ranks work, though they say nothing."""
        while True:
            await trio.sleep(LOOK_S)
            now = trio.current_time()
            if at_work := self._working.at_work(self._phases.quiet(now), now):
                self._counts["silent_and_at_work"] += 1
                self._phases.vouched(at_work, now)
                self._connected.to_others(Vouching(tuple(at_work)))

    async def _tick(self) -> None:
        while True:
            wait_s = min(self._phases.wake_at - trio.current_time(), 1.0)
            with trio.move_on_after(max(wait_s, 0)):
                await self._look_again.wait()
            self._look_again = trio.Event()
            now = trio.current_time()
            self._answer(self._store.late(now))
            self._watch(now)
            if now >= self._phases.wake_at:
                self._do(self._phases.tick(now))

    def _watch(self, now: float) -> None:
        """Name who hangs."""
        if not self._phases.running:
            self._watchdog.begin_anew()
            return
        stall = self._watchdog.look(self._phases.live, now)
        if stall is not None:
            self._stall = stall
            _log.warning(
                "nothing moves",
                behind=stall.behind,
                group=stall.group,
                waited_s=round(stall.waited_s, 1),
            )
            self._connected.to_members(ShowStacks(), stall.behind[:STACKS_MAX])
            if self._settings.stall_is_fault and len(stall.behind) < len(self._phases.live):
                for rank in stall.behind:
                    self._do(
                        self._phases.lose(
                            rank, f"it hangs: nothing moved for {stall.waited_s:.0f} s", now
                        )
                    )

    async def _end_unused(self) -> None:
        """A standby ends behind the last member, and any coordinator that nobody needs."""
        while True:
            await trio.sleep(1)
            now = trio.current_time()
            has_members = bool(self._connected.members)
            has_others = bool(self._connected.others)
            if has_members and (
                self._standing.commands or self._processes.are_watched or self._phases.heard(now)
            ):
                self._lingering.needed(now)
            alone_s = self._phases.alone_s if self._phases.world else None
            if self._lingering.is_over(
                now, has_members=has_members, has_others=has_others, alone_s=alone_s
            ):
                _log.info("nobody is left")
                self._nursery.cancel_scope.cancel()

    def dismiss(self) -> None:
        """End as soon as no rank is connected: schedulers tell all processes of a job to end, also
        who has to command the last save.
        """
        self._lingering.dismiss()
        if self._successors is not None:
            self._successors.dismiss()

    # -- what the state machine wants

    def _do(self, commands: Iterable[Command]) -> None:
        if self._store_generation != self._phases.generation:
            self._answer(self._store.end())
            self._store = Store()
            self._store_generation = self._phases.generation
        for command in commands:
            if isinstance(command, Send):
                if isinstance(command.message, Leave):
                    self._connected.to_others(command.message)  # before anybody leaves
                self._connected.to_members(command.message, command.ranks)
            elif isinstance(command, Tell):
                _log.info(command.event, **command.fields)
            elif isinstance(command, Record):
                note_fault(self._settings.directory, command.fields)
            elif isinstance(command, AskWitness):
                self._nursery.start_soon(self._ask_witness, command)
            elif isinstance(command, Finish):
                self._nursery.start_soon(self._finish)
        self._look_again.set()

    async def _ask_witness(self, asked: AskWitness) -> None:
        claimant = Claimant(self._settings.number, self._standing.term, asked.majority)
        owner = (
            None if self._witness is None else await self._witness.owner(claimant, asked.generation)
        )
        self._do(
            self._phases.claimed(None if owner is None else owner == claimant, trio.current_time())
        )

    async def _finish(self) -> None:
        self._connected.cut()
        await trio.sleep(0.2)
        self._nursery.cancel_scope.cancel()

    def _answer(self, answers: Iterable[tuple[int, Any]]) -> None:
        for rank, answer in answers:
            self._connected.to_members(answer, [rank])

    def _welcome(self) -> Welcome:
        known = {
            **self._addresses,
            **({self._settings.number: self.address} if self._settings.stands else {}),
        }
        return Welcome(self._settings.number, self._standing.commands, known)

    # -- status

    def status(self) -> dict[str, Any]:
        """What `acpfs-train status` shows."""
        phases = self._phases
        now = time.time()
        ranks = [
            {
                "rank": rank,
                "node": hello.node,
                "lost": phases.lost.get(rank),
                "unprotected": phases.unprotected.get(rank),
                **_shown(phases.marks.get(rank)),
                "stacks": self._stacks.get(rank),
            }
            for rank, hello in sorted(phases.hellos.items())
        ]
        return {
            "at": round(now, 3),
            "job": self._settings.job,
            "coordinator": self._settings.number,
            "active": self._standing.commands,
            "term": self._standing.term,
            "generation": phases.generation,
            "state": phases.state.value,
            "world": phases.world,
            "connected": len(self._connected.members),
            "gate": phases.layout.gate.value if phases.layout else None,
            "shards": len(phases.layout.holders) if phases.layout else None,
            "tls": self._settings.tls,
            "coordinators": {
                str(number): address
                for number, address in sorted(self._welcome().coordinators.items())
            },
            "counts": dict(self._counts),
            "text": phases.status,
            "stall": None if self._stall is None else to_json(self._stall),
            "ranks": ranks,
        }


def _shown(beat: Any) -> dict[str, Any]:
    return (
        {} if beat is None else {"done": beat.done, "ready": beat.ready, "phase": beat.phase.value}
    )
