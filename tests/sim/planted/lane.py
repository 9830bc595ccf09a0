"""Known defects of the passthrough lane: of what the kernel writes, and of files that outgrow
RAM.
"""

from __future__ import annotations

from tests.sim.planted.bug import Bug

OUTGROWN = "filesystem/content/outgrown.py"
EARLIER = "filesystem/content/earlier_writers.py"
OPEN_FILES = "filesystem/open_files.py"
HOLD = "filesystem/hold.py"
KERNEL_WRITES = "filesystem/kernel_writes.py"
CONTENTS = "filesystem/content/contents.py"
ONLY_LANE = ("lane",)

LANE_BUGS = [
    Bug(
        "piece-beside-the-rest",
        "the rest of a file follows while a piece of it is on its way",
        OUTGROWN,
        "        done = shared()\n        body.busy = done\n        if not body.is_outgrown:",
        "        done = shared()\n        if not body.is_outgrown:",
        ONLY_LANE,
        also=(("        assert body.busy is not None, body.staging\n", ""),),
    ),
    Bug(
        "held-for-good",
        "a held writer waits for what only other applications end",
        HOLD,
        "        if held.until is None or writer is None or not writer.has_grown:\n",
        "        if True:\n",
        ONLY_LANE,
    ),
    Bug(
        "rewriting-unseen",
        "the kernel is taken to have written only where the size is another",
        KERNEL_WRITES,
        "        if (st.st_mtime_ns, st.st_size) == body.seen:\n            self",
        "        if st.st_size == body.seen[1]:\n            self",
        ONLY_LANE,
    ),
    Bug(
        "hole-before-its-row",
        "a piece is gone before it is recorded that it is",
        OUTGROWN,
        "        is_new = not _is_gone(body, piece)\n",
        "        is_new = not _is_gone(body, piece)\n        punch_hole(fd, piece * PIECE, "
        "PIECE)\n",
        ONLY_LANE,
    ),
    Bug(
        "gap-unseen",
        "a piece goes that was written to in a gap of the hold",
        OUTGROWN,
        "                if held.gaps != gaps and os.pread",
        "                if False and os.pread",
        ONLY_LANE,
        unreached=(
            "in none of 100 histories a gap comes while a piece is on its way; test_outgrown has it"
        ),
    ),
    Bug(
        "synced-not-copied",
        "what is synced shares its bytes with what the kernel goes on writing",
        CONTENTS,
        "        if node.kernel_writers and node.size <= COPY_AT_FREEZE_BYTES_MAX:\n",
        "        if False:\n",
        ONLY_LANE,
    ),
    Bug(
        "writers-forgotten",
        "the next worker does not know of who writes in the kernel",
        KERNEL_WRITES,
        "        written = self.look(node) or node.body.modified\n",
        "        node.kernel_writers -= 1\n"
        "        written = self.look(node) or node.body.modified\n",
        ONLY_LANE,
    ),
    Bug(
        "close-looks-at-nothing",
        "what the kernel has written is not looked at when the file is closed",
        "filesystem/lane_use.py",
        "        self._contents.kernel.look(handle.node)\n        if handle.maps_unseen",
        "        if handle.maps_unseen",
        ONLY_LANE,
    ),
    Bug(
        "grant-never",
        "a held writer is given nothing when there is room",
        HOLD,
        "        granted = self._granted(held)\n",
        "        granted = 0\n",
        ONLY_LANE,
    ),
    Bug(
        "overtaken-adopted",
        "what was read while a commit moved things is taken for the file that it was asked of",
        "filesystem/content/writable.py",
        "(known is Known.OVERTAKEN or not self._learn(node, st))",
        "not self._learn(node, st)",
        ("cold",),
    ),
    Bug(
        "mapping-forgotten",
        "an open file ends with its last descriptor, though it is mapped",
        OPEN_FILES,
        "        if handle is None or not handle.maps_unseen:\n            return False",
        "        if True:\n            return False",
        ONLY_LANE,
    ),
    Bug(
        "mapping-taken-for-gone",
        "what is mapped is complete at the first look for that",
        OPEN_FILES,
        "            if not self._contents.is_mapped(handle.node):\n                # Before",
        "            if True:\n                # Before",
        ONLY_LANE,
    ),
    Bug(
        "copied-beside-a-write",
        "a version is copied again and again while a write is held up",
        "writeback/streams/streams.py",
        "            self._await_writes(stream)\n",
        "",
        ONLY_LANE,
    ),
    Bug(
        "mapped-digest-believed",
        "an earlier checksum is believed of a version that may have been stored to",
        "writeback/streams/streams.py",
        "                if self._listener.may_have_changed(stream.version):\n",
        "                if False:\n",
        ("mapped",),
    ),
    Bug(
        "dead-writers-unseen",
        "nobody looks who of a dead session can still write",
        "filesystem/content/contents.py",
        "        self.earlier.find(candidates)\n",
        "        self.earlier.find([])\n",
        ONLY_LANE,
    ),
    Bug(
        "dead-writers-have-the-version",
        "only the file gets bytes of its own, and not what was synced",
        EARLIER,
        "            self._versions.move(tier_id, target)\n",
        "            pass\n",
        ONLY_LANE,
    ),
    Bug(
        "dead-writers-have-the-file",
        "only what was synced gets bytes of its own, and not the file",
        EARLIER,
        "            self._move(node, target)\n",
        "",
        ONLY_LANE,
    ),
    Bug(
        "kept-back-stored",
        "what writers of a dead session can still change is stored",
        "writeback/sources/source.py",
        "        if self._tier.is_kept_back(self._tier_id):\n",
        "        if False:\n",
        ONLY_LANE,
        unreached=(
            "in none of 60 histories a version is kept back; in 2 of 50 where later mounts always "
            "have less RAM and writers always stay; test_writers_left does not end with it"
        ),
    ),
]
