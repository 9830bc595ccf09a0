"""A process that serves the native transport over the real file system (`doubles.file_system`):
python -m tests.transport.server ARGUMENTS.

Prints one line of JSON, what was negotiated, when the mount can be used. Ends when it is unmounted.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import shutil
import sys
import threading
from collections import Counter
from pathlib import Path

import trio

from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.steps import settled
from acpfs.transport.native import continuations
from acpfs.transport.native.device import clones
from acpfs.transport.native.dispatch import Dispatch
from acpfs.transport.native.mount import MountOptions, mount
from acpfs.transport.native.negotiate import Negotiated
from acpfs.transport.native.protocol import IN_HEADER
from acpfs.transport.native.reader import reader_count
from acpfs.transport.native.request import RequestBuffers
from acpfs.transport.native.serve import CLOSE_TIMEOUT_S
from acpfs.transport.native.session import Session
from tests.transport.doubles import file_system

SESSION = "the session"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backing", type=Path)
    parser.add_argument("tier", type=Path)
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("--mask", type=lambda text: int(text, 0), default=(1 << 64) - 1)
    parser.add_argument("--readers", type=int, default=0)
    parser.add_argument(
        "--fd", type=int, default=-1, help="descriptor that was given to mount already"
    )
    parser.add_argument(
        "--negotiated",
        type=json.loads,
        help="take the session over: the line that the first server printed",
    )
    parser.add_argument(
        "--hang", default="", help="asking the backing directory about this name hangs for ever"
    )
    parser.add_argument(
        "--unseen-patience", type=float, help="instead of `continuations.UNSEEN_PATIENCE_S`"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--count",
        action="store_true",
        help="at the end, say on stderr how many requests of each opcode there were",
    )
    arguments = parser.parse_args()
    if arguments.unseen_patience is not None:
        continuations.UNSEEN_PATIENCE_S = arguments.unseen_patience
    counted: Counter[int] = Counter()
    if arguments.count:
        count_requests(counted)
    if not arguments.negotiated:
        shutil.rmtree(arguments.tier / "kept", ignore_errors=True)
    parts = file_system(
        arguments.backing,
        arguments.tier,
        arguments.mountpoint,
        hanging_name=arguments.hang.encode(),
        session=SESSION,
    )
    fs = FileSystem(parts)
    if arguments.profile:
        profile_threads()
    fd = (
        arguments.fd
        if arguments.fd >= 0
        else mount(arguments.mountpoint, MountOptions("acpfs-test"))
    )
    fds = [fd] if arguments.fd >= 0 else clones(fd, arguments.readers or reader_count())
    if arguments.negotiated:
        session = Session.take_over(
            fs,
            parts.kept,
            [fd],
            Negotiated.from_record(arguments.negotiated),
            readers=arguments.readers,
        )
    else:
        session = Session.begin(
            fs, parts.kept, fds, feature_mask=arguments.mask, readers=arguments.readers
        )
    session.start()
    print(json.dumps(session.negotiated.to_record()), flush=True)
    trio.run(settled, session.ended)
    session.close(CLOSE_TIMEOUT_S)
    for opcode, count in sorted(counted.items()):
        print(f"opcode {opcode} came {count} times", file=sys.stderr)


def count_requests(counted: Counter[int]) -> None:
    """Count every request by its opcode from now on."""
    handle = Dispatch.handle

    def counting(self: Dispatch, fd: int, buffers: RequestBuffers, length: int) -> bool:
        counted[IN_HEADER.unpack_from(buffers.header)[1]] += 1
        return handle(self, fd, buffers, length)

    Dispatch.handle = counting  # type: ignore[method-assign]


def profile_threads() -> None:
    """Profile every thread that is started from now on, print when it ends."""
    run = threading.Thread.run

    def profiled(self: threading.Thread) -> None:
        profile = cProfile.Profile()
        profile.runcall(run, self)
        if self.name.startswith("fuse-"):
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)

    threading.Thread.run = profiled  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
