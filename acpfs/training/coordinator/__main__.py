"""`python -m acpfs.training.coordinator`: started by the first member of a node, or by a launcher,
in a session of its own.

Its first line on stdout is JSON: number, address, pid, and where `status` asks. Ends by itself when
the job does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import sys
from dataclasses import replace
from pathlib import Path

import trio

from acpfs.control import registry
from acpfs.control.registry import MountRecord
from acpfs.errors import AcpfsError
from acpfs.training.coordinator.faults_log import behind, log_to
from acpfs.training.coordinator.limits import Limits
from acpfs.training.coordinator.server import Coordinator, Settings
from acpfs.training.coordinator.successors import Successors
from acpfs.training.coordinator.watchdog import Patience

JOBS = ".acpfs-job"
"""In the save directory."""
CLAIMS = ".acpfs-job-claims"
"""At the top of the backing directory."""
FILES_S = 10.0
"""So long the log's last lines have to be written, at the end."""


def settings_from(arguments: list[str]) -> Settings:
    """The settings of a command line."""
    parser = argparse.ArgumentParser(prog="python -m acpfs.training.coordinator")
    parser.add_argument("directory", type=Path, help="the save directory")
    parser.add_argument(
        "--job",
        required=True,
        help="name of this run of the job; the same for all of its processes",
    )
    parser.add_argument("--number", type=int, default=0, help="0 to 2")
    parser.add_argument("--node", default=socket.gethostname())
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument(
        "--advertise",
        default="",
        metavar="HOST",
        help="what others call; default: the host of --listen",
    )
    parser.add_argument(
        "--peer", action="append", default=[], metavar="N=HOST:PORT", help="another coordinator"
    )
    parser.add_argument(
        "--first",
        action="store_true",
        help="commands in the first term; one coordinator, when the job begins",
    )
    parser.add_argument(
        "--watch", action="store_true", help="never commands; tells of its node's ranks"
    )
    parser.add_argument("--tls", choices=("on", "off"), default="on")
    parser.add_argument(
        "--witness",
        metavar="DIR|off",
        help="where a side of a split job claims it; default: in the storage below the mount",
    )
    parser.add_argument(
        "--on-stall", choices=("report", "fault"), default="report", help="what ranks are that hang"
    )
    parser.add_argument(
        "--stall-after",
        type=float,
        default=Patience().at_least_s,
        metavar="SECONDS",
        help="at least; or ten steps",
    )
    parser.add_argument(
        "--replace", action="store_true", help="ranks are replaced, and the job goes on (resilient)"
    )
    parser.add_argument(
        "--coordinators",
        type=int,
        default=0,
        help="so many the job is to have; whoever commands starts those that are missing",
    )
    parser.add_argument("--settle-down", type=float, metavar="SECONDS")
    given = parser.parse_args(arguments)
    if not given.job or given.job.startswith(".") or "/" in given.job:
        parser.error("--job must be a file name")
    host, _, port = given.listen.rpartition(":")
    limits = (
        Limits()
        if given.settle_down is None
        else replace(Limits(), settle_down_s=given.settle_down)
    )
    peers = {
        int(number): address for number, _, address in (peer.partition("=") for peer in given.peer)
    }
    directory = given.directory / JOBS / given.job
    return Settings(
        *(
            given.job,
            given.number,
            directory,
            given.node,
            host.strip("[]"),
            int(port),
            given.advertise,
            peers,
        ),
        first=given.first,
        stands=not given.watch,
        tls=given.tls == "on",
        witness=None
        if given.witness == "off"
        else Path(given.witness)
        if given.witness
        else witness_for(directory, given.job),
        stall_is_fault=given.on_stall == "fault",
        replaces=given.replace,
        patience=Patience(at_least_s=given.stall_after),
        limits=limits,
        coordinators=given.coordinators,
    )


def successor_words(arguments: list[str]) -> tuple[str, ...]:
    """How another coordinator of the job is started: as this one was, but that it stands by, and
    listens at a port of its own.
    """
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--first":
            continue
        if name in ("--number", "--peer", "--listen"):
            value = value if equals else next(words)
            kept += [f"--listen={value.rpartition(':')[0]}:0"] if name == "--listen" else []
        else:
            kept.append(word)
    return tuple(kept)


def witness_for(directory: Path, job: str, mounts: list[MountRecord] | None = None) -> Path:
    """Where claims are made: the storage below the mount, whose own answer would be this node's;
    without a mount the job's directory.

    Not the job's directory in the storage: the mount brings that there itself, and would find it
    made by somebody else.
    """
    try:
        record, _below = registry.locate(os.fspath(directory), mounts)
    except AcpfsError:
        return directory
    return Path(record.backing) / CLAIMS / job


async def serve(settings: Settings, successors: Successors | None = None) -> None:
    """The coordinator, and whoever asks for its status."""
    coordinator = Coordinator(settings, successors)
    ready, address = trio.open_memory_channel[str](1)
    # abstract: nothing is left behind by kill -9
    name = f"acpfs-coordinator-{os.getpid()}-{os.urandom(4).hex()}"
    listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await listening.bind(
        f"\0{name}"
    )  # before anybody is told of it: trio binds in a thread, which may take its time
    listening.listen(8)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_answer_status, coordinator, listening)
        nursery.start_soon(_announce, settings, name, address)
        nursery.start_soon(_take_sigterm, coordinator)
        await coordinator.run(ready)
        nursery.cancel_scope.cancel()


async def _take_sigterm(coordinator: Coordinator) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            coordinator.dismiss()


async def _announce(
    settings: Settings, name: str, addresses: trio.MemoryReceiveChannel[str]
) -> None:
    line = json.dumps(
        {
            "number": settings.number,
            "address": await addresses.receive(),
            "pid": os.getpid(),
            "node": settings.node,
            "status": name,
        }
    )
    made = settings.directory / f".coordinator-{settings.number}.{os.getpid()}"
    made.write_text(line + "\n", encoding="utf-8")
    made.rename(settings.directory / f"coordinator-{settings.number}")
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _answer_status(coordinator: Coordinator, listening: trio.socket.SocketType) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        try:
            _, uid, _ = struct.unpack(
                "3i",
                stream.socket.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
                ),
            )
            with trio.move_on_after(5 if uid in (0, os.geteuid()) else 0):
                await stream.send_all(json.dumps(coordinator.status()).encode() + b"\n")
        except trio.BrokenResourceError:
            pass  # who asked has gone
        await stream.aclose()

    await trio.serve_listeners(answer, [trio.SocketListener(listening)])


def main(arguments: list[str]) -> int:
    """Entry point."""
    settings = settings_from(arguments)
    settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_to(settings.directory / "logs" / f"coordinator-{settings.number}.log")
    try:
        trio.run(serve, settings, Successors(successor_words(arguments), settings.coordinators))
    except AcpfsError as error:
        sys.stderr.write(f"acpfs coordinator: {error}\n")
        return int(error.exit_code)
    finally:
        if not behind.wait(FILES_S):
            os._exit(
                0
            )  # a mount that does not answer: nothing would end the thread that waits for it
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
