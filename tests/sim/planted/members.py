"""Known defects of the order between members."""

from __future__ import annotations

from tests.sim.planted.bug import Bug

CLUSTER, GATE, PEERS = (f"writeback/members/{name}.py" for name in ("cluster", "gate", "peers"))
ONLY_MEMBERS = ("members",)

MEMBER_BUGS = [
    Bug(
        "others-by-their-silence",
        "a wait for others ends with the first look",
        CLUSTER,
        "behind = self._behind(behind, closed_at, listed_at, marks)",
        "behind = []",
        ONLY_MEMBERS,
    ),
    Bug(
        "pointer-not-gated",
        "a pointer waits for nobody",
        GATE,
        "        if self._order is ClusterOrder.ALL or self._is_pointer(op):\n            return "
        "True\n",
        "",
        ONLY_MEMBERS,
    ),
    Bug(
        "removal-not-gated",
        "a removal waits for no pointer of others",
        GATE,
        "return _is_removal(op) and self._may_have_peers()",
        "return False",
        ONLY_MEMBERS,
    ),
    Bug(
        "content-not-gated",
        "a temporary file is there before its rename may be",
        GATE,
        "        if op.kind not in _MOVING_IN:\n            return\n        for ino",
        "        return\n        for ino",
        ONLY_MEMBERS,
    ),
    Bug(
        "withheld-not-told",
        "nobody hears what a member withholds",
        CLUSTER,
        "            held=self._gate.held(),",
        "            held={},",
        ONLY_MEMBERS,
        unjudged=(
            "an older pointer of one name is given up by itself (S484); test_members_random has it"
        ),
    ),
    Bug(
        "placed-not-told",
        "nobody hears which pointers a member has made",
        CLUSTER,
        "            placed=self._gate.placed(),",
        "            placed={},",
        ONLY_MEMBERS,
    ),
    Bug(
        "watermark-is-now",
        "a member says that all it has closed is persisted",
        CLUSTER,
        "            watermark=self._gate.watermark(now),",
        "            watermark=now,",
        ONLY_MEMBERS,
    ),
    Bug(
        "pointers-is-now",
        "a member says that no pointer of it is still to come",
        CLUSTER,
        "            pointers=pointers,",
        "            pointers=now,",
        ONLY_MEMBERS,
    ),
    Bug(
        "no-clock-bound",
        "clocks are taken for equal",
        PEERS,
        "            until = closed_at + self.bound_s(terms)",
        "            until = closed_at",
        ONLY_MEMBERS,
    ),
    Bug(
        "clock-set-unseen",
        "a clock that was set back counts by what the other read before",
        PEERS,
        "            if not self.ahead_s_min <= most < math.inf:",
        "            if most == math.inf:",
        ONLY_MEMBERS,
        unjudged=(
            "clocks that differ by more than the operator said are not drawn; test_peers has it"
        ),
    ),
    Bug(
        "drift-not-told",
        "nobody hears that a wall clock was set",
        CLUSTER,
        "            drift_s=self._wrong_by_s(),",
        "            drift_s=0.0,",
        ONLY_MEMBERS,
    ),
    Bug(
        "moved-clock-forgotten",
        "what was stamped by a clock that was moved counts as right when that is right again",
        CLUSTER,
        "        return self._log.clock.wrong_by_s(self._oldest_stamp)",
        "        return self._log.clock.drift_s",
        ONLY_MEMBERS,
    ),
    Bug(
        "wrong-clock-lets-pass",
        "what is withheld is not surely before a pointer while a wall clock is wrong",
        PEERS,
        "        return abs(self.record.drift_s) if moved_s is None else moved_s",
        "        return abs(self.record.drift_s)",
        ONLY_MEMBERS,
    ),
    Bug(
        "missing-passes",
        "a member that is missing has persisted everything",
        PEERS,
        "        return Verdict.MISSING if self.is_missing(terms) else Verdict.WAITS",
        "        return Verdict.PASSES if self.is_missing(terms) else Verdict.WAITS",
        ONLY_MEMBERS,
    ),
    Bug(
        "loss-passes",
        "what was lost with RAM holds no pointer up",
        PEERS,
        "                return Verdict.LOST\n",
        "                pass\n",
        ONLY_MEMBERS,
    ),
    Bug(
        "loss-not-told",
        "a member comes back without its RAM, and says nothing",
        CLUSTER,
        "            self._own.follows(earlier, self._log.clock.now(), self._kept_until)",
        "            pass",
        ONLY_MEMBERS,
    ),
    Bug(
        "withheld-for-good",
        "what was withheld stays so when the missing member is back",
        GATE,
        "            self._log.unpark(gated.op)",
        "            pass",
        ONLY_MEMBERS,
    ),
    Bug(
        "old-listing",
        "which members there are is taken from a listing that a client remembers",
        CLUSTER,
        "        if not unknown or self._coherent:\n            return unknown\n",
        "        return unknown\n",
        ONLY_MEMBERS,
    ),
    Bug(
        "joined-unknown",
        "a mount begins while who was alone does not know of it",
        CLUSTER,
        "            await self._until_known()\n",
        "            pass\n",
        ONLY_MEMBERS,
    ),
    Bug(
        "old-record-of-the-living",
        "that a member has ended is believed of an old record",
        PEERS,
        "            if is_fresh and self._has_ended(record):\n                return (",
        "            if self._has_ended(record):\n                return (",
        ONLY_MEMBERS,
    ),
]
