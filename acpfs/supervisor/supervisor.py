"""The supervisor: keeps the kernel session and whatever else must outlive a worker, and sees to it
that there is a worker.

Tiny on purpose: the standard library, no thread, no event loop, and never a system call on its own
mount, which would wait for the worker that it is to replace. It knows processes, descriptors by
name and times; what the worker does it does not know. Workers are forked from a template; one that
dies, or gives no sign of life, is replaced; one that cannot be kept alive ends in the fall-through.

    python -m acpfs.supervisor.supervisor --start FD | --foreground | --adopt FD

`--start`: settings on standard input as soon as they are checked, the answer for whoever mounts to
descriptor FD. `--adopt`: FD is the channel of a living worker whose supervisor is gone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from acpfs.errors import ExitCode
from acpfs.ram import descriptor_limits
from acpfs.supervisor import (
    channel,
    handover,
    keeper_client,
    privileges,
    resting,
    signal_pipe,
    stuck_processes,
)
from acpfs.supervisor.child import DUMP_WAIT_S, Attention, Child, Limits
from acpfs.supervisor.handover import PREDECESSOR, Door
from acpfs.supervisor.instances import OUTLIVED, outlived
from acpfs.supervisor.keeper_client import KEEPER, KeeperClient
from acpfs.supervisor.kept_descriptors import KeptDescriptors
from acpfs.supervisor.local_sockets import close
from acpfs.supervisor.mount_answer import MountAnswer, settings_from_input
from acpfs.supervisor.mount_state import MountState, unknown
from acpfs.supervisor.restarts import EARLY_DEATHS_MAX, Restarts
from acpfs.supervisor.service import ALIVE, Service, inherited
from acpfs.supervisor.stopping import Act, Owner, Stopping
from acpfs.supervisor.templates import Template, Templates

EARLY_DEATHS_VARIABLE = "ACPFS_EARLY_DEATHS_MAX"
BUG_WAIT_S = 0.2
FAILED = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """One per mount; `run` until the mount ends."""

    def __init__(
        self, settings: dict[str, Any], answer_fd: int = -1, *, detached: bool = True
    ) -> None:
        """`settings`: as JSON has them, not looked into but for the places that falling through
        needs. `detached`: from any terminal.
        """
        self._detached = detached
        self._mount = MountState(settings)
        self._answer = MountAnswer(answer_fd)
        self._service = Service()
        self._keeper = KeeperClient(self._watch, self._forget, self._keeper_changed)
        self._kept = KeptDescriptors(self._service.store, self._keeper.store)
        self._selector = selectors.DefaultSelector()
        self._restarts = Restarts(int(os.environ.get(EARLY_DEATHS_VARIABLE, EARLY_DEATHS_MAX)))
        self._attention = Attention()
        self._limits = Limits()
        self._templates = Templates(self._watch, self._forget, self._hear_template)
        self._child: Child | None = None
        self._start_at = 0.0
        """When the next worker is to be started, monotonic; 0: there is one."""
        self._fed_at = 0.0
        self._exit_code = 0
        self._stopping = Stopping()
        self._ended = False
        self._complaint = ""
        """The last one."""
        self._failed = ""
        """What went wrong in the last round."""
        self._take_over: dict[str, Any] | None = None
        """Settings that hold from now on for a mount that is to be taken over; None: one is to be
        made.
        """
        self._resume: dict[str, Any] | None = None
        """The same for one that only a keeper holds, until a worker serves it."""
        self._predecessor: socket.socket | None = None
        """The supervisor that waits until a worker of this one serves."""
        self._door = Door(
            self._watch,
            self._forget,
            asked=self._asked,
            served=self._outlived,
            left_alone=self._go_on,
        )
        self._rests = False

    # -- life

    def run(self) -> int:
        """Until the mount ends; the exit code."""
        if self._templates.current is None:
            self._heed_signals()
        adopted = bool(self._kept)  # the worker that handed them over may be dead by now
        if not adopted:
            self._begin()
        self._templates.have()
        if not adopted and not self._ended and (self._take_over is None or self._mount.workers):
            self._start_worker()  # else when the template has loaded: the mount is served meanwhile
        while not self._ended:
            try:
                patience_s = self._patience_s()
                for key, _events in self._selector.select(patience_s):
                    key.data()
                if (
                    overslept_s := self._attention.overslept_s(patience_s)
                ) and self._child is not None:
                    self._child.excuse(overslept_s)
                self._look_after()
                self._failed = ""
            except Exception as error:  # noqa: BLE001 - whatever it is
                self._told_of(
                    error
                )  # a bug must not cost the session, which would die with this process
                time.sleep(BUG_WAIT_S)
        self._service.forget()
        if self._resume is None:
            self._keeper.forget_mount()
        self._door.remove(self._mount.settings)
        return (
            resting.rest(self._mount.settings, self._look_once) if self._rests else self._exit_code
        )

    def _begin(self) -> None:
        """With what the service manager or a keeper holds of the mount, or anew."""
        found, state = inherited()
        if why := unknown(state):
            # the manager has all of it still: nothing was stored here, so nothing is forgotten
            self._refuse(why)
            return
        self._kept.update(found)
        if state:
            self._service.takes(self._kept)
            self._mount.go_on_from(state, {}, "the supervisor was started again")
            if "session" not in self._kept and not state["workers"]:
                self._mount.begin()
        elif self._resume is not None:
            self._take_from_keeper()
        else:
            self._mount.begin()

    def _told_of(self, error: Exception) -> None:
        """Say it, but not five times a second for as long as the machine has no process left."""
        if repr(error) != self._failed:
            self._failed = repr(error)
            with contextlib.suppress(OSError):
                traceback.print_exc()

    def load(self) -> None:
        """Have the template load already, for settings that whoever mounts is still checking."""
        self._heed_signals()
        self._templates.have()

    def told(self, settings: dict[str, Any]) -> bool:
        """With these; False without any: nothing is to be mounted after all."""
        self._take_over = settings.pop("take_over", None)
        self._resume = settings.pop("resume", None)
        self._mount = MountState(settings, settings.pop("instance", ""))
        if not settings:
            self._templates.kill()  # by itself it ends when it has loaded
        return bool(settings)

    def adopt(self, end: socket.socket) -> None:
        """Take a living worker over, which tells on its channel what is to be kept."""
        message, fds = channel.receive(end)
        assert message is not None
        self._mount.adopt(message)
        self._stopping.go_on(message.get("told_to_end_at"))  # absent: an older worker
        child = Child(end, told=self._stopping.stop)
        self._child = child
        child.serving_at = time.monotonic()
        child.beat_at = child.serving_at
        self._kept.keep(message["keep"], fds)
        self._kept.put(KEEPER, [])  # the worker has it on; here a new connection is made
        self._watch(end, lambda: self._hear(child))
        self._know_pid(child, message["adopt"])
        self._look_for_keeper()
        self._let_predecessor_go()

    def _heed_signals(self) -> None:
        woken = signal_pipe.heed(_SIGNALS)
        self._selector.register(
            woken, selectors.EVENT_READ, lambda: self._pass_on(os.read(woken, 64))
        )

    def _pass_on(self, numbers: bytes) -> None:
        """Signals are the worker's business; to end is this one's, too."""
        for number in numbers:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stopping.told(time.monotonic())
                self._do_as_told()
            elif number == signal.SIGHUP and self._child is not None and self._child.pid:
                self._child.kill(number)

    def _do_as_told(self) -> None:
        """Where it is told to end: at each signal, and again whenever the worker has come
        further.
        """
        if self._ended:
            return  # the mount may be another supervisor's by now
        child = self._child
        act = self._stopping.act(self._owner, None if child is None else child.readiness)
        if act is Act.FINISH:
            self._finish(0)
        elif act is Act.ABANDON:
            self._end_unserved("told to end at once while no worker served", ExitCode.TIMEOUT)
        elif act is Act.START:
            self._start_at = time.monotonic()
        elif act is Act.KILL and child is not None:
            child.kill(signal.SIGKILL)
        elif act is Act.CANCEL:
            self._templates.kill()
        elif act is Act.TELL and child is not None:
            child.tell(self._stopping.stop)

    @property
    def _owner(self) -> Owner:
        if self._door.given:
            return Owner.SUCCESSOR
        if self._is_borrowed:
            return Owner.OTHERS
        return Owner.OURS if self._mount.workers else Owner.NOBODY

    # -- templates

    def _hear_template(self, template: Template) -> None:
        if template.is_gone:
            return
        message, _fds = channel.receive(template.end)
        is_next = template is self._templates.next
        is_current = template is self._templates.current
        if message is None:
            self._templates.ended(template)
            if is_next:
                self._tell_worker({"reload_failed": "the new code cannot be loaded; see the log"})
            elif is_current and self._take_over is not None and not self._mount.workers:
                self._fail("the code of this version cannot be loaded; see the log")
            # the one in use is replaced by `_look_after`, as often as it takes
            if self._child is not None:
                self._look_after_orphan(self._child)
        elif "pid" in message and self._child is not None and is_current:
            self._know_pid(self._child, message["pid"])
        elif "not_forked" in message and self._child is not None and is_current:
            self._child.not_forked(message["not_forked"])
            self._worker_gone(self._child)
        elif "ended" in message and self._child is not None:
            if self._child.pidfd < 0 and message["ended"] == self._child.pid:
                self._worker_gone(self._child)  # it could not be watched
        elif (
            "loaded" in message
            and is_current
            and self._take_over is not None
            and not self._mount.workers
        ):
            self._ask_for_mount()
        elif "loaded" in message and is_next and self._child is not None:
            self._child.leaving = True
            self._tell_worker({"leave": True})

    def _look_after_orphan(self, child: Child) -> None:
        """Its template died before or after the fork: it says who it is, or nobody has the other
        end of its channel. Never two at once.
        """
        if child is not self._child or not child.is_orphan:
            return
        if child.own_pid:
            self._know_pid(child, child.own_pid)
        elif child.end.fileno() < 0:
            self._worker_gone(child)

    def _tell_worker(self, message: channel.Message) -> None:
        if self._child is not None:
            self._child.send(message)

    # -- workers

    def _start_worker(self) -> None:
        """Start one now; it is still to be started after an OSError, where the machine has no
        process or descriptor left.
        """
        self._start_at = self._start_at or time.monotonic()
        template = self._templates.have()
        ours, theirs = channel.pair()
        self._start_at = 0.0
        child = Child(ours, template)
        self._child = child
        orders = self._mount.orders() | {
            "keep": self._kept.names(),
            "supervisor": os.getpid(),
            "detached": self._detached,
        }
        orders["told_to_end_at"] = self._stopping.since
        self._keeper.starting()
        with theirs:
            channel.send(template.end, orders, [theirs.fileno(), *self._kept.all()])
        self._watch(ours, lambda: self._hear(child))

    def _know_pid(self, child: Child, pid: int) -> None:
        child.pid = pid
        self._watch_process(child)
        if child is self._child:
            self._do_as_told()

    def _watch_process(self, child: Child) -> None:
        """So that its end is heard, and signals reach it; tried again where there is no descriptor
        for that now.
        """
        try:
            pidfd = os.pidfd_open(child.pid)
        except ProcessLookupError:
            self._worker_gone(child)
            return
        except OSError as error:
            self._complain(f"worker {child.pid} cannot be watched yet: {error.strerror}")
            return
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._worker_gone(child))
        child.watched(pidfd)
        self._keeper.worker(child.pidfd)
        if self._predecessor is not None:
            handover.send_with_pidfd(self._predecessor, {"starting": True}, child.pid)
        child.main_end = stuck_processes.thread_end(child.pid)
        if child.main_end >= 0:
            self._selector.register(
                child.main_end, selectors.EVENT_READ, lambda: self._main_thread_gone(child)
            )

    def _main_thread_gone(self, child: Child) -> None:
        """The others follow in a moment, unless one is stuck."""
        if child is not self._child:
            # both came in one look, its end first: the numbers of its descriptors may be others' by
            # now
            return
        self._forget(child.main_end)
        child.main_end = -1
        child.stuck_at = time.monotonic()

    def _hear(self, child: Child) -> None:
        if child.end.fileno() < 0:
            return
        message, fds = channel.receive(child.end)
        if message is None:
            self._forget(child.end)
            self._look_after_orphan(child)
            return
        if "keep" in message:
            self._kept.keep(message["keep"], fds)
            self._store_state()
        if "facts" in message:
            self._mount.facts = message["facts"]
            self._store_state()
        if "settings" in message:
            self._mount.settings = message["settings"]
            self._store_state()
        if "notify" in message:
            self._service.notify(message["notify"])
        child.heard(message)
        if "step" in message:
            self._answer.write({"step": message["step"]})
        if "serving" in message:
            self._now_serving()
        if "reload" in message:
            self._templates.load_next()
        self._look_after_orphan(child)

    def _store_state(self) -> None:
        self._service.store_state(self._mount.record())
        self._keeper.store_state(self._mount.record())

    def _now_serving(self) -> None:
        self._mount.served()
        self._store_state()
        self._templates.served()
        self._resume = None
        self._keeper.begin_anew()
        self._look_for_keeper()
        self._let_predecessor_go()
        self._answer.last({"result": {}})
        self._do_as_told()

    def _worker_gone(self, child: Child) -> None:
        """Its process has ended: what now?"""
        if child is not self._child:
            return
        self._drain_channel(child)
        for end in (child.end, child.pidfd, child.main_end):
            self._forget(end)
        self._child = None
        child.let_go()
        self._keeper.worker()
        now = time.monotonic()
        if child.exit_code is None and self._door.is_asked and self._give(child, now):
            return
        act = self._stopping.act(self._owner, None)
        if child.exit_code is not None or act is Act.FINISH:
            self._finish(FAILED if child.exit_code is None else child.exit_code, child.error)
        elif act is Act.ABANDON:
            self._end_unserved(
                "told to end at once, and the worker died", ExitCode.TIMEOUT, child.error
            )
        elif self._mount.workers == 0:
            if child.error is None or child.dumped_at or child.wanted:
                from acpfs.supervisor import fallthrough

                fallthrough.clear_away(self._mount.settings, mounted="session" in self._kept)
            self._finish(FAILED, child.error)
        else:
            self._replace(child, now)

    def _leave_behind(self, child: Child) -> None:
        """It will never run again, and may never end: the next one starts, and knows of it."""
        self._complain(
            f"worker {child.pid} was killed in a system call that does not return: on the "
            "backing directory, or on a file in RAM that an application is writing"
        )
        self._kept.leave_behind(child.pidfd)
        self._worker_gone(child)

    def _complain(self, text: str) -> None:
        """To the log, once in a row; where no descriptor or memory is left for that, it is not
        said.
        """
        if text != self._complaint:
            self._complaint = text
            with contextlib.suppress(OSError, ImportError, MemoryError):
                from acpfs.supervisor import fallthrough

                fallthrough.say(self._mount.settings, text)

    def _drain_channel(self, child: Child) -> None:
        """What it said last."""
        with contextlib.suppress(OSError):
            child.end.setblocking(False)
            while child.end.fileno() >= 0:
                self._hear(child)

    def _replace(self, child: Child, now: float) -> None:
        self._mount.died_at = self._mount.died_at or child.stuck_at or now
        self._mount.reason = _reason(child)
        if self._is_borrowed:
            self._fail(
                (child.error or {}).get(
                    "message", "the worker of this version died before it served; see the log"
                )
            )
            return
        if child.leaving and self._templates.go_forward():
            self._start_worker()
            return
        if self._templates.go_back():  # the new code's worker could not take over
            self._mount.reason = (
                f"reload refused: {(child.error or {}).get('message', 'it did not start')}"
            )
            self._start_worker()
            return
        if child.wanted and self._stopping.is_over(now, self._mount.settings):
            self._end_unserved(
                f"no worker could be started that drains: the machine has no {child.wanted} left",
                ExitCode.TIMEOUT,
            )
            return
        # a drain that its worker dies of would go on for ever: told to end, each death counts,
        # however long that one served
        served_s = (
            now - child.serving_at if child.serving_at and not self._stopping.is_told else 0.0
        )
        # who gave a call up dies of that one no more; another such call is another death, and no
        # reason to give the mount up
        is_over = child.leaving or child.gave_up_a_call
        delay_s = (
            0.0
            if is_over and not child.wanted
            else self._restarts.delay_s(served_s, is_want=bool(child.wanted))
        )
        if child.wanted:
            self._complain(
                f"the worker ended, and another one is tried in {delay_s:g} s: {_reason(child)}"
            )
        if delay_s is None:
            self._give_up(child)
        else:
            self._start_at = now + delay_s

    # -- from one supervisor to another

    def _asked(self, message: channel.Message) -> str:
        """Have the worker make room for the other supervisor's; or why not."""
        if why := outlived(self._mount.lineage, message.get("instance", "")):
            return why
        if "session" not in self._kept:
            return "a libfuse mount cannot be taken over: unmount and mount again"
        if message["backing"] != self._mount.settings["backing"]:
            return f"the mount has another backing directory: {self._mount.settings['backing']}"
        if (
            self._child is None
            or not self._child.serving_at
            or self._stopping.is_told
            or self._templates.are_changing
        ):
            return "its worker is being replaced just now, or ends"
        self._child.leaving = True
        self._tell_worker({"leave": True})
        return ""

    def _give(self, child: Child, now: float) -> bool:
        """What the next supervisor needs, now that nobody serves."""
        self._mount.died_at = child.stuck_at or now
        self._kept.put(
            KEEPER, []
        )  # the next one has a connection of its own; this one's client has its own copy
        return self._door.give(
            self._kept.names(),
            self._kept.all(),
            self._mount.record() | {"died_at": self._mount.died_at},
        )

    def _go_on(self) -> None:
        """Whoever was given the mount has ended before it served."""
        self._mount.reason = (
            "a take-over failed: the other supervisor ended before its worker served"
        )
        self._kept.put(KEEPER, self._keeper.connection)
        self._do_as_told()
        if not self._ended:
            self._start_worker()

    def _outlived(self) -> None:
        """Another supervisor has the mount: nothing of it is this one's any more."""
        self._kept.let_go()
        self._door.close()
        self._rests = (
            not self._detached and not self._service.present and not self._stopping.is_told
        )
        self._finish(0)

    def _look_once(self, patience_s: float) -> bool:
        """Whether this process is to end."""
        for key, _events in self._selector.select(patience_s):
            key.data()
        return self._stopping.is_told

    # -- what a keeper holds

    def _take_from_keeper(self) -> None:
        """All processes of the mount were killed."""
        taken = keeper_client.take(self._mount.settings, self._mount.instance)
        if taken.end is None:
            self._refuse(taken.refused)
            return
        if why := unknown(taken.state):
            taken.let_go()
            self._refuse(why)
            return
        self._kept.update(taken.kept)
        self._mount.go_on_from(
            taken.state,
            self._resume or {},
            "all processes of the mount were killed; a keeper held the session",
        )
        self._keeper.use(taken.end)
        self._kept.put(KEEPER, self._keeper.connection)

    def _keeper_changed(self, connection: Sequence[int]) -> None:
        self._kept.put(KEEPER, connection)
        if self._child is not None:
            self._child.send({KEEPER: len(connection)}, connection)

    def _look_for_keeper(self) -> None:
        """One that has come is told everything, and so is one that was there all along when a
        worker begins to serve.
        """
        if self._child is not None and "session" in self._kept:
            self._keeper.look(
                self._mount.settings, self._kept, self._mount.record(), self._child.pidfd
            )

    @property
    def _is_borrowed(self) -> bool:
        """Whether no worker of this supervisor has served yet, and others can go on with the
        mount.
        """
        return PREDECESSOR in self._kept or self._resume is not None

    def _ask_for_mount(self) -> None:
        self._answer.write({"step": "waiting for the supervisor that has the mount"})
        end = handover.ask(self._mount.settings, self._mount.instance)
        if end is not None:
            self._watch(end, lambda: self._hear_predecessor(end))
        else:
            self._fail("its supervisor has ended meanwhile: mount again")

    def _hear_predecessor(self, end: socket.socket) -> None:
        message, fds = channel.receive(end)
        if message is not None and "kept" in message and (why := unknown(message)):
            for fd in fds:
                os.close(fd)
            message = {"refused": why}
        if message is not None and "kept" in message:
            self._mount.go_on_from(
                message, self._take_over or {}, "taken over by another supervisor"
            )
            self._kept.keep(message["kept"], fds)
            self._store_state()
            self._kept[PREDECESSOR] = [os.dup(end.fileno())]
            self._predecessor = end
            self._start_worker()
            return
        self._predecessor = None
        self._forget(end)
        if message is not None:
            self._refuse(message.get("refused", "its supervisor refuses to give it"))
        elif not self._mount.workers:
            self._fail("its supervisor ended before it gave it: mount again")
        elif PREDECESSOR in self._kept:  # there is nobody to go back to: this one does what it can
            os.close(self._kept.pop(PREDECESSOR)[0])

    def _let_predecessor_go(self) -> None:
        """First this one can be asked, then the other one ends: at each moment there is one that
        answers.
        """
        if PREDECESSOR in self._kept:
            self._door.open(self._mount.settings)
            handover.tell_serving(self._kept.pop(PREDECESSOR))
            self._take_over = None
            self._predecessor = None

    def _refuse(self, why: str) -> None:
        self._rests = why == OUTLIVED and not self._detached and not self._service.present
        self._fail(why, ExitCode.REFUSED)

    def _fail(self, why: str, code: ExitCode = ExitCode.FAILED) -> None:
        self._finish(
            FAILED, {"exit_code": int(code), "message": f"the mount cannot be taken over: {why}"}
        )

    # -- time

    def _patience_s(self) -> float | None:
        now = time.monotonic()
        times = []
        if self._start_at:
            times.append(self._start_at - now)
        if self._child is not None:
            times.append(self._child.look_again_s(self._limits))
        if self._templates.next is not None or self._door.given:
            times.append(1.0)
        if self._service.watchdog_s:
            times.append(self._fed_at + self._service.watchdog_s - now)
        return max(0.0, min(times)) if times else None

    def _look_after(self) -> None:
        now = time.monotonic()
        self._look_after_child()
        self._kept.bury()
        self._door.look(self._limits.hang_s)
        if self._predecessor is not None:
            handover.say_starting(self._predecessor)
        if (
            self._mount.workers
            and self._child is not None
            and self._child.serving_at
            and "session" in self._kept
        ):
            self._door.open(self._mount.settings)
            self._look_for_keeper()
        if not self._ended:
            self._start_what_lacks(now)
        self._templates.end_late(now, self._limits.start_s)
        child = self._child
        healthy = child is None or self._look_at(child, now)
        if self._service.watchdog_s and healthy and now >= self._fed_at + self._service.watchdog_s:
            self._fed_at = now
            self._service.notify(ALIVE)

    def _look_after_child(self) -> None:
        """What could not be done for it then."""
        if self._child is not None:
            self._child.send_waiting()
            if self._child.pid and self._child.pidfd < 0:
                self._watch_process(self._child)

    def _start_what_lacks(self, now: float) -> None:
        """A template, and a worker that is due; tried again, but not for ever, where the machine
        has no process or descriptor left.
        """
        try:
            self._templates.have()
            if self._start_at and now >= self._start_at:
                self._start_worker()
        except OSError as error:
            if not self._start_at or not self._stopping.is_over(now, self._mount.settings):
                raise
            self._end_unserved(
                f"no worker could be started that drains: {error.strerror}", ExitCode.TIMEOUT
            )

    def _look_at(self, child: Child, now: float) -> bool:
        """Whether the worker is well; one that is not is asked for its stacks, and then killed."""
        left_behind = self._kept.get(stuck_processes.STUCK, ())
        if child.pid and child.is_left_behind(
            now, allowed=len(left_behind) < stuck_processes.STUCK_MAX
        ):
            self._leave_behind(child)
            return True
        if child.dumped_at:
            if now - child.dumped_at >= DUMP_WAIT_S:
                self._end_hung(child)
            return False
        if child.is_well(now, self._limits):
            return True
        child.dumped_at = now
        if child.pid:
            child.kill(signal.SIGUSR1)
        return False

    def _end_hung(self, child: Child) -> None:
        """Its process, or the template that does not fork it."""
        if child.pid:
            child.kill(signal.SIGKILL)
        else:
            self._templates.kill()

    # -- the end

    def _give_up(self, child: Child) -> None:
        """No worker lives."""
        said = (child.error or {}).get("message", "it died")
        could_not = "drain" if self._stopping.is_told else "serve"
        self._end_unserved(
            f"{self._restarts.early} workers in a row could not {could_not}; the last one: {said}",
            FAILED,
            child.error,
        )

    def _end_unserved(self, why: str, code: int, error: dict[str, Any] | None = None) -> None:
        """The mount falls through to the backing directory, if that lies beneath; one that is to
        end is taken away. The RAM tier stays.
        """
        self._finish(code, error)
        for name in ("control", "metrics"):
            # nobody answers; where no descriptor is left, what follows needs one
            self._kept.put(name, [])
        from acpfs.supervisor import fallthrough

        fallthrough.end_unserved(
            self._mount.settings, self._mount.facts, why, told=self._stopping.is_told
        )
        # a template that was killed with an order may have its copies for a moment longer
        self._kept.unlock()

    def _finish(self, code: int, error: dict[str, Any] | None = None) -> None:
        self._exit_code = code
        self._ended = True
        self._templates.end()
        if self._kept.get(stuck_processes.STUCK) and not self._is_borrowed:
            self._kept.unlock()
        if error is not None:
            self._answer.last({"error": error})
            self._exit_code = int(error.get("exit_code", code))

    # -- descriptors

    def _watch(self, end: socket.socket, heard: Any) -> None:
        self._selector.register(end, selectors.EVENT_READ, heard)

    def _forget(self, end: socket.socket | int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(end)
        close(end)


def _reason(child: Child) -> str:
    """Why it is not there any more, for the next one and for `status`."""
    if child.wanted:
        return f"the machine had no {child.wanted} left"
    return "hung" if child.dumped_at else "reload" if child.leaving else "died"


def main(arguments: list[str]) -> int:
    """Entry of the process."""
    os.umask(0o022)
    descriptor_limits.raise_limit()  # the last moment at which it may: all that it starts inherits
    privileges.confine()
    if arguments[0] == "--adopt":
        supervisor = Supervisor({})
        supervisor.adopt(socket.socket(fileno=int(arguments[1])))
        return supervisor.run()
    answer_fd = int(arguments[1]) if arguments[0] == "--start" else -1
    supervisor = Supervisor({}, answer_fd, detached=answer_fd >= 0)
    if answer_fd >= 0:
        supervisor.load()
    return supervisor.run() if supervisor.told(settings_from_input()) else FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
