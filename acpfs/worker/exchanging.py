"""What a worker needs to exchange bytes with other members: its key, where it is reached, and who
the others are, by their records.

Where something of it cannot be had, the mount goes on without, and says so: the storage has all
that members could give.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import re
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from acpfs.backing.identity import Identity
from acpfs.backing.member_records import NodeRecord
from acpfs.config import AUTO, OFF, Settings
from acpfs.errors import AcpfsError
from acpfs.exchange.beside import Exchange, ExchangePlace
from acpfs.exchange.exchange_records import KEY_CHARS, MemberAddress
from acpfs.exchange.member_links import fingerprint
from acpfs.filesystem.lending import Lending
from acpfs.links.keys import make_key
from acpfs.links.tls import certificate_of
from acpfs.runtime.clock import Clock
from acpfs.runtime.given import Runtime
from acpfs.writeback.copies.held_copies import HeldCopies
from acpfs.writeback.copies.on_member import HolderCandidate
from acpfs.writeback.members.cluster import Cluster

LOOKS_MAX = 4
"""Records that are read at the same time for connections of members that are not known yet."""
KNOWN_S = 1.0
"""So long a list of members is good."""
BACKLOG = 64
_SIOCGIFADDR = 0x8915
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Reached:
    """Where other members reach this one."""

    addresses: tuple[str, ...] = ()
    port: int = 0
    key: str = ""
    place: ExchangePlace | None = None
    """None: it exchanges nothing."""
    warnings: list[str] = field(default_factory=list)


def reached(settings: Settings, runtime: Path, identity: Identity) -> Reached:
    """Listen where the setting says, with this member's own key, made at the first time."""
    if settings.listens == OFF:
        return Reached()
    directory = runtime / "exchange" / f"{identity.volume_id}-{identity.node_id}"
    listeners: list[socket.socket] = []
    try:
        make_key(
            directory,
            "acpfs member",
            "the key by which members know each other (or exchange=off)",
        )
        key = fingerprint(certificate_of(directory))
        listeners += _listening(addresses_of(settings.listens))
    except (OSError, ValueError, AcpfsError) as error:
        return Reached(
            warnings=[
                f"nothing is exchanged with other members: {error} (exchange={settings.listens})"
            ]
        )
    place = ExchangePlace(
        identity.volume_id,
        identity.node_id,
        directory,
        not settings.peer_encryption,
        tuple(listeners),
    )
    addresses = tuple(str(one.getsockname()[0]) for one in listeners)
    return Reached(addresses, int(listeners[0].getsockname()[1]), key, place)


def exchange(
    settings: Settings,
    reached: Reached,
    directory: MemberDirectory,
    lending: Callable[[], Lending],
    given: Runtime,
    holding: Callable[[], HeldCopies],
) -> Exchange | None:
    """None: nothing is exchanged. `lending`, `holding`: when the first member asks."""
    if reached.place is None:
        return None
    return Exchange(
        reached.place,
        directory,
        lending,
        given,
        holding,
        patience_s=settings.exchange_patience_s,
    )


def addresses_of(where: str) -> list[str]:
    """Of this machine: those of the host name, of an interface, or the one that is given.

    Raises:
        OSError: there is none.
    """
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(where))]
    found = _of_host() if where == AUTO else _of_interface(where)
    if not found:
        raise OSError(
            f"interface {where} has no address"
            if where != AUTO
            else "the host name has no address that others can reach"
        )
    return found


def _of_host() -> list[str]:
    """As a pod or a node of Slurm is known to others; else by which it would reach them."""
    with contextlib.suppress(OSError):
        told = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found = {str(address[0]) for *_rest, address in told}
        if usable := sorted(filter(_is_reachable, found)):
            return usable
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 9))  # of documentation; nothing is sent
        return [str(one.getsockname()[0])]
    return []


def _is_reachable(address: str) -> bool:
    with contextlib.suppress(ValueError):
        known = ipaddress.ip_address(address)
        return not (known.is_loopback or known.is_link_local or known.is_unspecified)
    return False


def _of_interface(name: str) -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        asked = struct.pack("256s", name.encode()[:15])
        with contextlib.suppress(OSError):
            answer = fcntl.ioctl(one.fileno(), _SIOCGIFADDR, asked)
            found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _index, _prefix, _scope, _flags, interface = line.split()
            address = str(ipaddress.ip_address(bytes.fromhex(digits)))
            if interface == name and _is_reachable(address):
                found.append(address)
    return found


def _listening(addresses: Sequence[str]) -> list[socket.socket]:
    """At each address, at one port, which the first of them finds free."""
    made: list[socket.socket] = []
    try:
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            port = made[0].getsockname()[1] if made else 0
            one = socket.socket(family, socket.SOCK_STREAM)
            made.append(one)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address, port))
            one.listen(BACKLOG)
    except OSError:
        for one in made:
            one.close()
        raise
    return made


class MemberDirectory:
    """Who can be asked, and whose key is whose; implements `acpfs.exchange.beside.KnownMembers`."""

    def __init__(self, cluster: Callable[[], Cluster], clock: Clock) -> None:
        """`cluster`: when the first question comes."""
        self._cluster = cluster
        self._now = clock.now
        self._known: tuple[float, list[MemberAddress]] = (-KNOWN_S, [])
        self._looks = 0

    def others(self) -> Sequence[MemberAddress]:
        """Members that live, and say where they are."""
        now = self._now()
        since, known = self._known
        if now - since >= KNOWN_S or not known:
            known = [
                MemberAddress(one.node, tuple(one.addresses), one.port, one.key)
                for one in self._cluster().live_records()
                if one.addresses and one.port
            ]
            self._known = (now, known)
        return known

    def candidates(self) -> list[HolderCandidate]:
        """Members that live and hold copies for others, by their records."""
        return [
            HolderCandidate(
                MemberAddress(one.node, tuple(one.addresses), one.port, one.key),
                one.domain or one.host,
                one.holds,
            )
            for one in self._cluster().live_records()
            if one.addresses and one.port and one.holds >= 0
        ]

    def knows(self, node: str, key: str) -> Future[bool]:
        """By the record as it was last read, or, where that does not say so, as it is now: who
        comes may have begun a moment ago.
        """
        done: Future[bool] = Future()
        if _NODE.fullmatch(node) is None or len(key) != KEY_CHARS:
            done.set_result(False)
            return done
        if any(one.node == node and _is_key(one, key) for one in self._cluster().live_records()):
            done.set_result(True)
            return done
        if self._looks >= LOOKS_MAX:  # strangers ask for no more of the storage
            done.set_result(False)
            return done
        self._looks += 1

        def looked(read: Future[NodeRecord | None]) -> None:
            self._looks -= 1
            record = read.result() if read.exception() is None else None
            done.set_result(record is not None and record.node == node and _is_key(record, key))

        self._cluster().record_anew(node).add_done_callback(looked)
        return done


def _is_key(record: NodeRecord, key: str) -> bool:
    return bool(record.key) and hmac.compare_digest(record.key, key)
