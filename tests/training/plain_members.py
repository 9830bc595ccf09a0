"""Members in processes of their own, without torch: `python -m tests.training.plain_members
CONFIG`, forked from one program.

CONFIG is JSON: job directory, world, ranks, holders, coordinators' addresses, how many members a
process or a node has, or the node of each (`node_of`). Each process keeps to what `SimulatedMember`
says, votes, and writes a line for everything it is told. An answer to an order named in `hold`
waits until the file `release` exists. The rank in `busy` says nothing at all from the order on that
is named there, as one whose interpreter is held, until that file exists; where there is `hangs_in`,
it writes to that file before.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acpfs.training.coordinator.election import Ballot
from acpfs.training.coordinator.exiting import started_at
from acpfs.training.credentials import NAME, Credentials, connect
from acpfs.training.messages import (
    Active,
    FromCoordinator,
    FromMember,
    Header,
    Leave,
    Message,
    Phase,
    Publish,
    Sent,
    Vote,
    Voted,
    Welcome,
)
from acpfs.training.records import to_json
from acpfs.training.wire import LinkClosedError, LinkTimeoutError, SocketLink
from tests.training.simulated_member import SimulatedMember

BEAT_S = 2.0
SILENT_S = BEAT_S + 2.0
PR_SET_PDEATHSIG = 1


@dataclass
class PlainMember:
    """One rank with its links."""

    member: SimulatedMember
    config: dict[str, Any]
    links: dict[int, SocketLink] = field(default_factory=dict)
    ballot: Ballot = field(default_factory=Ballot)
    heard: float = 0.0
    turned: float = field(default_factory=time.monotonic)
    beaten: float = field(default_factory=lambda: time.monotonic() - random.uniform(0, BEAT_S))
    held: list[tuple[int, FromMember]] = field(default_factory=list)
    ended: bool = False

    def call(self, number: int, address: str) -> None:
        tls = (
            None
            if self.config.get("plain")
            else Credentials(Path(self.config["job_directory"]) / NAME)
        )
        link = connect(address, tls, 120)
        self.links[number] = link
        link.send(self.sent(self.member.hello()))

    def sent(self, message: Message, generation: int | None = None) -> Sent:
        own = self.member.generation if generation is None else generation
        return Sent(
            Header(self.config["job"], own, self.ballot.term, f"rank {self.member.rank}"), message
        )

    def say(self, what: str, **fields: object) -> None:
        line = (
            json.dumps({"at": time.time(), "rank": self.member.rank, "what": what, **fields}) + "\n"
        )
        with open(
            Path(self.config["log"]) / f"rank-{self.member.rank}", "a", encoding="utf-8"
        ) as file:
            file.write(line)

    def take(self, number: int) -> None:
        """Everything that this coordinator has sent."""
        link = self.links[number]
        try:
            while True:
                self.told(number, link.receive(0))
        except LinkTimeoutError:
            pass
        except LinkClosedError:
            link.close()
            del self.links[number]
            self.ballot.disconnected(number)
            self.say("Closed", number=number)
            self.ended = self.ended or self.member.left is not None or not self.links

    def told(self, number: int, sent: Sent) -> None:
        message = sent.message
        if isinstance(message, Welcome):
            for other, address in message.coordinators.items():
                if other not in self.links and not self.member.left:
                    with contextlib.suppress(LinkClosedError):  # gone already
                        self.call(other, address)
        elif isinstance(message, Vote):
            granted = self.ballot.vote(message.term)
            self.links[number].send(self.sent(Voted(message.term, granted)))
        elif isinstance(message, FromCoordinator) and self.ballot.hears(sent.header.term, number):
            self.heard = time.monotonic()
            if isinstance(message, Active):
                return
            answers = [
                (max(sent.header.generation, self.member.generation), answer)
                for answer in self.member.obey(message, sent.header.generation)
            ]
            kind = type(message).__name__
            self.say(kind, number=number, term=sent.header.term, generation=sent.header.generation)
            if isinstance(message, Publish):
                path = Path(self.config["log"]) / f"published.{message.name}"
                path.write_text(json.dumps(to_json(message.manifest)), encoding="utf-8")
            if isinstance(message, Leave):
                self.say("Left", status=message.status, text=message.text, gasp=message.gasp)
                self.ended = True
            if [self.member.rank, kind] == self.config.get("busy"):
                self.be_busy()
            self.held += answers
            if kind != self.config.get("hold"):
                self.answer()

    def be_busy(self) -> None:
        """Say nothing."""
        if "hangs_in" in self.config:
            Path(self.config["hangs_in"]).write_bytes(b"x")
        while not (Path(self.config["log"]) / "release").exists():
            Path("/proc/self/stat").read_bytes()

    def answer(self) -> None:
        link = self.links.get(self.ballot.active if self.ballot.active is not None else -1)
        if link is not None:
            for generation, message in self.held:
                link.send(self.sent(message, generation))
            self.held.clear()

    def train(self) -> None:
        """One step, if the test is about ranks that hang in the next one: the others become
        ready.
        """
        if self.member.protected and self.member.done == 5 and "hang" in self.config:
            self.member.done = 6
        elif self.member.done == 6 and self.member.rank not in self.config.get(
            "hang", [self.member.rank]
        ):
            self.member.phase = Phase.READY

    def beat(self) -> None:
        now = time.monotonic()
        if (
            now - self.turned > BEAT_S
        ):  # this process stood still: what was said meanwhile was not heard yet
            self.heard = now
        self.turned = now
        if now - self.heard > SILENT_S and self.ballot.active is not None:
            self.ballot.disconnected(self.ballot.active)
        if now - self.beaten > BEAT_S:
            self.beaten = now
            link = self.links.get(self.ballot.active if self.ballot.active is not None else -1)
            if link is not None:
                with contextlib.suppress(LinkClosedError):  # told when it is received from
                    link.send(self.sent(self.member.beat()))
                    self.train()
        if self.held and (Path(self.config["log"]) / "release").exists():
            self.answer()


def run(config: dict[str, Any], ranks: list[int]) -> None:
    """Members of one process, until all have left."""
    members = []
    for rank in ranks:
        per_node = config.get("ranks_per_node", 1000)
        node = f"node{config['node_of'][rank] if 'node_of' in config else rank // per_node}"
        marks = config.get("marks", {}).get(str(rank), [5, "computing"])
        holders = {
            shard: tuple(holding) for shard, holding in config["holders"].items() if rank in holding
        }
        simulated = SimulatedMember(
            rank,
            config["world"],
            holders,
            node,
            done=marks[0],
            phase=Phase(marks[1]),
            pid=os.getpid(),
        )
        members.append(PlainMember(simulated, config))
    started = started_at(os.getpid())
    for member in members:
        member.member.started = started
        for number, address in config["coordinators"].items():
            member.call(int(number), address)
        for earlier in members:
            earlier.beat()
    whose: dict[int, tuple[PlainMember, int]] = {}
    poll = select.poll()
    while any(not member.ended for member in members):
        linked = (
            {
                link.fileno(): (member, number)
                for member in members
                for number, link in member.links.items()
            }
            if changed(members, whose)
            else whose
        )
        for descriptor in whose.keys() - linked.keys():
            poll.unregister(descriptor)
        for descriptor in linked.keys() - whose.keys():
            poll.register(descriptor, select.POLLIN)
        whose = linked
        for descriptor, _ in poll.poll(50):
            member, number = whose[descriptor]
            if number in member.links:
                member.take(number)
        for member in members:
            if not member.ended:
                member.beat()


def changed(members: list[PlainMember], whose: dict[int, tuple[PlainMember, int]]) -> bool:
    """Whether a link came or went."""
    return sum(len(member.links) for member in members) != len(whose) or -1 in whose


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def main(config: dict[str, Any]) -> None:
    """Fork the processes; their pids, by first rank, are the first line of output.

    All of them end when the test does.
    """
    _end_with_parent()
    each = config.get("ranks_per_process", 1)
    pids = {}
    for first in range(0, config["world"], each):
        pid = os.fork()
        if pid == 0:
            try:
                _end_with_parent()
                run(config, list(range(first, min(first + each, config["world"]))))
            finally:
                os._exit(0)
        pids[first] = pid
    sys.stdout.write(json.dumps(pids) + "\n")
    sys.stdout.flush()
    for pid in pids.values():
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
