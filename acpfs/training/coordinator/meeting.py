"""Where launchers of several nodes meet: `python -m acpfs.training.coordinator.meeting`, a process
of its own on the node that is named.

Its first line on stdout is its address. It keeps nothing that launchers do not know: killed, it is
started anew, and they come again. It ends when the job is over and all have heard so, or with the
launcher that started it.
"""

from __future__ import annotations

import argparse
import os
import ssl
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from acpfs.logger import get_logger
from acpfs.training.coordinator.__main__ import JOBS, witness_for
from acpfs.training.coordinator.connections import FIRST_WORD_S, Connection
from acpfs.training.coordinator.launchers import NODE_LOST, Launchers, Post, State
from acpfs.training.coordinator.witness import Claimant, claim
from acpfs.training.credentials import HANDSHAKE_S, Credentials, make_credentials
from acpfs.training.messages import Exited, Header, Idle, Launcher, Over, Planned, Sent
from acpfs.training.records import MalformedError, NewerError
from acpfs.training.wire import LinkClosedError, TrioLink, frame, notice_silence

_log = get_logger(__name__)
FAREWELL_S = 10.0
CLAIM_S = 5.0


class Meeting:
    """Connections around `Launchers`."""

    def __init__(
        self,
        job: str,
        credentials: Credentials | None,
        number: int = 0,
        witness: Callable[[str], Path] | None = None,
    ) -> None:
        """`job`: the run's name; who names another one is sent away. `number`: of the node.

        `witness`: where an attempt is claimed.
        """
        self._job = job
        self._credentials = credentials
        self._number = number
        self._witness = witness
        self._launchers = Launchers(succeeds=number > 0, has_witness=witness is not None)
        self._connections: dict[str, Connection] = {}
        self._changed = trio.Event()

    async def serve(self, stream: trio.SocketStream) -> None:
        """Somebody connected."""
        try:
            notice_silence(stream.socket)
            connection = Connection(TrioLink(await self._secured(stream)))
        except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
            _log.warning("refused", error=str(error.__cause__ or error))
            await trio.aclose_forcefully(stream)
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.send_all)
            try:
                with trio.fail_after(FIRST_WORD_S):
                    first = await connection.receive()
                if first.header.job == self._job and isinstance(first.message, Launcher):
                    await self._hear(connection, first.message)
            except NewerError as error:
                _log.warning("refused", error=str(error))
                over = Over(NODE_LOST, str(error))  # it would call again and again
                connection.post(frame(Sent(Header(self._job, 0, 0, "meeting"), over)))
            except (LinkClosedError, MalformedError, trio.TooSlowError) as error:
                _log.info("a connection ended", error=str(error))
            connection.cut()

    async def run(self) -> None:
        """Time-outs, and the end."""
        while True:
            with trio.move_on_at(self._launchers.wake_at):
                await self._changed.wait()
            self._changed = trio.Event()
            if trio.current_time() >= self._launchers.wake_at:
                self._post(self._launchers.tick(trio.current_time()))
            if self._launchers.wants_claim:
                self._post(self._launchers.claimed(await self._claimed(), trio.current_time()))
            if self._launchers.state is State.ENDED:
                with trio.move_on_after(FAREWELL_S):
                    while self._connections:
                        await self._changed.wait()
                        self._changed = trio.Event()
                return

    async def _claimed(self) -> bool:
        """Whether this half of the nodes goes on: the storage is asked, which both can see.

        Where it does not answer, neither does.
        """
        assert self._witness is not None
        claimant = Claimant(self._number, 1, majority=False)
        with trio.move_on_after(CLAIM_S):
            try:
                place = await trio.to_thread.run_sync(
                    self._witness, self._launchers.attempt_name, abandon_on_cancel=True
                )
                return await trio.to_thread.run_sync(
                    claim, place, 0, claimant, abandon_on_cancel=True
                )
            except OSError as error:
                _log.error("the witness fails", error=str(error))
        return False

    async def _hear(self, connection: Connection, launcher: Launcher) -> None:
        name = launcher.name
        self._connections[name] = connection
        try:
            self._post(self._launchers.registered(launcher, trio.current_time()))
            while True:
                message = (await connection.receive()).message
                now = trio.current_time()
                if isinstance(message, Exited):
                    self._post(
                        self._launchers.exited(
                            name, message.rank, message.status, now, updated=message.updated
                        )
                    )
                elif isinstance(message, Idle):
                    self._post(self._launchers.idle(name, message.port, now))
                elif isinstance(message, Planned):
                    self._post(self._launchers.planned(name, now))
        finally:
            if self._connections.get(name) is connection:
                del self._connections[name]
                self._post(self._launchers.away(name, trio.current_time()))

    def _post(self, posts: list[Post]) -> None:
        for post in posts:
            if post.to in self._connections:
                sent = Sent(Header(self._job, 0, 0, "meeting"), post.message)
                self._connections[post.to].post(frame(sent))
        self._changed.set()

    async def _secured(self, stream: trio.SocketStream) -> trio.abc.Stream:
        """TLS over it, where the job has a certificate."""
        if self._credentials is None:
            return stream
        secured = trio.SSLStream(
            stream, self._credentials.listening, server_side=True, https_compatible=True
        )
        with trio.fail_after(HANDSHAKE_S):
            await secured.do_handshake()
        if not self._credentials.vouch_for(secured.getpeercert(True)):
            raise ssl.SSLError("another certificate than the job's")
        return secured


async def _life(meeting: Meeting, host: str, port: int) -> None:
    listeners = await trio.open_tcp_listeners(port, host=host or None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.serve_listeners, meeting.serve, listeners))
        sys.stdout.write(f"{host}:{listeners[0].socket.getsockname()[1]}\n")
        sys.stdout.flush()
        await meeting.run()
        nursery.cancel_scope.cancel()


def _claims(save_directory: Path, attempt: str) -> Path:
    return witness_for(save_directory / JOBS / attempt, attempt)


def main(arguments: list[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m acpfs.training.coordinator.meeting")
    parser.add_argument("--job", required=True)
    parser.add_argument("--listen", required=True, metavar="[HOST]:PORT")
    parser.add_argument(
        "--number",
        type=int,
        default=0,
        help="of this node; not 0: launchers met somewhere else before",
    )
    parser.add_argument(
        "--save-dir",
        type=Path,
        help="the storage below it says which of two halves of a job goes on",
    )
    parser.add_argument(
        "--credentials", type=Path, metavar="JOB_DIRECTORY", help="without it there is no TLS"
    )
    given = parser.parse_args(arguments)
    host, _, port = given.listen.rpartition(":")
    credentials = None if given.credentials is None else make_credentials(given.credentials)
    try:
        witness = None if given.save_dir is None else partial(_claims, given.save_dir)
        trio.run(
            _life,
            Meeting(given.job, credentials, given.number, witness),
            host.strip("[]"),
            int(port),
        )
    except OSError as error:
        sys.stderr.write(
            f"acpfs-run: launchers cannot meet at {given.listen}: {os.strerror(error.errno or 0)}\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
