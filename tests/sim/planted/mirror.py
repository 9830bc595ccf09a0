"""Known defects of the mirror: of what survives the loss of RAM."""

from __future__ import annotations

from tests.sim.planted.bug import Bug

MIRROR = "writeback/sources/mirror.py"
SPILL = "writeback/sources/spill.py"
SALVAGE = "filesystem/salvage.py"
ONLY_MIRROR = ("mirror",)
LANE_TOO = ("mirrored-lane",)

MIRROR_BUGS = [
    Bug(
        "journal-not-waited-for",
        "an operation is carried out before the journal knows what it has to",
        MIRROR,
        "        elif self._is_behind(token, ops) and not self._sync(token):\n",
        "        elif False:\n",
        ONLY_MIRROR,
    ),
    Bug(
        "mark-not-withdrawn",
        "a journal whose disk has failed counts still",
        "writeback/copies/counting_mark.py",
        "        withdraw(self._lower, self._path)\n        self._token = ",
        "        self._token = ",
        ONLY_MIRROR,
    ),
    Bug(
        "marked-before-it-is-seeded",
        "a journal counts before it has all",
        MIRROR,
        "        return lambda: self._stage is JournalStage.FOLLOWING and self._synced >= wanted\n",
        "        return lambda: True\n",
        ONLY_MIRROR,
    ),
    Bug(
        "log-not-cut",
        "what has no bytes is left out, and what came after it is kept",
        "filesystem/salvage.py",
        '            if op["vid"] is not None and not self._has_bytes(op["vid"]):\n'
        "                break\n",
        '            if op["vid"] is not None and not self._has_bytes(op["vid"]):\n'
        "                continue\n",
        ONLY_MIRROR,
    ),
    Bug(
        "repeated-in-a-row",
        "removals are taken for harmless to repeat",
        MIRROR,
        "REPEATABLE = frozenset({OpKind.STORE, ",
        "REPEATABLE = frozenset({OpKind.UNLINK, OpKind.RENAME, OpKind.STORE, ",
        ONLY_MIRROR,
        equivalent=(
            "what comes later under one of their names, or to their node, waits for the journal "
            "all the same (`UnknownOps.would_spoil`)"
        ),
    ),
    Bug(
        "outdated-copy-goes-at-once",
        "what the kernel has written on loses its copy before there is another one",
        SPILL,
        "        if self.mirror is None or version.vid in self.moved:\n",
        "        if True:\n",
        LANE_TOO,
        unreached=(
            "RAM is lost beside such a copy in few histories (6 lives of 240 histories); "
            "`tests/filesystem/test_mirror.py` has it"
        ),
    ),
    Bug(
        "outdated-copy-taken",
        "after the loss of RAM the copy counts, though what was staged is newer",
        SALVAGE,
        'is_outdated = copy is not None and version["digest"] not in ("", copy["digest"])',
        "is_outdated = False",
        LANE_TOO,
        unreached=(
            "RAM is lost beside such a copy in few histories (6 lives of 240 histories); "
            "`tests/filesystem/test_mirror.py` has it"
        ),
    ),
    Bug(
        "outdated-copy-not-known-again",
        "the next worker removes copies that the kernel has written on since",
        SPILL,
        "            self._find_outdated(found)\n",
        "",
        LANE_TOO,
        unreached=(
            "RAM is lost beside such a copy in few histories (6 lives of 240 histories); "
            "`tests/filesystem/test_mirror.py` has it"
        ),
    ),
    Bug(
        "beyond-ram-is-mirrored",
        "what is in a staging file alone counts as mirrored before that is flushed",
        "filesystem/content/spilling.py",
        "        versions += [one for one in self._beyond_ram.values() "
        "if not self._is_staged(one)]\n",
        "",
        LANE_TOO,
    ),
    Bug(
        "lost-staging-not-copied",
        "a file whose staging file is lost gets no copy, and counts as mirrored",
        "writeback/failures/failures.py",
        "            self._parts.listener.unstaged(op.version)\n",
        "",
        ONLY_MIRROR,
        unreached=(
            "nobody removes staging files where RAM is lost (`Knobs.is_tidied`); "
            "`tests/filesystem/test_mirror.py` has it"
        ),
    ),
    Bug(
        "staged-before-recorded",
        "that a file is staged counts before it is recorded",
        "filesystem/content/spilling.py",
        "        return version.is_staged and version.changed <= self._state.recorded_changes\n",
        "        return version.is_staged\n",
        ("mirror", "mirrored-lane"),
    ),
    Bug(
        "known-before-it-is-appended",
        "the journal counts as having what is on its way to it",
        "writeback/copies/pending.py",
        "        self.known_changes = self._taken_changes\n",
        "        self.known_changes = self.changes\n",
        ONLY_MIRROR,
    ),
    Bug(
        "heard-before-recorded",
        "somebody hears that all is copied before it is recorded what was left out",
        "filesystem/content/spilling.py",
        "        if not self._awaited or self._state.unrecorded:\n",
        "        if not self._awaited:\n",
        ONLY_MIRROR,
        unreached=(
            "no program waits to hear that all is copied; `tests/filesystem/test_mirror.py` has it"
        ),
    ),
]
