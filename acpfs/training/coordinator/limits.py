"""How long the coordinator waits for what."""

from __future__ import annotations

from dataclasses import dataclass

FAULTS_MAX = 100
"""Without a further update, however long they take: of a job, and of one rank's processes
(`launchers`).
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """All in seconds, but for the counts."""

    settle_down_s: float = 0.2
    """After the first sign of a fault, for other signs of the same one: a node's ranks die
    together. 0 on one node.
    """
    beat_s: float = 2.0
    """Between two beats of a member."""
    silent_beats: int = 3
    """After so many that did not come a member is lost: its node is gone, or only the network to
    it.
    """
    stuck_s: float = 20.0
    """From STOP until a rank that has not parked counts as lost."""
    settle_s: float = 60.0
    """From SETTLE, which is one local update and digests."""
    save_s: float = 900.0
    """In a save, without a byte written by those who have not finished; a storage that is written
    straight may be slow.
    """
    publish_s: float = 60.0
    """From PUBLISH, a few renames."""
    only_holder_s: float = 600.0
    """And so much longer those are waited for that speak and alone hold something: a storage may
    stand still for a while.
    """
    leave_s: float = 10.0
    """From LEAVE until the coordinator ends, whoever is left."""
    missing_s: float = 60.0
    """At the end of a job whose ranks are replaced: for a process in the place of a rank that died
    before it had left in order.
    """
    claim_s: float = 2.0
    """For the witness: the backing directory may hang, and then a majority goes on without it."""
    active_s: float = 2.0
    """Without a word from the active coordinator before a standby asks for votes."""
    replace_s: float = 900.0
    """Where ranks are replaced: so long the others wait for a process, from the last rank that went
    on. Launchers give a lost node up after 615 s (`launchers`: AWAY_S, VACANT_S), and one that
    takes its place in time has still to start its ranks.
    """
    rebuild_s: float = 900.0
    """From RESUME until all ranks have done an update; building a large model takes time."""
    building_s: float = 30.0
    """And so long one may be silent meanwhile: who imports, or makes a device's context, holds its
    interpreter for seconds.
    """
    fruitless_max: int = 3
    """A program that fails at one update so often, and gets no further, will fail again."""
    faults_max: int = FAULTS_MAX
    """So many faults of whatever cause without an update that was never done before."""
    rank_failures_max: int = 2
    """A rank that could not write so often is in no further cover."""
    failures_max: int = 6
    """After so many failed saves of one job nobody tries again."""

    @property
    def silent_s(self) -> float:
        """How long a member may be silent."""
        return self.beat_s * self.silent_beats
