"""What is simulated: a cluster, its storage, its saves, and how acpfs' nodes tell each other how
far they are.

Times in seconds, sizes in bytes, rates per second. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from acpfs.writeback.members.pace import (
    BETWEEN_LOOKS,
    BETWEEN_WRITES,
    HEARTBEAT_S_MAX,
    READERS,
    READERS_MANY,
    SHARED_FROM,
    STRETCHED_FROM,
)

GB = 1_000_000_000
ENTRIES_PER_READDIR = 100
"""Names that one request of a listing brings (NFS: 4-64 KiB per reply)."""


@dataclass(frozen=True)
class Scenario:
    """One cluster."""

    nodes: int = 64
    bytes_per_node: float = 40 * GB
    files_per_node: int = 8
    bytes_skew: float = 0.0
    """Nodes have between 1 - skew and 1 + skew times `bytes_per_node`."""
    interval_s: float = 600.0
    """From one save to the next."""
    saves: int = 2
    pointers_per_save: int = 2
    close_spread_s: float = 2.0
    """Nodes close their files within so long; the pointer is closed after the last one (a
    collective).
    """
    bandwidth: float = 2000 * GB
    """Of the storage, for all."""
    client_bandwidth: float = 5 * GB
    """Of one node to the storage."""
    clients_at_best: int = 0
    """With more clients that write at the same time, the storage is slower; 0: never."""
    contention: float = 0.5
    """How much: bandwidth × (clients_at_best / clients) ** contention."""
    stream_cost_s: float = 0.02
    """Per file, beside its bytes: create, fsync, rename."""
    streams: int = 8
    metadata_rate: float = 50_000.0
    """Operations that the metadata server does per second."""
    operations_per_file: float = 8.0
    latency_s: float = 0.001
    """Of one small operation on a metadata server that has nothing else to do."""
    heartbeat_s: float = 2.0
    clock_bound_s: float = 0.5
    clock_error_s: float = 0.01
    """Clocks of nodes differ by up to this, either way."""
    mtbf_s: float = 50_000 * 3600.0
    """Of one node; 16,384 of them then fail every three hours."""
    stagger_s: float = 0.0
    seed: int = 1

    def storage_rate(self, clients: int) -> float:
        """What the storage takes from so many clients together."""
        if not self.clients_at_best or clients <= self.clients_at_best:
            return self.bandwidth
        return self.bandwidth * math.pow(self.clients_at_best / clients, self.contention)

    def client_rate(self) -> float:
        """What one node alone can send: its link, or its streams' waiting for the end of each
        file.
        """
        rate = self.client_bandwidth
        if self.stream_cost_s > 0:
            rate = min(
                rate,
                min(self.streams, self.files_per_node)
                * self.bytes_per_node
                / self.files_per_node
                / self.stream_cost_s,
            )
        return rate


@dataclass(frozen=True)
class Design:
    """How nodes tell each other how far they are."""

    name: str
    publish_operations: float = 7.0
    """lookup, create, write, fsync, rename, open and fsync of the directory; `bench.simulate_check`
    counts them.
    """
    read_operations: float = 3.0
    """lookup, open, release (the read itself does not reach a metadata server)."""
    beat: float = 0.625
    """Mean time between two records, in heartbeats (0.5 to 0.75) …"""
    lively_beat: float = 0.625
    """… and where something was closed a moment ago, or is not persisted."""
    look: float = 0.25
    """Heartbeats between two looks of who has a gated pointer."""
    leaves_out: bool = False
    """Who waits does not read what cannot be new yet."""
    lists_to_read: bool = False
    """Each look begins with a listing: clients learn from it which records are new."""
    heard: int = 16
    """Records of others that a node reads per beat while nothing is gated."""
    beats_per_listing: float = 5.0
    readers: int = READERS
    """Records that are read at the same time, with more than SHARED_FROM nodes."""
    group: int = 0
    """So many nodes' records are read by one of them and told on in one file; 0: whoever waits
    reads all.
    """
    in_names: bool = False
    """The watermark is in the record's name, and a listing has them all."""
    thinned: bool = False
    """Reading and listing while nothing is gated: as much as 64 nodes do, shared by all."""
    stretched_from: int = 0
    """With more nodes, heartbeats are longer in proportion, up to a minute; 0: never."""

    def heartbeat_s(self, nodes: int, set_s: float) -> float:
        """With so many nodes."""
        return (
            max(set_s, min(HEARTBEAT_S_MAX, set_s * nodes / self.stretched_from))
            if self.stretched_from
            else set_s
        )

    def beat_s(self, nodes: int, set_s: float) -> float:
        """From one record of a node to its next, on average."""
        return self.beat * self.heartbeat_s(nodes, set_s)

    def heard_by(self, nodes: int) -> float:
        """Records that one node reads per beat."""
        if self.in_names:
            return 0.0
        if self.group:
            return float(nodes > 1)  # the leader reads each of its group
        return min(nodes - 1, self.heard) * self._thin(nodes)

    def published(self) -> float:
        """Files written per node and beat."""
        return 1 + (1 / self.group if self.group else 0.0)

    def listings(self, nodes: int) -> float:
        """Listings per node and beat."""
        return self._thin(nodes) / self.beats_per_listing

    def _thin(self, nodes: int) -> float:
        return min(1.0, SHARED_FROM / nodes) if self.thinned else 1.0


EVERY = Design("every record, as it was")
THINNED = Design(
    "as it is, but heartbeats stay",
    thinned=True,
    readers=READERS_MANY,
    lively_beat=BETWEEN_WRITES,
    look=BETWEEN_LOOKS,
    leaves_out=True,
    lists_to_read=True,
)
LANDED = replace(THINNED, name="as it is", stretched_from=STRETCHED_FROM)
GROUPS = replace(LANDED, name="as it is, in groups of 128", group=128)
NAMES = replace(LANDED, name="as it is, in names", in_names=True, publish_operations=5.0)
DESIGNS = (EVERY, THINNED, LANDED, GROUPS, NAMES)
"""What is built is LANDED; the last two are on paper."""
