"""A rank of a job whose ranks are replaced, without torch: `python -m tests.training.crew_member
RANK WORLD 0=HOST:PORT …`.

A real member; its loop ends as soon as it is entered. It writes a line when it hears that all is
done, and leaves when its input ends; or one that says why it is refused, and ends.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping

from acpfs.errors import RefusedError
from acpfs.training.coordinator.exiting import started_at
from acpfs.training.credentials import connect
from acpfs.training.interrupt import Interrupter
from acpfs.training.marks import Marks
from acpfs.training.member import Collectives, Member
from acpfs.training.messages import (
    Done,
    Finished,
    Gate,
    Hello,
    Phase,
    Resume,
    Running,
    Stop,
    Stopped,
)
from acpfs.training.policy import Policy

ORDER_S = 240.0


def run(rank: int, world: int, addresses: Mapping[int, str]) -> None:
    policy = Policy.from_environment(tls=False)
    interrupter = Interrupter(
        threading.get_ident(), lambda: False, policy.interrupt_after_s, policy.interrupt_every_s
    )
    hello = Hello(rank, world, "node0", os.getpid(), started_at(os.getpid()), Gate.EXPLICIT, {})
    member = Member(
        "job",
        hello,
        Marks(),
        Collectives(lambda: 0),
        interrupter,
        policy,
        lambda address: connect(address, None),
    )
    member.parked = True
    try:
        member.start(
            {number: connect(address, None) for number, address in addresses.items()},
            policy.protected_s,
        )
    except RefusedError as error:
        sys.stdout.write(f"{error}\n")
        member.end()
        sys.exit(1)
    handled = 0
    while (order := member.order(handled, ORDER_S)) is not None and not isinstance(
        order.command, Done
    ):
        handled = order.number
        if isinstance(order.command, Stop):
            interrupter.disarm()
            member.parked = True
            member.tell(Stopped(0, 0, Phase.COMPUTING))
        elif isinstance(order.command, Resume):
            member.parked = False
            member.tell(Running())
            member.tell(Finished())
    sys.stdout.write("nobody commands\n" if order is None else "all is done\n")
    sys.stdout.flush()
    sys.stdin.read()
    member.end()


if __name__ == "__main__":
    run(
        int(sys.argv[1]),
        int(sys.argv[2]),
        {
            int(number): address
            for number, _, address in (one.partition("=") for one in sys.argv[3:])
        },
    )
