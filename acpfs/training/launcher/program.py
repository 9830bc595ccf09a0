"""Puts a launcher together, and runs it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys

import trio

from acpfs.logger import FIELDS
from acpfs.training.first_update import Listener
from acpfs.training.launcher import caches, ranks
from acpfs.training.launcher.alone import Alone
from acpfs.training.launcher.node import Beginner, Conductor, Executed, Node
from acpfs.training.launcher.options import Options, parsed
from acpfs.training.launcher.rank_logs import RankLogs
from acpfs.training.launcher.spares import Forked
from acpfs.training.launcher.together import Together


def run(arguments: list[str]) -> int:
    """`acpfs-run ARGUMENTS`; the exit status.

    Raises:
        AcpfsError: a command line that makes no sense.
    """
    options = parsed(arguments)
    _log_to_stderr()
    ranks.become_subreaper()
    added: dict[str, str] = {}
    if options.cache is not None:
        added = caches.variables_for(options.cache, os.environ)
        caches.keep_in_ram(options.cache)
    logs = RankLogs(options.log_directory, options.run_id, options.streams)
    logs.begin()
    status = trio.run(_life, options, logs, added)
    if not status and options.log_directory is None:
        shutil.rmtree(logs.directory.parent, ignore_errors=True)
    return status


async def _life(options: Options, logs: RankLogs, added: dict[str, str]) -> int:
    conductor: Conductor = Alone()
    beginner: Beginner = Executed(options)
    async with trio.open_nursery() as nursery:
        if options.endpoint:
            together = Together(options)
            conductor = together
            nursery.start_soon(together.run)
        if options.imports:
            forked = Forked(options, added)
            beginner = forked
            await nursery.start(forked.run)
        with contextlib.closing(Listener()) as updates:
            status = await Node(options, conductor, beginner, logs, added, updates).run()
        nursery.cancel_scope.cancel()
    return status


def _log_to_stderr() -> None:
    """Lines of a launcher stand among those of its ranks."""

    class Line(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            fields: dict[str, object] = getattr(record, FIELDS, {})
            return " ".join(
                [
                    f"acpfs-run: {record.getMessage()}",
                    *(f"{name}={value}" for name, value in fields.items()),
                ]
            )

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Line())
    handler.setLevel(logging.WARNING)
    logging.getLogger("acpfs").addHandler(handler)
