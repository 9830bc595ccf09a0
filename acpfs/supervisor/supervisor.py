"""The supervisor: keeps the kernel session and whatever else must outlive a worker, and sees to it that there is a worker.

Tiny on purpose: the standard library, no thread, no event loop, and never a system call on its own mount, which would wait for the worker
that it is to replace. It knows processes, descriptors by name and times; what the worker does it does not know. Workers are forked from a
template; one that dies, or gives no sign of life, is replaced; one that cannot be kept alive ends in the fall-through.

    python -m acpfs.supervisor.supervisor --start FD | --foreground | --adopt FD

`--start`: settings on standard input as soon as they are checked, the answer for whoever mounts to descriptor FD. `--adopt`: FD is the
channel of a living worker whose supervisor is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from typing import Any

from acpfs.errors import ExitCode
from acpfs.ram import descriptor_limits
from acpfs.supervisor import channel, handover, privileges, stuck_processes
from acpfs.supervisor.child import Attention, Child, Limits, Template
from acpfs.supervisor.handover import PREDECESSOR, Door
from acpfs.supervisor.kept_descriptors import KeptDescriptors
from acpfs.supervisor.mount_answer import MountAnswer
from acpfs.supervisor.restarts import EARLY_DEATHS_MAX, Restarts
from acpfs.supervisor.service import Service, inherited

EARLY_DEATHS_VARIABLE = "ACPFS_EARLY_DEATHS_MAX"
DUMP_WAIT_S = 1.0
"""Between asking a hung worker for its stacks and killing it."""
BUG_WAIT_S = 0.2
FAILED = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """One per mount; `run` until the mount ends."""

    def __init__(self, settings: dict[str, Any], answer_fd: int = -1, *, detached: bool = True) -> None:
        """`settings`: as JSON has them, not looked into but for the places that falling through needs. `detached`: from any terminal."""
        self._detached = detached
        self._settings = settings
        self._answer = MountAnswer(answer_fd)
        self._facts: dict[str, Any] = {}
        self._workers = 0
        self._service = Service()
        self._kept = KeptDescriptors(self._service.store)
        self._selector = selectors.DefaultSelector()
        self._restarts = Restarts(int(os.environ.get(EARLY_DEATHS_VARIABLE, EARLY_DEATHS_MAX)))
        self._attention = Attention()
        self._limits = Limits()
        self._template: Template | None = None
        self._next_template: Template | None = None
        """Of new code, while it loads."""
        self._old_template: Template | None = None
        """Of the old code, until a worker of the new one serves."""
        self._child: Child | None = None
        self._died_at: float | None = None
        self._reason = ""
        self._start_at = 0.0
        """When the next worker is to be started, monotonic; 0: there is one."""
        self._fed_at = 0.0
        self._exit_code = 0
        self._ended = self._stopping = False
        self._take_over: dict[str, Any] | None = None
        """Settings that hold from now on for a mount that is to be taken over; None: one is to be made."""
        self._door = Door(self._watch, self._forget, asked=self._asked, served=self._outlived, left_alone=self._go_on)
        self._rests = False

    # -- life

    def run(self) -> int:
        """Until the mount ends; the exit code."""
        if self._template is None:
            self._heed_signals()
        adopted = bool(self._kept)  # the worker that handed them over may be dead by now
        if not adopted:
            found, state = inherited()
            self._kept.update(found)
            if state:
                self._service.takes(self._kept)
                self._facts, self._workers = state["facts"], int(state["workers"])
                self._settings = state.get("settings", self._settings)  # as they were changed in use; absent: an older acpfs stored it
            if "session" in self._kept or self._workers:
                self._workers, self._reason, self._died_at = max(1, self._workers), "the supervisor was started again", time.monotonic()
        self._template = self._template or self._spawn_template()
        if not adopted and (self._take_over is None or self._workers):
            self._start_worker()  # else when the template has loaded: the mount is served meanwhile
        while not self._ended:
            try:
                patience_s = self._patience_s()
                for key, _events in self._selector.select(patience_s):
                    key.data()
                overslept_s = self._attention.overslept_s(patience_s)
                if overslept_s and self._child is not None:
                    self._child.excuse(overslept_s)
                self._look_after()
            except Exception:  # noqa: BLE001 - whatever it is
                traceback.print_exc()  # a bug here must not cost the session, which would die with this process
                time.sleep(BUG_WAIT_S)
        self._service.forget()
        self._door.remove(self._settings)
        if self._rests:
            self._rest()
        return self._exit_code

    def load(self) -> None:
        """Have the template load already, for settings that whoever mounts is still checking."""
        self._heed_signals()
        self._template = self._spawn_template()

    def told(self, settings: dict[str, Any]) -> bool:
        """With these; False without any: nothing is to be mounted after all."""
        self._take_over = settings.pop("take_over", None)
        self._settings = settings
        if not settings and self._template is not None:
            self._template.kill()  # by itself it ends when it has loaded
        return bool(settings)

    def adopt(self, end: socket.socket) -> None:
        """Take a living worker over, which tells on its channel what is to be kept."""
        message, fds = channel.receive(end)
        assert message is not None
        self._settings, self._facts, self._workers = message["settings"], message["facts"], message["workers"]
        child = self._child = Child(end)
        child.serving_at = child.beat_at = time.monotonic()
        self._kept.keep(message["keep"], fds)
        self._store_state()
        self._watch(end, lambda: self._hear(child))
        self._know_pid(child, message["adopt"])
        self._let_predecessor_go()

    def _heed_signals(self) -> None:
        woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # templates are not waited for
        self._selector.register(woken, selectors.EVENT_READ, lambda: self._pass_on(os.read(woken, 64)))

    def _pass_on(self, numbers: bytes) -> None:
        """Signals are the worker's business."""
        for number in numbers:
            if number in _SIGNALS:
                self._stopping = self._stopping or number != signal.SIGHUP
                if self._child is not None and self._child.pid:  # before it serves it must not unmount: whoever had the mount goes on
                    self._kill(self._child, signal.SIGKILL if self._stopping and PREDECESSOR in self._kept else number)
                elif self._stopping:
                    self._finish(0)

    @staticmethod
    def _kill(child: Child, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, number)

    # -- templates

    def _spawn_template(self) -> Template:
        ours, theirs = channel.pair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            arguments = [sys.executable, "-m", "acpfs.worker.template", str(theirs.fileno())]
            template = Template(ours, os.posix_spawn(sys.executable, arguments, os.environ, setpgroup=0))
        self._watch(ours, lambda: self._hear_template(template))
        return template

    def _hear_template(self, template: Template) -> None:
        if template.end.fileno() < 0:
            return
        message, _fds = channel.receive(template.end)
        if message is None:
            self._forget_template(template)
            if template is self._next_template:
                self._next_template = None
                self._tell_worker({"reload_failed": "the new code cannot be loaded; see the log"})
            elif template is self._template:
                self._template = None  # `_look_after` starts another, as often as it takes
                if self._take_over is not None and not self._workers:
                    self._fail("the code of this version cannot be loaded; see the log")
                if self._child is not None and not self._child.pid:
                    self._worker_gone(self._child)  # it took the order to start one with it
        elif "pid" in message and self._child is not None and template is self._template:
            self._know_pid(self._child, message["pid"])
        elif "loaded" in message and template is self._template and self._take_over is not None and not self._workers:
            self._ask_for_mount()
        elif "loaded" in message and template is self._next_template and self._child is not None:
            self._child.leaving = True
            self._tell_worker({"leave": True})

    def _forget_template(self, template: Template) -> None:
        """It ends with its channel."""
        self._forget(template.end)
        self._forget(template.pidfd)

    def _tell_worker(self, message: channel.Message) -> None:
        if self._child is not None:
            channel.send(self._child.end, message)

    # -- workers

    def _start_worker(self) -> None:
        """Start one now.

        Raises:
            OSError: the machine has no process or descriptor left; it is still to be started then.
        """
        self._start_at = self._start_at or time.monotonic()
        self._template = self._template or self._spawn_template()
        ours, theirs = channel.pair()
        self._start_at = 0.0
        child = self._child = Child(ours)
        orders = {
            "settings": self._settings,
            "keep": self._kept.names(),
            "facts": self._facts,
            "workers_before": self._workers,
            "died_at": self._died_at,
            "reason": self._reason,
            "supervisor": os.getpid(),
            "detached": self._detached,
        }
        with theirs:
            channel.send(self._template.end, orders, [theirs.fileno(), *self._kept.all()])
        self._watch(ours, lambda: self._hear(child))

    def _know_pid(self, child: Child, pid: int) -> None:
        child.pid = pid
        try:
            child.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._worker_gone(child)
            return
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._worker_gone(child))
        child.main_end = stuck_processes.main_thread_end(pid)
        if child.main_end >= 0:
            self._selector.register(child.main_end, selectors.EVENT_READ, lambda: self._main_thread_gone(child))
        if self._stopping:
            self._kill(child, signal.SIGTERM)

    def _main_thread_gone(self, child: Child) -> None:
        """The others follow in a moment, unless one is stuck."""
        if child is not self._child:
            return  # both came in one look, its end first: the numbers of its descriptors may be others' by now
        self._forget(child.main_end)
        child.main_end, child.stuck_at = -1, time.monotonic()

    def _hear(self, child: Child) -> None:
        if child.end.fileno() < 0:
            return
        message, fds = channel.receive(child.end)
        if message is None:
            self._forget(child.end)
            return
        if "keep" in message:
            self._kept.keep(message["keep"], fds)
            self._store_state()
        if "facts" in message:
            self._facts = message["facts"]
            self._store_state()
        if "settings" in message:
            self._settings = message["settings"]
            self._store_state()
        if "notify" in message:
            self._service.notify(message["notify"])
        child.heard(message)
        if "step" in message:
            self._answer.write({"step": message["step"]})
        if "serving" in message:
            self._now_serving()
        if "reload" in message and self._next_template is None:
            self._next_template = self._spawn_template()

    def _store_state(self) -> None:
        self._service.store_state({"facts": self._facts, "workers": self._workers, "settings": self._settings})

    def _now_serving(self) -> None:
        self._workers += 1
        self._died_at, self._reason = None, ""
        self._store_state()
        if self._old_template is not None:
            self._forget_template(self._old_template)  # a worker of the new code serves
            self._old_template = None
        self._let_predecessor_go()
        self._answer.last({"result": {}})

    def _worker_gone(self, child: Child) -> None:
        """Its process has ended: what now?"""
        if child is not self._child:
            return
        self._drain_channel(child)
        for end in (child.end, child.pidfd, child.main_end):
            self._forget(end)
        self._child = None
        now = time.monotonic()
        if child.exit_code is None and self._door.is_asked and self._give(child, now):
            return
        if child.exit_code is not None or self._stopping:
            self._finish(FAILED if child.exit_code is None else child.exit_code, child.error)
        elif self._workers == 0:
            if child.error is None or child.dumped_at:
                self._clear_away()
            self._finish(FAILED, child.error)
        else:
            self._replace(child, now)

    def _leave_behind(self, child: Child) -> None:
        """It will never run again, and may never end: the next one starts, and knows of it."""
        sys.stderr.write(f"acpfs: worker {child.pid} was killed in a call on the backing directory that does not return\n")
        self._kept.leave_behind(child.pidfd)
        self._worker_gone(child)

    def _drain_channel(self, child: Child) -> None:
        """What it said last."""
        with contextlib.suppress(OSError):
            child.end.setblocking(False)
            while child.end.fileno() >= 0:
                self._hear(child)

    def _replace(self, child: Child, now: float) -> None:
        self._died_at = self._died_at or child.stuck_at or now
        self._reason = "hung" if child.dumped_at else "reload" if child.leaving else "died"
        if PREDECESSOR in self._kept:
            self._fail((child.error or {}).get("message", "the worker of this version died before it served; see the log"))
            return
        if child.leaving and self._next_template is not None:
            self._old_template, self._template, self._next_template = self._template, self._next_template, None
            self._start_worker()
            return
        if self._old_template is not None and self._template is not None:
            self._forget_template(self._template)  # the new code's worker could not take over: back to the old one
            self._template, self._old_template = self._old_template, None
            self._reason = f"reload refused: {(child.error or {}).get('message', 'it did not start')}"
            self._start_worker()
            return
        delay_s = 0.0 if child.leaving else self._restarts.delay_s(now - child.serving_at if child.serving_at else 0.0)
        if delay_s is None:
            self._give_up(child)
        else:
            self._start_at = now + delay_s

    # -- from one supervisor to another

    def _asked(self, message: channel.Message) -> str:
        """Have the worker make room for the other supervisor's; or why not."""
        if "session" not in self._kept:
            return "a libfuse mount cannot be taken over: unmount and mount again"
        if message["backing"] != self._settings["backing"]:
            return f"the mount has another backing directory: {self._settings['backing']}"
        if self._child is None or not self._child.serving_at or self._stopping or self._next_template or self._old_template:
            return "its worker is being replaced just now, or ends"
        self._child.leaving = True
        self._tell_worker({"leave": True})
        return ""

    def _give(self, child: Child, now: float) -> bool:
        """What the next supervisor needs, now that nobody serves."""
        self._died_at = child.stuck_at or now
        state = {"facts": self._facts, "settings": self._settings, "workers": self._workers, "died_at": self._died_at}
        return self._door.give(self._kept.names(), self._kept.all(), state)

    def _go_on(self) -> None:
        """Whoever was given the mount has ended before it served."""
        self._reason = "a take-over failed: the other supervisor ended before its worker served"
        self._start_worker()

    def _outlived(self) -> None:
        """Another supervisor has the mount: nothing of it is this one's any more."""
        self._kept.let_go()
        self._door.close()
        if self._template is not None:
            self._forget_template(self._template)
        self._rests = not self._detached and not self._service.present
        self._finish(0)

    def _rest(self) -> None:
        """In the foreground: who runs a container would start it again, and that would take the mount back."""
        sys.stderr.write("acpfs: another process has taken the mount over; this one only waits to be ended\n")
        while not self._stopping:
            for key, _events in self._selector.select():
                key.data()

    def _ask_for_mount(self) -> None:
        self._answer.write({"step": "waiting for the supervisor that has the mount"})
        end = handover.ask(self._settings)
        if end is not None:
            self._watch(end, lambda: self._hear_predecessor(end))
        else:
            self._fail("its supervisor has ended meanwhile: mount again")

    def _hear_predecessor(self, end: socket.socket) -> None:
        message, fds = channel.receive(end)
        if message is not None and "kept" in message:
            self._settings, self._reason = message["settings"] | (self._take_over or {}), "taken over by another supervisor"
            self._facts, self._workers, self._died_at = message["facts"], message["workers"], message["died_at"]
            self._kept.keep(message["kept"], fds)
            self._store_state()
            self._kept[PREDECESSOR] = [os.dup(end.fileno())]
            self._start_worker()
            return
        self._forget(end)
        if message is not None:
            self._fail(message.get("refused", "its supervisor refuses to give it"), ExitCode.REFUSED)
        elif not self._workers:
            self._fail("its supervisor ended before it gave it: mount again")
        elif PREDECESSOR in self._kept:  # there is nobody to go back to: this one does what it can
            os.close(self._kept.pop(PREDECESSOR)[0])

    def _let_predecessor_go(self) -> None:
        """First this one can be asked, then the other one ends: at each moment there is one that answers."""
        if PREDECESSOR in self._kept:
            self._door.open(self._settings)
            handover.tell_serving(self._kept.pop(PREDECESSOR))
            self._take_over = None

    def _fail(self, why: str, code: ExitCode = ExitCode.FAILED) -> None:
        self._finish(FAILED, {"exit_code": int(code), "message": f"the mount cannot be taken over: {why}"})

    # -- time

    def _patience_s(self) -> float | None:
        now, times = time.monotonic(), []
        if self._start_at:
            times.append(self._start_at - now)
        if self._child is not None and self._child.stuck_at:
            times.append(stuck_processes.LOOK_AGAIN_S)
        elif self._child is not None:
            times.append(DUMP_WAIT_S / 2 if self._child.dumped_at else min(1.0, self._limits.shortest_s / 4))
        if self._next_template is not None:
            times.append(1.0)
        if self._service.watchdog_s:
            times.append(self._fed_at + self._service.watchdog_s - now)
        return max(0.0, min(times)) if times else None

    def _look_after(self) -> None:
        now = time.monotonic()
        self._kept.bury()
        if self._workers and self._child is not None and self._child.serving_at and "session" in self._kept:
            self._door.open(self._settings)
        if self._template is None and not self._ended:
            self._template = self._spawn_template()
        if self._start_at and now >= self._start_at and not self._ended:
            self._start_worker()
        if self._next_template is not None and now - self._next_template.spawned_at >= self._limits.start_s:
            self._next_template.kill()  # its end is told like that of one that cannot be loaded
        child = self._child
        healthy = child is None or self._look_at(child, now)
        if self._service.watchdog_s and healthy and now >= self._fed_at + self._service.watchdog_s:
            self._fed_at = now
            self._service.notify("WATCHDOG=1")

    def _look_at(self, child: Child, now: float) -> bool:
        """Whether the worker is well; one that is not is asked for its stacks, and then killed."""
        if child.pid and self._is_left_behind(child, now):
            return True
        if child.dumped_at:
            if now - child.dumped_at >= DUMP_WAIT_S:
                self._end_hung(child)
            return False
        if child.is_well(now, self._limits):
            return True
        child.dumped_at = now
        if child.pid:
            self._kill(child, signal.SIGUSR1)
        return False

    def _end_hung(self, child: Child) -> None:
        """Its process, or the template that does not fork it."""
        if child.pid:
            self._kill(child, signal.SIGKILL)
        elif self._template is not None:
            self._template.kill()

    def _is_left_behind(self, child: Child, now: float) -> bool:
        if not stuck_processes.is_stuck(child.pid) or len(self._kept.get(stuck_processes.STUCK, ())) >= stuck_processes.STUCK_MAX:
            if child.main_end >= 0:
                child.stuck_at = 0.0
            return False
        child.stuck_at = child.stuck_at or now
        if now - child.stuck_at < stuck_processes.STUCK_S:
            return False
        self._leave_behind(child)
        return True

    # -- the end

    def _give_up(self, child: Child) -> None:
        """No worker lives: let the mount fall through to the backing directory, if that lies beneath."""
        from pathlib import Path

        from acpfs.ram.mounts import unmount
        from acpfs.supervisor import fallthrough

        said = (child.error or {}).get("message", "it died")
        reason = f"{self._restarts.early} workers in a row could not serve; the last one: {said}"
        mountpoint, tier = self._settings["mountpoint"], self._facts.get("tier")
        with contextlib.suppress(OSError):
            fell = fallthrough.fall(Path(self._settings["runtime_dir"]), mountpoint, reason, tier=Path(tier) if tier else None)
            if not fell and self._settings.get("on_failure") != "stop":
                unmount(Path(mountpoint), detach=True)
        sys.stderr.write(f"acpfs: {mountpoint}: {reason}\n")
        self._finish(FAILED, child.error)

    def _clear_away(self) -> None:
        """The mount that never came to be: its worker was killed before it could do so."""
        from pathlib import Path

        from acpfs.supervisor import fallthrough

        fallthrough.clear_away(Path(self._settings["runtime_dir"]), self._settings["mountpoint"], mounted="session" in self._kept)

    def _finish(self, code: int, error: dict[str, Any] | None = None) -> None:
        self._exit_code, self._ended = code, True
        if self._kept.get(stuck_processes.STUCK) and PREDECESSOR not in self._kept:
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
        if isinstance(end, socket.socket):
            end.close()
        elif end >= 0:
            with contextlib.suppress(OSError):
                os.close(end)


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
        os.set_inheritable(answer_fd, False)
        supervisor.load()
    if not supervisor.told(json.loads(sys.stdin.buffer.read() or b"{}")):
        return FAILED
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
