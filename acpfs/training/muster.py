"""How a rank whose place may be taken finds its coordinators: through files in the job's directory,
since there is no process group yet.

The first rank of each of the first three nodes starts one; on one node rank 0 starts two, so that
the death of one is no fault. A process that comes later starts none: it calls those that it finds.
`ACPFS_COORDINATORS` (`0=HOST:PORT,1=HOST:PORT`) names them where a launcher has started them.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from acpfs.errors import AcpfsError, ConfigError, RefusedError
from acpfs.logger import get_logger
from acpfs.training.boot import JOBS, LOOK_AGAIN_S, Boot, first_line, own_host
from acpfs.training.credentials import NAME as CREDENTIALS
from acpfs.training.credentials import Credentials, connect
from acpfs.training.mounted import node_name, readable
from acpfs.training.policy import Policy
from acpfs.training.wire import LinkClosedError, SocketLink

log = get_logger(__name__)
LATE_S = 2.0
"""So long a process that comes later waits for coordinators that do not answer, where another one
does.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """What a launcher says of this process, in torchrun's words."""

    job: str
    rank: int
    world: int
    local_rank: int
    group: int
    """Number of the node."""
    nodes: int
    generation: int
    """0: the first process that is this rank."""
    is_named: bool = False
    """Whether the launcher has drawn a name for this attempt of the job, which no other has."""

    @property
    def starts(self) -> tuple[int, ...]:
        """Numbers of the coordinators that this process starts."""
        if self.generation or self.local_rank:
            return ()
        return (0, 1) if self.nodes == 1 else (self.group,) if self.group < 3 else ()

    @property
    def coordinators(self) -> int:
        """How many there are when all are there."""
        return 2 if self.nodes == 1 else min(3, self.nodes)


def place_from(environment: Mapping[str, str]) -> Place:
    """Where this process stands.

    Raises:
        ConfigError: no launcher has said so.
    """
    try:
        rank = int(environment["RANK"])
        world = int(environment["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "resilient needs RANK and WORLD_SIZE, as acpfs-run and torchrun set them"
        ) from error
    local_world = int(environment.get("LOCAL_WORLD_SIZE", world))
    told = [
        environment.get(name, "0")
        for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    ]
    job = environment.get("ACPFS_JOB") or "-".join(told)
    return Place(
        *(
            job.replace("/", "_"),
            rank,
            world,
            int(environment.get("LOCAL_RANK", rank)),
            int(environment.get("GROUP_RANK", "0")),
        ),
        nodes=-(-world // local_world),
        generation=int(environment.get("ACPFS_GENERATION", "0")),
        is_named=bool(environment.get("ACPFS_JOB")),
    )


def muster(
    directory: Path,
    place: Place,
    policy: Policy,
    environment: Mapping[str, str] | None = None,
    refused: frozenset[str] = frozenset(),
) -> Boot:
    """Coordinators, started or found, and connections to them.

    `refused`: jobs that have this name too, and are others.

    Raises:
        RefusedError: none answers.
    """
    environment = os.environ if environment is None else environment
    named = environment.get("ACPFS_COORDINATORS", "")
    if place.is_named or named:
        found = _mustered(directory, place, policy, named, lambda: False)
        assert found is not None, "nothing takes its place"
        return found
    drawn = Drawn(directory, place)
    if drawn.is_mine:
        drawn.draw()
    while True:
        job = drawn.job(policy.protected_s, refused)
        own = replace(place, job=job)
        found = _mustered(directory, own, policy, "", partial(drawn.is_over, job))
        if found is not None:
            return found
        log.info("the job of this name was an older one", job=job)


class Drawn:
    """What tells attempts of a job apart whose launcher gives them all one name: rank 0 draws a
    number, and says it in a file.

    Who reads it before rank 0 has written meets an older job there. Its coordinators are gone, or
    know the rank's first process, and refuse this one (`Hello.first`): then it looks again.
    """

    def __init__(self, directory: Path, place: Place) -> None:
        self._name = place.job
        self._file = directory / JOBS / f".now-{place.job}"
        self.is_mine = place.rank == 0 and not place.generation

    def draw(self) -> None:
        """This is rank 0, and a new job."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        job = f"{self._name}-{secrets.token_hex(4)}"
        made = self._file.with_name(f".{job}.tmp")
        made.write_text(job, encoding="utf-8")
        made.rename(self._file)

    def job(self, patience_s: float, refused: frozenset[str]) -> str:
        """Its name; waits for one that is not `refused`.

        Raises:
            RefusedError: there is none.
        """
        deadline = time.monotonic() + patience_s
        while True:
            found = self._said()
            if found and found not in refused:
                return found
            if time.monotonic() >= deadline:
                raise RefusedError(f"rank 0 of job {self._name} does not appear ({self._file})")
            time.sleep(LOOK_AGAIN_S)

    def is_over(self, job: str) -> bool:
        """Whether another one has taken the name of this one."""
        return self._said() not in ("", job)

    def _said(self) -> str:
        place = readable(self._file.parent) / self._file.name
        try:
            return place.read_text(encoding="utf-8")
        except (OSError, ValueError):  # a mount that does not answer right now
            return ""


def _mustered(
    directory: Path, place: Place, policy: Policy, named: str, is_over: Callable[[], bool]
) -> Boot | None:
    """`named`: coordinators that a launcher has started. None: the job `is_over`."""
    job_directory = directory / JOBS / place.job
    node = _node(directory)
    if not named:
        for number in place.starts:
            first = "" if number == 0 else _address(job_directory, 0, policy, is_over)
            if number and not first:
                return None
            _start(directory, place, number, node, policy, first)
    addresses = {
        int(number): address
        for number, _, address in (one.partition("=") for one in named.split(",") if one)
    }
    links = _links(job_directory, place, addresses, policy, is_over)
    if links is None:
        return None
    # by now the credentials are there
    return Boot(
        place.job,
        node,
        links,
        partial(connect, credentials=_credentials(job_directory) if policy.tls else None),
    )


def _node(directory: Path) -> str:
    """A mount that does not answer right now has a name all the same, and a process that comes
    later needs none of its node's.
    """
    try:
        return node_name(directory)
    except AcpfsError:
        return socket.gethostname()


def _start(
    directory: Path, place: Place, number: int, node: str, policy: Policy, first: str
) -> None:
    """`first`: where the one is that commands first; empty for that one."""
    job_directory = directory / JOBS / place.job
    if number == 0:
        for name in job_directory.glob(
            "coordinator-*"
        ):  # of another job of this name, that has ended
            name.unlink(missing_ok=True)
    words = [policy.interpreter, "-m", "acpfs.training.coordinator", str(directory), "--replace"]
    words += [
        "--job",
        place.job,
        "--number",
        str(number),
        "--node",
        node,
        "--tls",
        "on" if policy.tls else "off",
    ]
    words += [
        "--on-stall",
        policy.on_stall,
        "--stall-after",
        str(policy.stall_after_s),
        "--settle-down",
        "0",
    ]
    words += (
        ["--listen", "0.0.0.0:0", "--advertise", own_host(dict(os.environ))]
        if place.nodes > 1
        else ["--witness", "off"]
    )
    words += ["--peer", f"0={first}"] if first else ["--first"]
    first_line(words, policy.protected_s)


def _address(job_directory: Path, number: int, policy: Policy, is_over: Callable[[], bool]) -> str:
    """Of a coordinator that is being started elsewhere; empty: the job `is_over`."""
    deadline = time.monotonic() + policy.protected_s
    while time.monotonic() < deadline:
        if is_over():
            return ""
        if address := _told(job_directory, number):
            return address
        time.sleep(LOOK_AGAIN_S)
    raise RefusedError(f"coordinator {number} of {job_directory} does not appear")


def _told(job_directory: Path, number: int) -> str:
    try:
        return str(
            json.loads((readable(job_directory) / f"coordinator-{number}").read_bytes())["address"]
        )
    except (OSError, ValueError, KeyError, TypeError):  # not there yet, or not whole
        return ""


def _credentials(job_directory: Path) -> Credentials | None:
    """The job's; None: not there yet."""
    found = Credentials(readable(job_directory) / CREDENTIALS)
    return found if (found.directory / "certificate.pem").exists() else None


def _links(
    job_directory: Path,
    place: Place,
    named: Mapping[int, str],
    policy: Policy,
    is_over: Callable[[], bool],
) -> dict[int, SocketLink] | None:
    """To all of them; a process that comes later takes those that answer. None: the job
    `is_over`.
    """
    began = time.monotonic()
    links = dict[int, SocketLink]()
    found: Credentials | None = None
    wanted = len(named) or place.coordinators
    patience = policy.protected_s
    while len(links) < wanted and time.monotonic() - began < patience:
        if is_over():
            for link in links.values():
                link.close()
            return None
        found = found or (_credentials(job_directory) if policy.tls else None)
        for number in named or range(place.coordinators):
            address = named.get(number) or _told(job_directory, number)
            if number in links or not address or (policy.tls and found is None):
                continue
            try:
                links[number] = connect(address, found)
            except LinkClosedError as error:
                log.info("a coordinator does not answer", number=number, error=str(error))
        patience = LATE_S if links and place.generation else policy.protected_s
        if len(links) < wanted:
            time.sleep(LOOK_AGAIN_S / 5)
    if not links:
        raise RefusedError(f"no coordinator of {job_directory} answers")
    return links
