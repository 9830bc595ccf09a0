"""The conductor of a job with several nodes: the meeting of its launchers, called again and again;
and who starts that.

What was said while nobody was there need not be said again: what a launcher registers with has all
of it. Where the node is gone on which launchers met, the next one has their meeting: START tells
all of them the nodes in one order, and the port is the same.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import trio

from acpfs.errors import RefusedError
from acpfs.logger import get_logger
from acpfs.training.boot import JOBS
from acpfs.training.coordinator.launchers import NODE_LOST, NODES_S
from acpfs.training.credentials import NAME as CREDENTIALS
from acpfs.training.credentials import Credentials
from acpfs.training.launcher import ranks
from acpfs.training.launcher.options import Options
from acpfs.training.messages import FromLauncher, Header, Launcher, Over, Sent, Start, ToLauncher
from acpfs.training.records import MalformedError, NewerError
from acpfs.training.wire import LinkClosedError, TrioLink, notice_silence

log = get_logger(__name__)
REDIAL_S = 0.2
REJOIN_S = 60.0
"""So long ranks go on while nobody conducts."""
FAREWELL_S = 10.0
CONNECT_S = 5.0
SUCCEED_S = 10.0
"""So long nobody has to conduct before the second node does; the third waits twice as long."""
PLACE = "meeting"
"""File in the job's directory that says where launchers meet now, for one that begins later."""
FILE_S = 5.0
Introduce = Callable[[str], Launcher]
"""What this launcher registers with, given how other nodes reach it."""


class Together:
    """One per launcher."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._host, _, port = options.endpoint.rpartition(":")
        self._port = int(port)
        save = options.save_directory
        self._job_directory = (
            None if save is None else save / JOBS / f"run-{options.run_id}".replace("/", "_")
        )
        self._hear: trio.MemorySendChannel[ToLauncher]
        self._heard: trio.MemoryReceiveChannel[ToLauncher]
        self._hear, self._heard = trio.open_memory_channel(1000)
        self._outbox: trio.MemorySendChannel[FromLauncher] | None = None
        """To the connection that there is."""
        self._begin: trio.MemorySendChannel[Introduce]
        self._begun: trio.MemoryReceiveChannel[Introduce]
        self._begin, self._begun = trio.open_memory_channel(1)
        self._start: Start | None = None
        self._told_place = ""
        self._conducts = False
        self._nursery: trio.Nursery

    def begin(self, introduce: Introduce) -> None:
        self._begin.send_nowait(introduce)

    def tell(self, message: FromLauncher) -> None:
        if self._outbox is not None:
            self._outbox.send_nowait(message)

    async def next(self) -> ToLauncher:
        return await self._heard.receive()

    async def run(self) -> None:
        """Until it is cancelled."""
        introduce = await self._begun.receive()
        self._told_place = await self._read_place()
        async with trio.open_nursery() as self._nursery:
            if self._hosts() and not await self._is_conducted():
                self._conduct(self._host if _is_here(self._host) else "", 0)
            self._nursery.start_soon(self._keep_calling, introduce)

    # -- the meeting's process

    def _hosts(self) -> bool:
        """Whether this node is the one where launchers meet."""
        return (
            self._options.node_rank == 0
            if self._options.node_rank is not None
            else _is_here(self._host)
        )

    def _conduct(self, host: str, number: int) -> None:
        self._conducts = True
        self._nursery.start_soon(self._keep_meeting, host, number)

    async def _keep_meeting(self, host: str, number: int) -> None:
        """Have it run, whoever kills it.

        Where two launchers of one host try, one of them has the port.
        """
        words = [
            sys.executable,
            "-m",
            "acpfs.training.coordinator.meeting",
            "--job",
            self._options.run_id,
        ]
        words += ["--listen", f"{host}:{self._port}", "--number", str(number)]
        if self._job_directory is not None:
            words += [
                "--credentials",
                str(self._job_directory),
                "--save-dir",
                str(self._options.save_directory),
            ]
        while True:
            started = subprocess.Popen(  # noqa: ASYNC220  # some milliseconds
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if self._options.node_rank == 0 else subprocess.DEVNULL,
                start_new_session=True,
                # the launcher has one thread
                preexec_fn=ranks.dying_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509
            )
            descriptor = os.pidfd_open(started.pid)
            started.returncode = 0  # it is waited for with all others
            try:
                await trio.lowlevel.wait_readable(descriptor)
            except trio.Cancelled:  # it ends by itself when all launchers have heard
                with trio.move_on_after(FAREWELL_S, shield=True):
                    await trio.lowlevel.wait_readable(descriptor)
                ranks.signal_rank(started.pid, signal.SIGKILL)
                raise
            finally:
                os.close(descriptor)
            await trio.sleep(REDIAL_S)

    async def _conduct_if_next(self, alone_s: float) -> None:
        """The node is gone on which launchers met: the others know whose turn it is."""
        start = self._start
        if self._conducts or start is None or not 0 < start.group_rank <= alone_s / SUCCEED_S:
            return
        host = start.hosts[start.group_rank]
        log.warning("launchers meet here from now on", host=host, port=self._port)
        self._conduct(host, start.group_rank)
        await self._write_place(f"{host}:{self._port}")

    async def _is_conducted(self) -> bool:
        """Whether the job has met somewhere else since this node was lost: then it is no place to
        meet.
        """
        if not self._told_place:
            return False
        host, _, port = self._told_place.rpartition(":")
        with trio.move_on_after(CONNECT_S):
            while True:
                with contextlib.suppress(OSError, ValueError):
                    await (await trio.open_tcp_stream(host.strip("[]"), int(port))).aclose()
                    return True
                await trio.sleep(REDIAL_S)
        return False

    async def _read_place(self) -> str:
        return await self._with_file(lambda file: file.read_text(encoding="utf-8").strip()) or ""

    async def _write_place(self, place: str) -> None:
        def write(file: Path) -> str:
            made = file.with_name(f".{PLACE}.{os.getpid()}")
            made.write_text(place, encoding="utf-8")
            made.rename(file)
            return place

        await self._with_file(write)

    async def _with_file(self, what: Callable[[Path], str]) -> str | None:
        """In a thread: the mount may not answer, and ranks go on all the same."""
        if self._job_directory is None:
            return None
        with trio.move_on_after(FILE_S):
            try:
                return await trio.to_thread.run_sync(
                    what, self._job_directory / PLACE, abandon_on_cancel=True
                )
            except OSError as error:
                log.info("no place is told", error=str(error))
        return None

    # -- calling it

    def _places(self) -> list[str]:
        """Where the meeting may be, the likeliest first."""
        later = (
            [f"{host}:{self._port}" for host in self._start.hosts[1:]]
            if self._start is not None
            else []
        )
        return list(
            dict.fromkeys([*filter(None, [self._told_place]), f"{self._host}:{self._port}", *later])
        )

    async def _keep_calling(self, introduce: Introduce) -> None:
        alone_since = trio.current_time()
        patience = NODES_S
        while trio.current_time() < alone_since + patience:
            for place in self._places():
                if await self._called(place, introduce):
                    alone_since = trio.current_time()
                    patience = REJOIN_S
                    break
            await self._conduct_if_next(trio.current_time() - alone_since)
            await trio.sleep(REDIAL_S)
        await self._hear.send(
            Over(NODE_LOST, f"nobody conducts at {' or '.join(self._places())} for {patience:g} s")
        )

    async def _called(self, place: str, introduce: Introduce) -> bool:
        """Whether somebody was there; returns when that is over."""
        host, _, port = place.rpartition(":")
        link: TrioLink | None = None
        try:
            with trio.fail_after(CONNECT_S):
                stream = await trio.open_tcp_stream(host.strip("[]"), int(port))
                own_host = str(stream.socket.getsockname()[0])
                notice_silence(stream.socket)
                link = TrioLink(await self._secured(stream))
            await self._talk(link, introduce(own_host))
        except (
            OSError,
            ValueError,
            RefusedError,
            trio.BrokenResourceError,
            trio.TooSlowError,
        ) as error:
            log.info("nobody conducts", place=place, error=str(error))
        if link is None:
            return False
        await link.close()
        return True

    async def _talk(self, link: TrioLink, introduction: Launcher) -> None:
        """Until the connection ends."""
        self._outbox, waiting = trio.open_memory_channel[FromLauncher](math.inf)
        try:
            await link.send(self._sent(introduction))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_all, link, waiting)
                try:
                    while isinstance(message := (await link.receive()).message, ToLauncher):
                        self._start = message if isinstance(message, Start) else self._start
                        await self._hear.send(message)
                except NewerError as error:  # it stays so, however often this one calls
                    await self._hear.send(Over(NODE_LOST, str(error)))
                except (LinkClosedError, MalformedError) as error:
                    log.warning("the meeting of launchers is gone", error=str(error))
                nursery.cancel_scope.cancel()
        finally:
            self._outbox = None
            await (
                link.close()
            )  # the meeting ends when nobody is connected any more, and its host waits for it

    async def _send_all(
        self, link: TrioLink, waiting: trio.MemoryReceiveChannel[FromLauncher]
    ) -> None:
        with contextlib.suppress(LinkClosedError):  # who receives is told as well
            async for message in waiting:
                await link.send(self._sent(message))

    def _sent(self, message: FromLauncher) -> Sent:
        return Sent(Header(self._options.run_id, 0, 0, "launcher"), message)

    async def _secured(self, stream: trio.SocketStream) -> trio.abc.Stream:
        """TLS over it, where there is a directory for the certificate."""
        if self._job_directory is None:
            return stream
        found = Credentials(self._job_directory / CREDENTIALS)
        if not (found.directory / "certificate.pem").exists():
            raise RefusedError(f"{found.directory} is not there yet")
        secured = trio.SSLStream(stream, found.calling, https_compatible=True)
        await secured.do_handshake()
        if not found.vouch_for(secured.getpeercert(True)):
            raise RefusedError("another certificate than the job's")
        return secured


def _is_here(host: str) -> bool:
    """Whether one can listen there."""
    with contextlib.suppress(OSError):
        for family, kind, number, _, address in socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_STREAM
        ):
            with socket.socket(family, kind, number) as probe:
                probe.bind(address)
                return True
    return False
