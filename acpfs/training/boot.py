"""Starts coordinators and finds them: the first rank of each of the first nodes starts one, in a
session of its own.

A session of its own, since launchers such as torchrun kill the process group of their children when
one of them dies. What ranks tell each other here goes over the process group that they have;
nothing later depends on it.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from acpfs.errors import AcpfsError, RefusedError
from acpfs.training.credentials import NAME as CREDENTIALS
from acpfs.training.credentials import Credentials, connect
from acpfs.training.mounted import node_name
from acpfs.training.policy import Policy
from acpfs.training.wire import LinkClosedError, SocketLink

JOBS = ".acpfs-job"
LOOK_AGAIN_S = 0.05
STANDING = 2
"""Coordinators of a job on one node.

The second one is started by the first, so that no rank waits for it.
"""
Gathered = Callable[[Any], list[Any]]
"""Everybody's value, by rank; a collective."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs."""

    node: str
    host: str
    """How other nodes reach it."""


@dataclass(frozen=True, slots=True)
class Boot:
    """What came of it."""

    job: str
    node: str
    links: dict[int, SocketLink]
    call: Callable[[str], SocketLink]
    """A coordinator that is started later; may wait."""


def own_host(environment: dict[str, str]) -> str:
    """The address that this node has towards the others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((environment.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def boot(rank: int, gathered: Gathered, directory: Path, policy: Policy) -> Boot:
    """Coordinators started, and connections to them; a collective of all ranks.

    Raises:
        RefusedError: a coordinator could not be started or reached.
    """
    mine = Place(node_name(directory), own_host(dict(os.environ)))
    told = gathered(
        (mine, f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}")
    )
    places = [place for place, _ in told]
    job = told[0][1]
    nodes = list(dict.fromkeys(place.node for place in places))
    starters = {
        number: [place.node for place in places].index(node)
        for number, node in enumerate(nodes[: policy.coordinators])
    }
    addresses: dict[int, str] = {}
    for turn in (range(1), range(1, len(starters))):  # the others are told where the first one is
        numbers = [number for number in turn if starters.get(number) == rank]
        answer = (
            _start(directory, job, numbers[0], mine, len(nodes), addresses, policy)
            if numbers
            else None
        )
        for number, (address, error) in (found for found in gathered(answer) if found is not None):
            if error:
                raise RefusedError(f"no protection: coordinator {number} does not start: {error}")
            addresses[number] = address
    found = Credentials(directory / JOBS / job / CREDENTIALS) if policy.tls else None
    return Boot(
        job,
        mine.node,
        _connect(directory / JOBS / job, addresses, policy),
        partial(connect, credentials=found),
    )


Answer = tuple[int, tuple[str, str]]
"""Number of a coordinator; its address, or what went wrong."""


def _start(
    directory: Path,
    job: str,
    number: int,
    place: Place,
    nodes: int,
    peers: dict[int, str],
    policy: Policy,
) -> Answer:
    words = [policy.interpreter, "-m", "acpfs.training.coordinator", str(directory)]
    words += [
        "--job",
        job,
        "--number",
        str(number),
        "--node",
        place.node,
        "--tls",
        "on" if policy.tls else "off",
    ]
    words += ["--on-stall", policy.on_stall, "--stall-after", str(policy.stall_after_s)]
    words += (
        ["--settle-down", "0"]
        if nodes == 1
        else ["--listen", "0.0.0.0:0", "--advertise", place.host]
    )
    words += ["--coordinators", str(min(max(nodes, STANDING), policy.coordinators))]
    words += ["--first"] if number == 0 else []
    words += [word for peer, address in peers.items() for word in ("--peer", f"{peer}={address}")]
    try:
        return number, (first_line(words, policy.protected_s), "")
    except (OSError, ValueError, AcpfsError) as error:
        return number, ("", str(error))


def first_line(words: list[str], timeout_s: float) -> str:
    """Start it; the address that its first line has. It goes on by itself."""
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        close_fds=True,
    ) as started:
        assert started.stdout is not None
        waiting = select.poll()
        waiting.register(started.stdout, select.POLLIN)
        line = started.stdout.readline() if waiting.poll(timeout_s * 1000) else b""
        started.stdout.close()
        started.returncode = 0  # nobody here waits for its end
    if not line:
        raise RefusedError(f"{' '.join(words[:3])} said nothing")
    return str(json.loads(line)["address"])


def _connect(
    job_directory: Path, addresses: dict[int, str], policy: Policy
) -> dict[int, SocketLink]:
    deadline = time.monotonic() + policy.protected_s
    found = Credentials(job_directory / CREDENTIALS)
    while policy.tls and not (found.directory / "certificate.pem").exists():
        if time.monotonic() > deadline:
            raise RefusedError(f"no protection: {found.directory} does not appear on this node")
        time.sleep(LOOK_AGAIN_S)
    links: dict[int, SocketLink] = {}
    try:
        for number, address in addresses.items():
            links[number] = connect(address, found if policy.tls else None)
    except BaseException as error:
        for link in links.values():
            link.close()
        if isinstance(error, LinkClosedError):
            raise RefusedError(f"no protection: {error}") from error
        raise
    return links
