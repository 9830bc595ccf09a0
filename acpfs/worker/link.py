"""The worker's end of the channel to its supervisor: orders at the start, signs of life,
descriptors to keep, and the order to leave.

A thread of its own listens, so that the worker can be told to leave also when its event loop stands
still. When the supervisor is gone, the worker serves on and starts another one, which adopts it;
under a service manager it leaves that to the service manager.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from acpfs.logger import get_logger
from acpfs.runtime.given import Runtime
from acpfs.supervisor import channel
from acpfs.supervisor.keeper_client import KEEPER
from acpfs.worker.outbox import Outbox

BEAT_INTERVAL_S = 1.0
SUPERVISOR_AGAIN_S = 1.0
"""Between two tries to start a supervisor; the first one follows the end of the last supervisor at
once.
"""
LAST_WORDS_S = 10.0
"""A supervisor that has not heard why its worker ended within this, takes it for a death."""
HANDED_OVER = 75
"""Exit status of a worker that made room for the next one."""

log = get_logger(__name__)


class Link:
    """One per worker."""

    def __init__(
        self,
        end: socket.socket,
        orders: dict[str, Any],
        kept: dict[str, list[int]],
        given: Runtime,
    ) -> None:
        """`kept`: descriptors by name."""
        self._given = given
        self._end = end
        self._outbox = Outbox(end, given.threads)
        self._orders = orders
        self.kept = kept
        self.facts: dict[str, Any] = orders.get("facts") or {}
        """What earlier workers of the session had the supervisor remember."""
        self.reload_failed = ""
        """Why the last reload did not get as far as another worker."""
        self.session_name = ""
        """The token, also of a session that this worker is about to begin."""
        self.pause_s = 0.0
        """How long nobody served before this worker did."""
        self.is_serving = False
        self.is_alone = False
        """Whether its supervisor is gone, and no other one was told of it yet."""
        self._step = ""
        """What the start is at."""
        self._telling = threading.Lock()
        """A new supervisor is given all that is kept, and then what is kept later: nothing goes to
        the old one in between.
        """

    @property
    def session(self) -> str:
        """Token of the kernel session to take over; "": there is none."""
        return str(self.facts.get("session") or "") if self.kept.get("session") else ""

    @property
    def knows_lower(self) -> bool:
        """Whether an earlier worker of this mount has opened, claimed and probed the backing
        directory, which now may hang.
        """
        return "identity" in self.kept and "volume" in self.facts

    @property
    def workers_before(self) -> int:
        """How many workers this mount has had."""
        return int(self._orders.get("workers_before", 0))

    @property
    def reason(self) -> str:
        """Why the last one is not there any more."""
        return str(self._orders.get("reason") or "")

    def told_to_end(self) -> float:
        """It is told to end; since when, monotonic seconds: an earlier worker may have been told,
        and died over it.
        """
        if self._orders.get("told_to_end_at") is None:
            self._orders["told_to_end_at"] = self._given.clock.now()
        return float(self._orders["told_to_end_at"])

    @property
    def says_hurry(self) -> bool:
        """Whether its supervisor says on the channel that it is to end at once; of an older one the
        second signal says it.
        """
        return bool(self._orders.get("says_hurry")) and not self.is_alone

    @property
    def supervisor_pid(self) -> int:
        """Process that outlives this one."""
        return int(self._orders["supervisor"])

    @property
    def keeper_holds(self) -> bool:
        """Whether a keeper holds the session, for a supervisor that comes when all processes of the
        mount were killed.
        """
        with self._telling:
            return bool(self.kept.get(KEEPER))

    # -- to the supervisor

    def tell(self, **message: Any) -> None:
        """Send a message without descriptors."""
        with self._telling:
            self._outbox.send(message)

    def last_words(self, **message: Any) -> None:
        """`tell`, before the process ends."""
        self.tell(**message)
        self._outbox.flush(LAST_WORDS_S)

    def keep(self, name: str, fds: Sequence[int]) -> None:
        """Have descriptors kept for the next worker, before anybody relies on them."""
        with self._telling:
            self.kept[name] = list(fds)
            if not fds:
                del self.kept[name]
            self._outbox.send({"keep": [[name, len(fds)]]}, fds)

    def remember(self, **facts: Any) -> None:
        """Have facts kept for the next worker."""
        self.facts |= facts
        self.tell(facts=self.facts)

    def change(self, settings: dict[str, Any]) -> None:
        """Settings were changed in use: the next worker, and the next supervisor, have them too."""
        self._orders["settings"] = settings
        self.tell(settings=settings)

    def step(self, name: str) -> None:
        """What the start is at now; each step has its time, and is named when that is up."""
        self._step = name
        self.tell(step=name)

    def still(self) -> None:
        """The step of the start goes on: it waits for something that is no fault of its own."""
        self.tell(step=self._step)

    def serving(self, text: str) -> None:
        """Requests are served."""
        died_at = self._orders.get("died_at")
        self.pause_s = 0.0 if died_at is None else self._given.clock.now() - died_at
        self.is_serving = True
        self.tell(serving=text, pause_s=self.pause_s)

    def reload(self) -> None:
        """Restart the worker with the installed code."""
        self.reload_failed = ""
        self.tell(reload=True)

    def now(self) -> float:
        """Monotonic, seconds."""
        return self._given.clock.now()

    def beat(self, busy_s: float) -> None:
        """A sign of life; `busy_s`: how long the request that is served longest has kept its
        thread.
        """
        with self._telling:
            self._outbox.send_if_heard({"beat": busy_s})

    # -- from the supervisor

    def listen(
        self, leave: Callable[[], None], hurry: Callable[[], None], adopted: Callable[[int], None]
    ) -> None:
        """Begin to listen, in a thread that calls all three.

        `leave`: the order to leave has come; returns when it is safe to end the process. `hurry`:
        the mount is to end at once. `adopted`: by the supervisor of that number.
        """
        self._given.threads.start("supervisor", self._listen, leave, hurry, adopted)

    def _listen(
        self, leave: Callable[[], None], hurry: Callable[[], None], adopted: Callable[[int], None]
    ) -> None:
        started_at = -math.inf
        while True:
            self._heed(leave, hurry)
            self.is_alone = True
            if os.environ.get("NOTIFY_SOCKET"):
                log.warning("the supervisor is gone; the service manager will start it again")
                return
            log.warning("the supervisor is gone; this worker serves on and starts another one")
            if self._given.clock.now() - started_at < SUPERVISOR_AGAIN_S:
                self._given.clock.sleep(
                    SUPERVISOR_AGAIN_S
                )  # one that cannot live is not started as fast as it dies
            started_at = self._given.clock.now()
            self._have_another(adopted)

    def _heed(self, leave: Callable[[], None], hurry: Callable[[], None]) -> None:
        """Until the supervisor is gone."""
        while True:
            message, fds = channel.receive(self._end)
            if message is None:
                return
            if KEEPER in message:
                self._set_keeper(fds)
            if "leave" in message:
                leave()
                os._exit(HANDED_OVER)
            if "hurry" in message:
                hurry()
            if "reload_failed" in message:
                self.reload_failed = message["reload_failed"]
                log.error("reload failed: this worker goes on", why=self.reload_failed)

    def _set_keeper(self, fds: list[int]) -> None:
        """A keeper has come, or gone."""
        with self._telling:
            for old in self.kept.pop(KEEPER, ()):
                os.close(old)
            if fds:
                self.kept[KEEPER] = fds

    def _have_another(self, adopted: Callable[[int], None]) -> None:
        """Start a supervisor, however long the machine has no process, memory or descriptor left
        for it.
        """
        pid = self._try_another()
        while not pid:
            self._given.clock.sleep(SUPERVISOR_AGAIN_S)
            pid = self._try_another()
        try:
            adopted(pid)
        except OSError as error:
            log.error(
                "the mount's record still names the supervisor that is gone", error=str(error)
            )

    def _try_another(self) -> int:
        """Its process number; 0: not now."""
        try:
            return self._start_another()
        except OSError as error:
            log.error("no other supervisor can be started; it is tried again", error=str(error))
            return 0

    def _start_another(self) -> int:
        """Its process number.

        Raises:
            OSError: not now.
        """
        ours, theirs = channel.pair()
        try:
            with theirs:
                child = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "acpfs.supervisor.supervisor",
                        "--adopt",
                        str(theirs.fileno()),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    cwd="/",
                )
            with self._telling:
                names = [[name, len(fds)] for name, fds in self.kept.items()]
                state = {
                    "facts": self.facts,
                    "settings": self._orders["settings"],
                    "workers": self.workers_before + 1,
                }
                state |= {name: self._orders.get(name) for name in ("lineage", "told_to_end_at")}
                channel.send(
                    ours,
                    {"adopt": os.getpid(), "keep": names, **state},
                    [fd for fds in self.kept.values() for fd in fds],
                )
                self._outbox.close()
                self._end = ours
                self._outbox = Outbox(ours, self._given.threads)
                self.is_alone = False
                self._orders["says_hurry"] = (
                    True  # it is of the installed code, which is no older than this
                )
        except OSError:
            ours.close()  # a supervisor that was not told ends with it
            raise
        return child.pid


def alone(on_serving: Callable[[], None], given: Runtime) -> Link:
    """The link of a worker without a supervisor, for measurements in one process; `on_serving`: the
    mount can be used.
    """
    ours, theirs = channel.pair()

    def listen() -> None:
        while (message := channel.receive(ours)[0]) is not None:
            if "serving" in message:
                on_serving()

    given.threads.start("no supervisor", listen)
    return Link(theirs, {"supervisor": os.getpid(), "settings": {}}, {}, given)


def orders_of(orders: dict[str, Any], fds: Sequence[int], given: Runtime) -> Link:
    """The link of a worker that was started with these orders: the first descriptor is the channel,
    the others are kept ones.
    """
    kept = {}
    position = 1
    for name, count in orders["keep"]:
        kept[name] = list(fds[position : position + count])
        position += count
    return Link(socket.socket(fileno=fds[0]), orders, kept, given)
