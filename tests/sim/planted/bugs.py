"""Known defects, each with the lines to plant it."""

from __future__ import annotations

from tests.sim.planted.acls import ACL_BUGS
from tests.sim.planted.bug import Bug
from tests.sim.planted.lane import LANE_BUGS
from tests.sim.planted.members import MEMBER_BUGS
from tests.sim.planted.mended import MENDED_BUGS
from tests.sim.planted.mirror import MIRROR_BUGS
from tests.sim.planted.shared import SHARED_BUGS

BUGS = [
    Bug(
        "restore-wrote",
        "a takeover forgets that an open file was written to",
        "filesystem/kept_handles.py",
        "        if bits & _WROTE:\n",
        "        if False:\n",
        profiles=("session",),
        equivalent=(
            "RELEASE freezes what is modified when the last handle goes (`OpenFiles.release`)"
        ),
    ),
    Bug(
        "restore-tentative",
        "a takeover forgets that a close waits for its RELEASE",
        "filesystem/open_files.py",
        (
            "                handle.take(CloseEvent.FOUND, op)\n"
            "                # 0: an earlier acpfs has recorded it\n"
            "                handle.closed_at = handle.closed_at or self._clock.now()"
        ),
        "                pass",
        profiles=("session",),
    ),
    Bug(
        "restore-handles-count",
        "a takeover does not count what is open",
        "filesystem/open_files.py",
        "                node.writer_pid = handle.pid\n            node.handles += 1\n",
        "                node.writer_pid = handle.pid\n",
        profiles=("session",),
    ),
    Bug(
        "publish-before-staged",
        "an operation is ready before its bytes are staged",
        "writeback/order/order.py",
        "if op.version is None or op.committed or op.version.state is VersionState.STAGED",
        "if True",
        equivalent="`Committer` looks at the version once more before it begins",
    ),
    Bug(
        "stream-short",
        "what is copied is not compared with the checksum of the close",
        "writeback/streams/streams.py",
        "                size = stream.version.size\n                is_changing",
        (
            "                size = stream.version.size\n"
            "                stream.version.digest = ''\n"
            "                is_changing"
        ),
        unjudged="bytes in RAM do not change by themselves here; test_checksums has it",
    ),
    Bug(
        "on-behind-a-failed-removal",
        "a run of removals goes on behind one that failed",
        "writeback/commits/commit.py",
        "            while done < len(run) and self._next_alone(run[done], outcome):\n"
        "                done += 1\n",
        "            for op in run:\n                done += self._next_alone(op, outcome)\n",
        unreached="no removal of a run fails; test_removal_runs has it",
    ),
    Bug(
        "run-never-ends",
        "what comes behind a run of removals is taken for begun with it",
        "writeback/commits/commit.py",
        "        finally:\n            self._is_of_run = False\n",
        "        finally:\n            pass\n",
        profiles=("members",),
    ),
    Bug(
        "removed-though-in-doubt",
        "a removal that may have been carried out before removes what others have put there since",
        "writeback/commits/conflicts.py",
        "        return self.covers(op) or ((is_late or is_doubtful) and",
        "        return self.covers(op) or (is_late and",
        unreached="no other member comes in between; test_removal_runs has it",
    ),
    Bug(
        "group-swapped",
        "the first two operations of a group change places",
        "writeback/commits/commit.py",
        ("        at = 0\n        while at < len(group)"),
        ("        at = 0\n        group = group[1::-1] + group[2:]\n        while at < len(group)"),
    ),
    Bug(
        "no-directory-sync",
        "directories are not flushed",
        "writeback/commits/flush.py",
        "                self._lower.sync_directory(task.path)",
        "                pass",
        profiles=("power", "durable"),
    ),
    Bug(
        "one-directory-sync",
        "only the first directory of a group is flushed",
        "writeback/commits/flush.py",
        "for ino in {**group.directories, **group.synced}:",
        "for ino in list({**group.directories, **group.synced})[:1]:",
        profiles=("power", "durable"),
    ),
    Bug(
        "no-file-sync",
        "staging files are not flushed",
        "writeback/streams/streams.py",
        "            self._lower.sync(fd)\n",
        "            pass\n",
        profiles=("power", "durable"),
        everywhere=True,
    ),
    Bug(
        "out-of-log-before-flush",
        "operations leave the log before they are flushed",
        "writeback/engine.py",
        (
            "        if result.done:\n"
            "            await self._flusher.flush(result)\n"
            "        with self.section():\n"
            "            self._finish(result)\n"
            "            failed"
        ),
        (
            "        with self.section():\n"
            "            self._finish(result)\n"
            "        if result.done:\n"
            "            await self._flusher.flush(result)\n"
            "        with self.section():\n"
            "            failed"
        ),
        profiles=("power", "durable"),
    ),
    Bug(
        "truncate-length",
        "a cut file keeps its length in the state",
        "filesystem/content/contents.py",
        ("        node.size = 0\n        node.blocks = 0\n        self._put(node, body)"),
        ("        node.blocks = 0\n        self._put(node, body)"),
    ),
    Bug(
        "copy-aside-none",
        "bytes are changed that a frozen version needs",
        "filesystem/content/copy_aside.py",
        "            if frozen <= start:",
        "            if True or frozen <= start:",
    ),
    Bug(
        "copy-aside-short",
        "a copy aside lacks its last byte",
        "filesystem/content/copy_aside.py",
        "            self._versions.move(body.tier, target)",
        (
            "            os.truncate(self._tier.open(target), max(0, size - 1)) if size else None\n"
            "            self._versions.move(body.tier, target)"
        ),
    ),
    Bug(
        "retry-rename-twice",
        "a rename whose answer was lost is done again, whatever lies there",
        "writeback/commits/placing.py",
        ("        if st is None or not self.is_version(version, target, st):\n            absence"),
        ("        if False:\n            absence"),
    ),
    Bug(
        "move-lost-is-done",
        "a move whose answer was lost is taken for one of what others removed",
        "writeback/commits/placing.py",
        "                if self._parts.look(target) is None:\n                    absence",
        "                if True:\n                    absence",
    ),
    Bug(
        "exchange-not-noted",
        "an exchange is done again where it was done",
        "writeback/commits/commit.py",
        "            is_done = (now_a is not None and now_a.ino == ino_b) or (\n"
        "                now_b is not None and now_b.ino == ino_a\n"
        "            )\n",
        "            is_done = False\n",
    ),
    Bug(
        "superseded-lost",
        "the last operation is left out with a window",
        "writeback/engine.py",
        "        self._ops.leave_out(window)\n",
        "        self._ops.leave_out([*window, *[o for o in list(self._ops)[-1:] if o not in "
        "window and not o.started]])\n",
    ),
    Bug(
        "elide-started",
        "an operation is left out that has begun",
        "writeback/log/log.py",
        "        if op.begun:\n            return None\n        ops = self._by_node",
        "        ops = self._by_node",
        unreached=(
            "what replaces it would have to be deleted before it is stored, after a rename that "
            "was done and failed and a staging file that went; test_log has it"
        ),
    ),
    Bug(
        "commit-not-recorded",
        "that a commit begins is not recorded before it does",
        "writeback/commits/commit.py",
        "            self._state.must_commit()\n            return True\n\n    def _again(",
        "            return True\n\n    def _again(",
    ),
    Bug(
        "must-without-what-joined",
        "whoever must have it recorded does not wait where something has joined",
        "ram/state.py",
        "        if not self.commit():\n            raise LateError(self.problem)\n",
        "        if not self._joined and not self.commit():\n"
        "            raise LateError(self.problem)\n",
        unreached=(
            "what has joined is recorded before another thread has a turn: in the lane 2 of 913 "
            "waits come before that, in plain, session and hang none of 2,268; "
            "`tests/filesystem/test_half_steps.py` has it"
        ),
    ),
    Bug(
        "begun-not-marked",
        "that a commit begins is not noted",
        "writeback/commits/commit.py",
        "            self._log.mark_begun(op)\n",
        "            pass\n",
    ),
    Bug(
        "tier-unlink-at-once",
        "a RAM file goes before the state that names it",
        "ram/tier.py",
        "        self._when_safe(partial(self.calls.when_back, tier_id, partial(self._unlink, "
        "tier_id)))",
        "        self._unlink(tier_id)",
    ),
    Bug(
        "half-published",
        "a file whose writer was killed is no half",
        "filesystem/closes.py",
        "        self._contents.interrupt(node)\n        if node.kernel_writers:",
        "        if node.kernel_writers:",
        profiles=("shared",),
    ),
    Bug(
        "fsync-not-waited",
        "a durable fsync does not wait",
        "filesystem/syncing.py",
        (
            "            await self._writable.persisted(handle.node)\n"
            "\n"
            "    async def fsync_directory"
        ),
        ("            pass\n\n    async def fsync_directory"),
        profiles=("durable",),
    ),
    Bug(
        "room-not-released",
        "room for a copy aside stays reserved",
        "filesystem/content/copy_aside.py",
        ("            finally:\n                self._tier.release(size, node.ino)"),
        ("            finally:\n                pass"),
        profiles=("plain", "short"),
    ),
    Bug(
        "bell-not-rung",
        "the end of a stream wakes nobody",
        "writeback/engine.py",
        ("            self._ended(job[0], error)\n        self.wake()"),
        "            self._ended(job[0], error)",
        profiles=("plain",),
    ),
    Bug(
        "reaped-twice",
        "a directory is dropped once for each name in it of a file that goes",
        "filesystem/lowerview.py",
        "            if following.ino in self._table:",
        "            if True:",
        profiles=("short",),
    ),
    Bug(
        "overflow-given-up",
        "the only bytes of an open file go with its name",
        "filesystem/content/contents.py",
        "            and node.handles > 0\n            and node.body.is_overflowed",
        "            and False\n            and node.body.is_overflowed",
        profiles=("short",),
    ),
    Bug(
        "older-attributes",
        "after a flush that failed, older attributes are given over newer ones",
        "writeback/commits/recheck.py",
        "                meta.merge(later.meta)\n        with suppress",
        "                pass\n        with suppress",
        profiles=("forgetting",),
    ),
    Bug(
        "version-by-number",
        "a file is taken for a staged version by its inode number",
        "writeback/commits/placing.py",
        "        return note is not None and note.digest == version.digest",
        "        return True",
        profiles=("narrow",),
    ),
    Bug(
        "clean-before-flush",
        "a file is said to be persisted as soon as it is copied",
        "filesystem/file_reports.py",
        '        if op is None:\n            return "clean"',
        "        if op is None or (op.version is not None and op.version.is_staged):\n"
        '            return "clean"',
        profiles=("plain", "session"),
    ),
    Bug(
        "wait-answers-early",
        "a wait ends when the next operation is persisted",
        "writeback/log/log.py",
        "        answer = self._judge(waiter := Waiter(seq, node))",
        "        first = min(seq, next(iter(self._ops), seq))\n"
        "        answer = self._judge(waiter := Waiter(first, node))",
        profiles=("plain", "session"),
    ),
    Bug(
        "waits-for-own-close",
        "room is awaited that comes only when somebody closes a file",
        "filesystem/content/outlook.py",
        "            return node.open_writers > 0 or node.body.interrupted\n",
        "            return False\n",
        profiles=("lane",),
    ),
    Bug(
        "open-counts-as-room",
        "the bytes of open files count as room that comes",
        "filesystem/content/outlook.py",
        "            and (node.handles == 0 or last.tentative)\n",
        "",
        profiles=("short",),
        equivalent=(
            "who waits is looked at again when half of what was counted is persisted "
            "(`Room.drained`), and goes another way then"
        ),
    ),
    Bug(
        "writers-wait-for-each-other",
        "a large file waits for its turn behind younger ones, too",
        "writeback/streams/scheduler.py",
        "if one.seq < writer.seq and one.is_heard(heard_since)",
        "if one is not writer and one.is_heard(heard_since)",
    ),
    Bug(
        "made-again-unflushed",
        "directories that are made again are not flushed above",
        "writeback/commits/commit.py",
        "        self._flush_above(outcome, again)\n",
        "",
    ),
    Bug(
        "looked-for-below-alone",
        "a file that comes to RAM while it is looked for below is not found",
        "filesystem/lower_reads.py",
        "    return error.errno == errno.ESTALE and not node.body.is_cold",
        "    return False",
        profiles=("plain", "session", "short"),
    ),
    *ACL_BUGS,
    *LANE_BUGS,
    *MEMBER_BUGS,
    *SHARED_BUGS,
    *MENDED_BUGS,
    *MIRROR_BUGS,
]
