"""The keeper: a process outside the life of a mount's own, which holds what the next supervisor
needs when all of them are killed.

Owns copies of the descriptors and facts of each mount of one runtime directory, as a service
manager's store does. It never reads from a session, never touches a mount, and does not know what a
name means but the session's and those of workers. Whoever has a mount tells it (`keeper_client`);
when the last process that could serve it has ended, the next supervisor that asks is given it.
Where none comes in time, the mount ends: with an error for what is open in it and, unless
`on_failure` says stop, uncovering the backing directory.

    python -m acpfs.supervisor.keeper RUNTIME_DIRECTORY

Standard library only, one thread, nothing that waits for anybody but the kernel: small, so that it
need not be updated with the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from acpfs.descriptors import readable
from acpfs.errors import ExitCode
from acpfs.supervisor import channel
from acpfs.supervisor.held_session import HeldSession, Phase
from acpfs.supervisor.keeper_client import SOCKET
from acpfs.supervisor.local_sockets import listening, uid_of
from acpfs.supervisor.stuck_processes import has_ended

LOOK_S = 1.0
"""Between two looks at what waits for a supervisor."""
IDLE_LOOK_S = 10.0
"""The same while all are served: what is stuck may keep a connection open."""
CUT_OFF_LOOK_S = 0.05
"""The same while a connection has ended, and its processes not yet."""
OTHERS_MAX = 64
"""Connections that have no mount: they ask something and go.

With more, the oldest is ended: descriptors are for mounts.
"""
UNHEARD_MAX = 1000
"""More messages than a connection has room for."""
END_WAIT_S = 30.0
"""For uncovering the backing directory, which may not answer; then the mount ends without."""
BUG_WAIT_S = 0.2
OUT_OF_MEMORY_SCORE = "-999"


class Keeper:
    """One per runtime directory; `run` until it is told to end."""

    def __init__(self, directory: Path) -> None:
        """Listen.

        Raises:
            BlockingIOError: there is one already.
            OSError: the socket cannot be made.
        """
        self._directory = directory
        self._lock = os.open(
            directory / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._door = listening(directory / SOCKET)
        self._poll = select.poll()
        self._peers: dict[int, socket.socket] = {}
        self._held: dict[str, HeldSession] = {}
        self._ending: dict[str, tuple[int, float]] = {}
        """Mount point → the process that uncovers what lies beneath, and when that must have
        ended.
        """
        self._stopping = False
        self._poll.register(self._door, select.POLLIN)

    def run(self) -> int:
        """Until SIGTERM; the exit code."""
        woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop())
        self._poll.register(woken, select.POLLIN)
        while not self._stopping:
            try:
                for fd, _events in self._poll.poll(self._pause_s() * 1000):
                    if fd == woken:
                        os.read(woken, 64)
                    elif fd == self._door.fileno():
                        self._accept()
                    else:
                        self._hear(fd)
                self._look_after(time.monotonic())
                self._listen_again()
            except Exception:  # noqa: BLE001 - whatever it is
                traceback.print_exc()  # a bug here must not cost the sessions
                time.sleep(BUG_WAIT_S)
        left = [held.mountpoint for held in self._held.values() if held.phase is Phase.ALONE]
        if left:
            _say(
                f"the keeper ends, and with it these mounts, which nobody serves: {', '.join(left)}"
            )
        return 0

    def _listen_again(self) -> None:
        """Where somebody has removed the socket: supervisors would never find this keeper."""
        if not (self._directory / SOCKET).is_socket():
            door = listening(self._directory / SOCKET)
            self._poll.unregister(self._door)
            self._door.close()
            self._door = door
            self._poll.register(self._door, select.POLLIN)

    def _pause_s(self) -> float:
        """Until the next look, where nobody says anything."""
        now = time.monotonic()
        if any(held.is_cut_off(now) for held in self._held.values()):
            return CUT_OFF_LOOK_S
        return LOOK_S if any(held.waits for held in self._held.values()) else IDLE_LOOK_S

    def _stop(self) -> None:
        self._stopping = True

    # -- who speaks

    def _accept(self) -> None:
        end, _address = self._door.accept()
        if uid_of(end) not in (os.geteuid(), 0):
            end.close()
            return
        self._peers[end.fileno()] = end
        self._poll.register(end, select.POLLIN)
        owners = {id(held.owner) for held in self._held.values()}
        others = [
            peer for peer in self._peers.values() if id(peer) not in owners
        ]  # the oldest first
        for peer in others[:-OTHERS_MAX]:
            self._forget(peer)

    def _hear(self, fd: int) -> None:
        end = self._peers.get(fd)
        if end is None or not readable(
            end, 0
        ):  # ended, or heard already, since it was looked for who speaks
            return
        fds: list[int] = []
        """What nobody keeps of the message; whoever keeps one takes it out, so that none is left
        open whatever goes wrong.
        """
        try:
            message, fds = channel.receive(end)
            if message is None:
                self._forget(end)
            else:
                self._do(end, message, fds)
        except (
            KeyError,
            TypeError,
            ValueError,
            OSError,
        ) as error:  # another version's, or no descriptor is left
            _say(
                "a message was not understood or could not be carried out: "
                f"{type(error).__name__}: {error}"
            )
            self._forget(end)
        finally:
            for unused in fds:
                os.close(unused)

    def _hear_out(self, held: HeldSession) -> None:
        """What its supervisor said before it ended counts: that a worker starts, or who that is."""
        for _ in range(UNHEARD_MAX):
            if held.owner is None or not readable(held.owner, 0):
                return
            self._hear(held.owner.fileno())

    def _forget(self, end: socket.socket) -> None:
        """Its end; it may have been the last that could serve."""
        self._poll.unregister(end)
        del self._peers[end.fileno()]
        end.close()
        for held in list(self._held.values()):
            if held.owner is end:
                held.cut_off(time.monotonic())
                self._tell_if_alone(held)

    def _do(self, end: socket.socket, message: channel.Message, fds: list[int]) -> None:
        """Carry out what is said; the descriptors that are kept leave `fds`."""
        if "list" in message:
            channel.send(
                end,
                {"held": [held.report(time.monotonic()) for held in self._held.values()]},
                wait=False,
            )
            return
        if "take" in message:
            self._take(end, message, fds)
            return
        if "hold" in message:
            held = self._held.get(message["hold"])
            if held is None:
                held = HeldSession(message["hold"])
                self._held[message["hold"]] = held
            held.begin(end, message, fds)
            return
        held = next((held for held in self._held.values() if held.owner is end), None)
        if held is None:
            return  # another one has told of this mount since
        if "forget" in message:
            self._drop(held)
            return
        held.told(message, fds)
        if "session" not in held.fds and held.whole:
            self._drop(held)  # the kernel ended it

    def _take(self, end: socket.socket, message: channel.Message, asker: list[int]) -> None:
        """`asker`: pidfd of the supervisor that asks."""
        if message["take"] in self._held:
            self._hear_out(self._held[message["take"]])
        held = self._held.get(message["take"])
        now = time.monotonic()
        if held is None or message["take"] in self._ending:
            channel.send(end, {"none": True}, wait=False)
            return
        held.look(now)
        if why := held.refusal(message):
            channel.send(end, {"refused": why, "phase": held.phase.value}, wait=False)
            return
        for name, fds in held.fds.items():
            channel.send(end, {"keep": [[name, len(fds)]]}, fds, wait=False)
        if not channel.send(end, {"given": held.state | {"died_at": held.alone_since}}, wait=False):
            return  # it has ended meanwhile
        held.give(end, asker)
        self._tell(held, f"given to a supervisor, after {now - held.alone_since:.1f} s without one")

    # -- what nobody serves

    def _look_after(self, now: float) -> None:
        for held in list(self._held.values()):
            if held.mountpoint in self._ending:
                self._look_at_end(held, now)
                continue
            if held.phase is not Phase.ALONE:
                self._hear_out(held)
                if self._held.get(held.mountpoint) is not held:
                    continue  # it was forgotten
                held.look(now)
                self._tell_if_alone(held)
            if held.is_given_up(now):
                self._tell(
                    held, "its supervisor lives and tells nothing any more: not held until it does"
                )
                self._drop(held)
            elif held.phase is Phase.ALONE and held.session_ended():
                self._tell(held, "unmounted")
                self._drop(held)
            elif held.is_late(now):
                self._end(held, now)

    def _end(self, held: HeldSession, now: float) -> None:
        """Nobody has come: a process of its own takes the mount away, since that may wait for the
        backing directory.
        """
        self._tell(held, f"no supervisor has come for {held.patience_s:g} s: {held.how_it_ends}")
        pid = os.fork()
        if pid == 0:
            try:
                held.take_away(self._directory)
            finally:
                os._exit(0)
        self._ending[held.mountpoint] = (os.pidfd_open(pid), now + END_WAIT_S)

    def _look_at_end(self, held: HeldSession, now: float) -> None:
        pidfd, until = self._ending[held.mountpoint]
        ended = has_ended(pidfd)
        if not ended and now < until:
            return
        if ended:
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        else:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        del self._ending[held.mountpoint]
        self._drop(held)

    def _drop(self, held: HeldSession) -> None:
        """Closing the last copies of a session's descriptors ends it."""
        held.drop()
        del self._held[held.mountpoint]

    def _tell_if_alone(self, held: HeldSession) -> None:
        if held.phase is Phase.ALONE:
            self._tell(held, "nobody serves it; the next supervisor that asks goes on with it")

    def _tell(self, held: HeldSession, what: str) -> None:
        _say(f"{held.mountpoint}: {what}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"acpfs keeper: {text}\n")
        sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """Entry of the process."""
    directory = Path(arguments[0])
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OUT_OF_MEMORY_SCORE)
    with contextlib.suppress(OSError, ValueError):
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (hard, hard)
        )  # each mount has some, and one for each deleted file that is open
    try:
        keeper = Keeper(directory)
    except BlockingIOError:
        _say(f"another keeper has {directory}")
        return int(ExitCode.REFUSED)
    except OSError as error:
        _say(f"cannot listen in {directory}: {error.strerror}")
        return int(ExitCode.ENVIRONMENT)
    _say(f"holds the mounts of {directory}")
    return keeper.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
