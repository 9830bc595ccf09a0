"""Serves the control socket: who may ask, how much, and what a broken or hostile client can do
(nothing).

One request per connection. Limits: REQUEST_BYTES_MAX, CLIENTS_MAX, WAITING_MAX, REQUEST_WAIT_S for
the request to arrive, SEND_WAIT_S for the client to take an answer. Runs in the worker's trio loop;
handlers never call the backing directory from it.
"""

from __future__ import annotations

import grp
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

import trio

from acpfs import __version__
from acpfs.control.request_slots import NoPlaceError, RequestSlots
from acpfs.control.socket_messages import (
    REQUEST_BYTES_MAX,
    BadRequestError,
    ControlRequest,
    Json,
    decode_request,
    encode,
    error_message,
    socket_address,
)
from acpfs.control.verb_table import VERBS
from acpfs.control.verbs import Answer
from acpfs.control.worker_contract import Report
from acpfs.errors import AcpfsError, ConfigError, ExitCode
from acpfs.logger import get_logger

CLIENTS_MAX = 64
"""Connections whose request is not read yet, or is answered at once."""
WAITING_MAX = 64
"""Requests beside those, whose verb may wait for something, perhaps for ever: they must not keep
`status` and `unmount` out.
"""
REQUEST_WAIT_S = 10.0
SEND_WAIT_S = 30.0
ALIVE_INTERVAL_S = 5.0
"""Whoever waits hears something at least so often (`client.SILENCE_S_MAX`)."""
LISTEN_BACKLOG = 64
_PEERCRED = struct.Struct("3i")
_SO_PEERGROUPS = 59
_GROUPS_BYTES_MAX = 1024
"""Most that Python's getsockopt takes: 256 groups; a peer with more must have the control group as
its primary one.
"""

log = get_logger("acpfs.control")


class Rights(IntEnum):
    """Of whoever asks; each has those of the ones before."""

    NONE = 0
    MEMBER = 1
    """Of the control group."""
    OWNER = 2
    """Of the mount."""
    ROOT = 3


class ControlServer:
    """Listens at `path` from construction on, answers once `run` runs."""

    def __init__(
        self,
        path: Path,
        answers: Mapping[str, Answer],
        group: str | None = None,
        *,
        kept_fd: int = -1,
    ) -> None:
        """Bind the socket: mode 0600, or 0660 for a group.

        `answers`: verb → what answers it. `kept_fd`: the socket was bound by an earlier worker, and
        clients wait in it.

        Raises:
            ConfigError: there is no such group.
            OSError: the socket cannot be made.
        """
        self.path = path
        self._answers = answers
        self._gid = None if group is None else _gid_of(group)
        self._socket = _listening(path, self._gid) if kept_fd < 0 else _taken_over(kept_fd)
        self._quick = RequestSlots(CLIENTS_MAX, "control connections")
        self._waiting = RequestSlots(WAITING_MAX, "control connections that wait")
        self._clients = 0
        self._again = trio.Event()
        """There is another socket to listen at."""
        self._all_gone = trio.Event()
        self.refused_clients = 0

    def fileno(self) -> int:
        """Of the listening socket."""
        return self._socket.fileno()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; requests under way get their answers cut off then."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                async with trio.open_nursery() as listening:
                    listening.start_soon(self._listen, nursery)
                    await self._again.wait()
                    self._again = trio.Event()
                    listening.cancel_scope.cancel()

    async def _listen(self, handlers: trio.Nursery) -> None:
        """Requests that came go on when another socket is listened at."""
        listener = trio.SocketListener(self._socket)
        await trio.serve_listeners(self._serve, [listener], handler_nursery=handlers)

    def listen_again(self) -> bool:
        """Make the socket anew where somebody has removed it, with its directory perhaps; whether
        that was so.

        Raises:
            OSError: it cannot be made now.
        """
        if self.path.is_socket():
            return False
        self.path.parent.mkdir(mode=0o755, exist_ok=True)
        self._socket = _listening(self.path, self._gid)
        self._again.set()
        return True

    async def last_answers(self, timeout_s: float) -> None:
        """Let the requests under way get their answers, before the server is cancelled."""
        with trio.move_on_after(timeout_s):
            while self._clients:
                self._all_gone = trio.Event()
                await self._all_gone.wait()

    @property
    def is_answering(self) -> bool:
        """Whether a request is under way that is answered at once; for any thread."""
        return self._quick.taken > 0

    def close(self) -> None:
        """Stop listening (for a server that never ran)."""
        self._socket.close()

    async def _serve(self, stream: trio.SocketStream) -> None:
        """One connection; whatever goes wrong with it ends here."""
        try:
            async with stream:
                await self._admit(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass  # the client went away: nobody is left to tell
        except Exception:
            log.exception("control connection failed")

    async def _admit(self, stream: trio.SocketStream) -> None:
        rights = self._rights(stream.socket)
        if rights is Rights.NONE:
            self.refused_clients += 1
            await _answer(
                stream,
                error_message(
                    AcpfsError(
                        "permission denied: for the mount's owner, root and the control group only"
                    )
                ),
            )
            return
        self._clients += 1
        try:
            await self._converse(stream, rights)
        except NoPlaceError as error:
            self.refused_clients += 1
            await _answer(stream, error_message(error))
        finally:
            self._clients -= 1
            if self._clients == 0:
                self._all_gone.set()

    async def _converse(self, stream: trio.SocketStream, rights: Rights) -> None:
        owner = rights >= Rights.OWNER
        root = rights is Rights.ROOT
        with ExitStack() as place:
            place.enter_context(self._quick.one(owner=owner, root=root))
            try:
                with trio.fail_after(REQUEST_WAIT_S):
                    request = decode_request(await _one_line(stream))
            except trio.TooSlowError:
                return
            except BadRequestError as error:
                await _answer(stream, error_message(error))
                return
            if request.verb in VERBS and VERBS[request.verb].lasting:
                place.close()
                place.enter_context(self._waiting.one(owner=owner, root=root))
            await self._answer_to(request, stream, owner=owner)

    async def _answer_to(
        self, request: ControlRequest, stream: trio.SocketStream, *, owner: bool
    ) -> None:
        if request.verb in VERBS and VERBS[request.verb].owner_only and not owner:
            self.refused_clients += 1
            await _answer(
                stream,
                error_message(
                    AcpfsError(
                        f"permission denied: {request.verb} is for the mount's owner and root only"
                    )
                ),
            )
            return
        async with trio.open_nursery() as nursery:
            client = _Client(stream, nursery.cancel_scope)
            nursery.start_soon(_cancel_at_hangup, stream, nursery.cancel_scope)
            if request.verb in VERBS and VERBS[request.verb].lasting:
                # any other one that says nothing for long has a fault, and its command ends by that
                nursery.start_soon(client.say_now_and_then)
            answer = await self._handle(replace(request, uid=_uid(stream.socket)), client.tell)
            await client.say(answer)
            nursery.cancel_scope.cancel()

    async def _handle(self, request: ControlRequest, tell: Report) -> Json:
        answer = self._answers.get(request.verb)
        try:
            if answer is None:
                raise BadRequestError(
                    f"no such verb: {request.verb[:100]!r} (acpfs {__version__} serves this mount)"
                )
            _check_arguments(request)
            return {"result": await answer(request, tell)}
        except AcpfsError as error:
            return error_message(error)
        except Exception as error:
            log.exception("control request failed", verb=request.verb)
            return {
                "error": {
                    "exit_code": int(ExitCode.FAILED),
                    "message": f"{request.verb} failed: {type(error).__name__}: {error}",
                }
            }

    def _rights(self, connection: trio.socket.SocketType) -> Rights:
        """As the kernel vouches for it."""
        _pid, uid, gid = _credentials(connection)
        if uid == 0:
            return Rights.ROOT
        if uid == os.getuid():
            return Rights.OWNER
        member = self._gid is not None and (
            gid == self._gid or self._gid in _peer_groups(connection)
        )
        return Rights.MEMBER if member else Rights.NONE


class _Client:
    """Who has asked, and waits."""

    def __init__(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        """`scope`: of the request, which ends when nobody waits for it any more."""
        self._stream = stream
        self._scope = scope
        self._one_at_a_time = trio.Lock()
        self._said_at = trio.current_time()

    async def say(self, message: Json) -> None:
        """Send it whole, before anything else is sent.

        Raises:
            trio.BrokenResourceError: nobody takes it.
        """
        async with self._one_at_a_time:
            await _answer(self._stream, message)
            self._said_at = trio.current_time()

    async def tell(self, event: Json) -> None:
        """`say`; where nobody takes it, the request ends."""
        try:
            await self.say(event)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # not raised: it would travel through the handler's nurseries as a group
            self._scope.cancel()

    async def say_now_and_then(self) -> None:
        """Whatever the request waits for, such as a backing directory that hangs: a client takes
        long silence for a fault.
        """
        while True:
            quiet_s = trio.current_time() - self._said_at
            if quiet_s >= ALIVE_INTERVAL_S:
                await self.tell({"event": "alive"})
            else:
                await trio.sleep(ALIVE_INTERVAL_S - quiet_s)


def _check_arguments(request: ControlRequest) -> None:
    """What a newer command asks for beside what this daemon knows is not left out silently: with
    less than was asked for, more could be given up.

    Raises:
        BadRequestError: there is such a thing; nothing was done.
    """
    takes = VERBS[request.verb].takes if request.verb in VERBS else request.args
    for name, value in request.args.items():
        if name not in takes and value is not None and value is not False:
            raise BadRequestError(
                f"{request.verb} has no {name[:100]!r} in acpfs {__version__}, which serves this "
                "mount: reload it with the newer acpfs"
            )


def _credentials(connection: trio.socket.SocketType) -> tuple[int, int, int]:
    pid, uid, gid = _PEERCRED.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    )
    return pid, uid, gid


def _uid(connection: trio.socket.SocketType) -> int:
    return _credentials(connection)[1]


def _peer_groups(connection: trio.socket.SocketType) -> tuple[int, ...]:
    """Supplementary groups of the peer: from the kernel, because a name service could hang."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
    except OSError:
        return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)


def _gid_of(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"control_group = {group!r}: no such group") from None


def _listening(path: Path, gid: int | None) -> trio.socket.SocketType:
    """A listening socket at `path`.

    What lies there is a dead daemon's: the identity lock is ours by now.
    """
    with suppress(FileNotFoundError):
        path.unlink()
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory_fd = None
    try:
        address, directory_fd = socket_address(path)
        umask = os.umask(0o177)
        try:
            raw.bind(address)
        finally:
            os.umask(umask)
        if gid is not None:
            os.chown(path, -1, gid)
            path.chmod(0o660)
        raw.listen(LISTEN_BACKLOG)
        raw.setblocking(False)
        return trio.socket.from_stdlib_socket(raw)
    except BaseException:
        raw.close()
        raise
    finally:
        if directory_fd is not None:
            os.close(directory_fd)


def _taken_over(kept_fd: int) -> trio.socket.SocketType:
    """The socket of an earlier worker.

    To listen once more names this process as the one that clients talk to (SO_PEERCRED): by that
    they notice its death, also where a call of its keeps their connections open.
    """
    taken = trio.socket.from_stdlib_socket(socket.socket(fileno=os.dup(kept_fd)))
    taken.listen(LISTEN_BACKLOG)
    return taken


async def _one_line(stream: trio.SocketStream) -> bytes:
    received = bytearray()
    while b"\n" not in received:
        if len(received) > REQUEST_BYTES_MAX:
            raise BadRequestError(f"a request has at most {REQUEST_BYTES_MAX} bytes")
        chunk = await stream.receive_some(65536)
        if not chunk:
            raise BadRequestError("the request ended before its line did")
        received += chunk
    return bytes(received.partition(b"\n")[0])


async def _answer(stream: trio.SocketStream, message: Json) -> None:
    with trio.move_on_after(SEND_WAIT_S) as scope:
        await stream.send_all(encode(message))
    if scope.cancelled_caught:
        raise trio.BrokenResourceError("the client does not take its answer")


async def _cancel_at_hangup(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    """A client that goes away (or says more than one request) ends its request."""
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while await stream.receive_some(4096):
            pass  # whatever follows the request is of no interest
    scope.cancel()
