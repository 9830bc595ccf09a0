"""Known defects of files that several processes have open."""

from __future__ import annotations

from tests.sim.planted.bug import Bug

CLOSES, WRITERS, HANDLES, OPEN_FILES = (
    f"filesystem/{name}.py" for name in ("closes", "file_writers", "kept_handles", "open_files")
)
ONLY_SHARED = ("shared",)

SHARED_BUGS = [
    Bug(
        "child-not-seen",
        "who opened a file is taken for who writes it",
        WRITERS,
        "        if handle.wrote_by:\n            return handle.wrote_by != {process}\n",
        "",
        ONLY_SHARED,
    ),
    Bug(
        "killed-child-ignored",
        "a child that wrote is killed, and its parent's close counts",
        HANDLES,
        "        return process in (0, self.process) or not self.wrote_by.isdisjoint((process, "
        "UNTOLD))",
        "        return process in (0, self.process)",
        ONLY_SHARED,
    ),
    Bug(
        "doubt-forgotten-early",
        "a record says that a close is in doubt no more before that is committed",
        HANDLES,
        "            record[_TENTATIVE] = late_tentative or tentative",
        "            record[_TENTATIVE] = tentative",
        ONLY_SHARED,
        unreached=(
            "a life ends within the commit that takes a close back, before another does: none of "
            "300 histories; test_handle_records has it"
        ),
    ),
    Bug(
        "writers-not-counted",
        "a close publishes while another open is being written",
        CLOSES,
        "        if node.body.interrupted or (at_it and not self.is_log(node)):",
        "        if node.body.interrupted:",
        ONLY_SHARED,
    ),
    Bug(
        "copies-count",
        "each close counts, also that of a copy",
        "filesystem/last_close.py",
        "        elif left is not Left.NONE:\n            return False\n",
        "",
        ONLY_SHARED,
    ),
    Bug(
        "handed-on-never-counts",
        "a close counts only when the last copy is gone",
        CLOSES,
        "            if counts:\n                self._has_ended(handle)",
        "            if counts and False:\n                self._has_ended(handle)",
        ONLY_SHARED,
    ),
    Bug(
        "anybodys-half-ended",
        "an open with O_TRUNC that fails ends what somebody else left meanwhile",
        CLOSES,
        "            opening.found_half = True\n",
        "            pass\n",
        ONLY_SHARED,
        unreached=(
            "processes of a crew make their calls one after the other, so nobody leaves a half "
            "while an open is under way; test_failed_opens has it"
        ),
    ),
    Bug(
        "doubt-begins-anew",
        "each worker counts the seconds of a close in doubt from its own start",
        OPEN_FILES,
        "handle.closed_at = handle.closed_at or self._clock.now()",
        "handle.closed_at = self._clock.now()",
        ONLY_SHARED,
        unjudged=(
            "a close is decided some seconds later, and nothing says when; test_last_close has it"
        ),
    ),
    Bug(
        "closed-in-the-future",
        "the kept time of a close is rounded up",
        HANDLES,
        "int(handle.closed_at / _CLOSED_UNIT_S)",
        "round(handle.closed_at / _CLOSED_UNIT_S)",
        ONLY_SHARED,
        unjudged="a close is decided half a tenth of a second later; test_last_close has it",
    ),
    Bug(
        "narrower-taken-back",
        "rights that were taken behind a close in doubt go with it",
        "filesystem/changes.py",
        "            if not has_others and not xattrs:\n",
        "            if True:\n",
        ("shared",),
    ),
    Bug(
        "wider-for-older",
        "the older content gets wider rights that were set behind a close in doubt",
        "writeback/log/ops.py",
        "            left &= self.permissions\n",
        "            left = self.permissions\n",
        ("shared",),
        unjudged="wider rights were told, and may be there at any moment; test_versions has it",
    ),
    Bug(
        "older-for-new-owner",
        "who is given a file behind a close in doubt may do with the older content what its owner "
        "might",
        "writeback/log/ops.py",
        "            left = (left >> 6 & left >> 3 & left & 0o7) * 0o111\n",
        "            pass\n",
        ("shared",),
        unjudged=(
            "what a new owner may do was told, and may be there at any moment; not found in 300 "
            "histories; test_versions has it"
        ),
    ),
    Bug(
        "narrower-at-the-end",
        "rights that were taken behind a close in doubt are logged anew, behind what came since",
        "filesystem/changes.py",
        "            change.meta = replace(narrowed if has_others else Metadata(), xattrs=xattrs)\n"
        "            xattrs = {}\n"
        "            self._log.save(change)\n",
        "            self._log.withdraw(change)\n"
        "            self.change_metadata(node, replace(narrowed, xattrs=xattrs))\n"
        "            xattrs = {}\n",
        ("shared",),
        unreached=(
            "in none of 320 histories anything that began later is shown between; test_versions "
            "has it"
        ),
    ),
    Bug(
        "wider-after-discard",
        "after discard, an earlier close has not the rights that the mount shows",
        "filesystem/changes.py",
        "        if shown.gives_rights(logged):\n",
        "        if False:\n",
        ("shared",),
        unreached=(
            "in none of 200 histories a half with wider rights is discarded before an earlier "
            "close is stored; test_versions has it"
        ),
    ),
]
