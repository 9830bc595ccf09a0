"""Defects that histories have found, put back: a history of the corpus comes to each."""

from __future__ import annotations

from tests.sim.planted.bug import Bug

MENDED_BUGS = [
    Bug(
        "one-link-is-removed",
        "a directory is taken for removed by its link count",
        "filesystem/nodes.py",
        "        return not self.names and self.ino != ROOT\n",
        "        return (not self.names or self.is_dir and self.directory_links < 1) and "
        "self.ino != ROOT\n",
        also=(
            (
                (
                    "        if self.directory_links >= COUNTED_LINKS_MIN:\n"
                    "            self.directory_links = max(COUNTED_LINKS_MIN, "
                    "self.directory_links + change)\n"
                ),
                "        self.directory_links += change\n",
            ),
        ),
    ),
    Bug(
        "older-content-again",
        "after a flush that failed, an older content is put over a later one",
        "writeback/commits/recheck.py",
        "            return present is not None and any(\n",
        "            return False and any(\n",
        profiles=("power", "durable"),
    ),
    Bug(
        "doubt-not-looked-at",
        "the next worker flushes, and does not look what a flush that failed has left",
        "writeback/commits/commit.py",
        "        outcome.is_doubtful |= op.is_flush_failed\n",
        "",
        profiles=("forgetting",),
    ),
    Bug(
        "read-once",
        "a cold file whose attributes are drained while it is read cannot be opened",
        "filesystem/content/whole_reads.py",
        "for _read in range(READS_MAX - 1):",
        "for _read in range(0):",
        profiles=("cold",),
    ),
    Bug(
        "ended-in-a-step",
        "a stream that nobody needs any more ends a step by an error",
        "writeback/streams/streams.py",
        "            if stream.abandoned:\n"
        "                raise AbandonedError  # before the step: what ends one is an answer, or a "
        "bug\n"
        "            with self._state.step():\n",
        "            with self._state.step():\n"
        "                if stream.abandoned:\n"
        "                    raise AbandonedError\n",
        profiles=("lane",),
    ),
    Bug(
        "untold-writer-unasked",
        "who wrote through a copy is not asked for where an earlier worker knew him",
        "filesystem/doubtful_closes.py",
        "        if UNTOLD not in handle.wrote_by:\n",
        "        if True:\n",
        profiles=("handed-on",),
    ),
    Bug(
        "fixed-by-nobody",
        "who has named what he wrote counts as at it still",
        "filesystem/doubtful_closes.py",
        "            if not handle.changing:\n                handle.take(CloseEvent.FIXED)",
        "            if False:\n                handle.take(CloseEvent.FIXED)",
        profiles=("shared",),
    ),
    Bug(
        "all-sent-again",
        "all that a file had left in RAM is sent again after each failure",
        "filesystem/content/outgrown.py",
        "        return SENT_PIECES >> max(0, moving.sends_failed - 1)\n",
        "        return SENT_PIECES\n",
        profiles=("lane",),
        also=(("                if piece not in moving.checked:\n", "                if True:\n"),),
    ),
    Bug(
        "placed-under-the-first",
        "what an earlier worker has put under another name of a file counts as lost",
        "writeback/commits/commit.py",
        "            first = self._placing.name_of(version, targets[1:])\n",
        "            raise\n",
        profiles=("short", "mirror"),
    ),
    Bug(
        "moved-over-is-moved",
        "what another member has put where a file was moved to is taken for that file",
        "writeback/commits/commit.py",
        "                if self._is_anothers(op.ino, st):\n",
        "                if False:\n",
        profiles=("members",),
    ),
    Bug(
        "vain-write-remembered",
        "a write that failed and changed nothing leaves a half",
        "filesystem/content/contents.py",
        "        self.forget_vain_write(node)\n",
        "",
        profiles=("short",),
    ),
    Bug(
        "moved-though-it-came-back",
        "after a flush that failed, what was moved and came back is moved once more",
        "writeback/commits/recheck.py",
        "        if self._parts.node_at(at) == op.ino:\n            return False  # another",
        "        if False:\n            return False  # another",
        profiles=("power", "durable"),
    ),
    Bug(
        "open-files-unknown-yet",
        "bytes leave RAM before it is known who has files open",
        "filesystem/nodes.py",
        "        self.open_files_are_known = False\n",
        "        self.open_files_are_known = True\n",
        profiles=("lane",),
    ),
    Bug(
        "last-of-several-stays",
        "of several pointers that are given up, the last one keeps its name",
        "filesystem/changes.py",
        "            self._table.set_child(parent, name, NO_INO)\n        else:\n",
        "            return\n        else:\n",
        profiles=("members",),
    ),
    Bug(
        "time-beside-an-xattr-lost",
        "after a loss of RAM, times that came with an extended attribute are not shown",
        "filesystem/salvage.py",
        "            *_CHANGING,  # of both kinds",
        "            *2 * (OpKind.SETATTR.value,),  # of both kinds",
        profiles=("mirror",),
    ),
    Bug(
        "bare-directory",
        "a directory that is made again keeps mode 0700 where giving it another fails",
        "writeback/commits/commit.py",
        "            self._placing.end_parents()\n",
        "            pass\n",
    ),
    Bug(
        "no-page-to-change",
        "a cold file cannot be changed while others fill the tmpfs of RAM",
        "filesystem/content/writable.py",
        "            if error.errno not in FULL_ERRNOS:\n",
        "            if True:\n",
        profiles=("short",),
    ),
    Bug(
        "no-page-for-a-copy",
        "what is to be stored cannot be changed while others fill the tmpfs of RAM",
        "filesystem/content/copy_aside.py",
        "                if isinstance(error, OSError) and error.errno in FULL_ERRNOS:\n",
        "                if False:\n",
        profiles=("short",),
    ),
    Bug(
        "attributes-of-before",
        "after a flush that failed, attributes are given to a content that came after them",
        "writeback/commits/recheck.py",
        "            if self._is_of_later(op, present):\n"
        "                return  # which has come with its own ones\n",
        "",
    ),
    Bug(
        "shown-and-not-stored",
        "what was written to a staged version before the next mount is shown, and not stored",
        "filesystem/content/contents.py",
        "                self._stage_anew(version)\n",
        "                pass\n",
        profiles=("lane",),
    ),
    Bug(
        "checksum-of-before",
        "a later mount finds the checksum from before a dead session's writes",
        "filesystem/content/contents.py",
        "        self.kernel.renew(version)\n",
        "        self._log.save_version(version)\n",
        profiles=("lane",),
    ),
    Bug(
        "written-before-recorded",
        "what lies in the staging area is changed before it is recorded that it is",
        "filesystem/content/contents.py",
        "            if recorded or (body.is_overflowed and (body.modified or body.sealed)):\n",
        "            if recorded or body.is_overflowed:\n",
        profiles=("lane",),
    ),
    Bug(
        "refused-behind-its-close",
        "a mapped file is refused for want of room after its close was answered",
        "filesystem/hold.py",
        "        if node.body.modified and not node.body.failed and "
        "self._contents.kernel.has_written(node):\n",
        "        if node.body.modified and not node.body.failed:\n",
        profiles=("lane",),
    ),
    Bug(
        "opener-forgotten",
        "a new worker does not know that who opened a file has written through it",
        "filesystem/kept_handles.py",
        "        return {handle.process} if handle.process and has_written else set()\n",
        "        return set()\n",
        profiles=("shared",),
    ),
    Bug(
        "acl-as-narrowed",
        "the next content keeps an ACL that was narrowed for the one before",
        "writeback/commits/commit.py",
        "        if access is not None and op.meta.permissions is not None:\n",
        "        if False and access is not None and op.meta.permissions is not None:\n",
        profiles=("shared",),
    ),
    Bug(
        "told-until-forgotten",
        "who forgets a member does not tell of the pointers that it made",
        "writeback/members/cluster.py",
        "            self._gate.learn_placed(told)\n",
        "",
        profiles=("members",),
    ),
    Bug(
        "content-under-its-temporary-name",
        "a pointer's content comes to the name that members share before it is renamed",
        "writeback/log/pairs.py",
        "        return not places or places == [(content.parent, content.name)]\n",
        "        return False\n",
        profiles=("members",),
    ),
    Bug(
        "replaced-since-and-put-again",
        "who died behind a pair puts its pointer over another member's later one",
        "writeback/commits/moved_contents.py",
        "        return st.mtime_ns > given_ns and self._conflicts.is_foreign(pair.to, st)\n",
        "        return False\n",
        profiles=("members",),
    ),
    Bug(
        "waits-for-its-own-content",
        "others' pointers wait for the content of one that waits for theirs",
        "writeback/members/gate.py",
        "        if move is not None and self.has_content(move):\n",
        "        if move is not None and not op.seq:\n",
        profiles=("members",),
    ),
    Bug(
        "pair-not-marked",
        "a content and its rename are begun together, and the log does not say that they are one",
        "writeback/log/log.py",
        "            self._set_payload(move, WITH_CONTENT)\n",
        "            pass\n",
        profiles=("session", "members"),
    ),
    Bug(
        "pointer-without-content",
        "a pointer's content is on the storage under a name that others write, too, when it waits",
        "filesystem/pointer_content.py",
        "        if not (self._waits and self._peers.anybody) or node.unlogged:\n",
        "        if self._waits or node.unlogged:\n",
        profiles=("members",),
    ),
    Bug(
        "removed-and-made-again",
        "after a flush that failed, a directory is made again that a failed change has removed",
        "writeback/commits/recheck.py",
        "            and not self._is_removed_since(op)\n",
        "",
    ),
    Bug(
        "older-staged-after-discard",
        "as a half is discarded, what is shown has later writes than what was staged",
        "filesystem/changes.py",
        "        if self._contents.differs_from_staged(last):\n",
        "        if False:\n",
        profiles=("lane",),
    ),
    Bug(
        "earlier-keeps-the-half",
        "an earlier version keeps what a discarded half wrote behind the last one, and it is shown",
        "filesystem/content/contents.py",
        "            self._shorten_earlier(version)\n",
        "",
        profiles=("mirrored-lane",),
    ),
    Bug(
        "staged-has-grown",
        "a version that is staged gets the length that its file has later",
        "filesystem/kernel_writes.py",
        "        if not version.is_staged:  # what is placed has the length it was staged with\n",
        "        if True:\n",
        profiles=("mirrored-lane",),
    ),
    Bug(
        "staged-keeps-the-half",
        "what was staged is stored with a half that was discarded since",
        "writeback/commits/commit.py",
        "        is_cut = self._placing.shorten_staged(op.version, staging)\n",
        "        is_cut = False\n",
        profiles=("mirrored-lane", "lane"),
        unreached=(
            "none of 100 histories of mirrored-lane, nor of 60 of lane, has anything to cut off; "
            "`tests/filesystem/test_mirror.py` has it"
        ),
    ),
    Bug(
        "others-taken-for-what-was-done",
        "what lies where a worker that died had put something is taken for that",
        "writeback/commits/commit.py",
        "        return None if st is None else self._as_left(op, st)\n",
        "        return st\n",
        profiles=("members",),
        unreached=(
            "one of 60 histories comes there, and finds what it left; "
            "`tests/writeback/test_pairs.py` has it"
        ),
    ),
    Bug(
        "goes-on-before-the-look",
        "behind what a dead worker did, and a server forgot, the next one goes on before it looks",
        "writeback/commits/commit.py",
        "        return outcome.is_doubtful and not op.committed\n",
        "        return False\n",
        profiles=("forgetting",),
    ),
    Bug(
        "brought-by-the-one-before",
        "a content that a server forgot goes without what came with the one before it",
        "writeback/commits/recheck.py",
        "            op.meta.xattrs = {**self._xattrs_before(group, op), **op.meta.xattrs}\n",
        "",
        profiles=("forgetting",),
    ),
    Bug(
        "made-again-inherits",
        "a directory that is made again after a server forgot it keeps an ACL of the one above",
        "writeback/commits/recheck.py",
        "                meta = self._committer.without_inherited(op, path, meta)\n",
        "                pass\n",
        profiles=("forgetting",),
        unreached=(
            "of 695 such looks of 200 histories none finds an ACL to take away; "
            "`tests/writeback/test_recheck.py` has it"
        ),
    ),
    Bug(
        "forgotten-not-listed",
        "a directory that a server has forgotten is not listed until it is made again",
        "filesystem/lowerview.py",
        "                if error.errno == errno.ENOENT and self._is_made_here(parent):\n",
        "                if False:\n",
        profiles=("forgetting",),
    ),
]
