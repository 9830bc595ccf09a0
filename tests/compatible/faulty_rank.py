"""A script of the product again and again in one process: `python -m tests.compatible.faulty_rank
DIRECTORY KIND`.

Each function of acpfs that it reaches fails once, and the train function comes to what it comes to
without acpfs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback

from acpfs.compatible import framework, registering
from acpfs.compatible.processor import Processor
from acpfs.training.member import Member
from acpfs.training.messages import (
    Done,
    ExitStatus,
    Finished,
    Leave,
    Message,
    Trouble,
)
from tests.training.injection import Coordinator, InjectedError, Seen
from tests.training.scripted_coordinator import JOB

WAYS_IN = frozenset(f"framework.{name}" for name in vars(framework) if name.startswith("tft_")) | {
    "framework._note_signal"
}
"""What a script calls, and leaves all else to the guard."""
STEPS = 3
FAILS_AT = 2
"""The step at which the script fails by itself, where it does."""


class OwnError(Exception):
    """Of the script."""


def started(processor: Processor, *_: object) -> None:
    processor._address = "a socket pair"


def fail(*_: object) -> None:
    raise InjectedError("in the processor's thread")


class Controller(Coordinator):
    """Of the only rank."""

    def hears(self, message: Message) -> None:
        if isinstance(message, Finished):
            self.scripted.say(Done())
        elif isinstance(message, Trouble):
            self.scripted.say(Leave(ExitStatus.NOT_SAVED, "of the test"), generation=1)


class Script:
    """Of one kind: `saves`, `goes_on`, `fails` or `fails_and_goes_on`; `thread` in front: its
    thread fails, too.
    """

    def __init__(self, kind: str) -> None:
        self.goes_on = kind.endswith("goes_on")
        self.fails = "fails" in kind
        self.thread_fails = kind.startswith("thread")

    def train(self) -> list[int]:
        done = []
        for step in range(1, STEPS + 1):
            framework.tft_set_step_args("arguments")
            framework.tft_start_updating_os(-1)
            if self.fails and step == FAILS_AT:
                raise OwnError
            done.append(step)
            framework.tft_end_updating_os(step)
            framework.tft_reset_limit_step()
            framework.tft_pause_train(step)
            assert framework.tft_get_repair_step() == 0
            assert not framework.tft_is_reboot_node()
            signal.raise_signal(signal.SIGTERM)
        return done

    def run(self, seen: Seen) -> tuple[list[int] | str, str]:
        """What it comes to, and what protection ended with."""
        framework._job = framework._Job()
        controller = Controller()
        # to mypy a method is nothing that changes
        setattr(Processor, "start", started)  # noqa: B010
        if self.thread_fails:
            setattr(Member, "order", fail)  # noqa: B010
        setattr(Processor, "_link", lambda _: controller.scripted.member_end)  # noqa: B010
        framework.tft_init_processor(0, 1, False, False, enable_arf=self.goes_on)
        framework.tft_start_processor("127.0.0.1", 6000)
        registering.tft_register_exit_handler(lambda _: None)
        framework.tft_set_optimizer_replica(
            0, [{"rank_list": [0], "replica_cnt": 1, "replica_shift": 0}]
        )
        processor = framework._job.processor
        assert processor is not None
        assert processor._member is not None
        processor._member.parked = False
        while self.thread_fails and not controller.goodbyes:
            threading.Event().wait(0.01)
        processor.exit_s = 0.0
        processor.end_process = str
        train = framework.tft_exception_handler(self.train)
        sys.setprofile(seen)
        try:
            found: list[int] | str = train()
        except OwnError:
            found = "its own error"
            sys.setprofile(None)
            framework.tft_destroy_processor()  # as the end of the process would
        finally:
            sys.setprofile(None)
        return found, controller.heard().why


def main() -> None:
    os.environ["TTP_LOG_PATH"], kind = sys.argv[1:]
    os.environ["MINDX_TASK_ID"] = JOB
    script = Script(kind)
    expected = "its own error" if script.fails else list(range(1, STEPS + 1))
    seen = Seen(ways_in=WAYS_IN)
    if script.thread_fails:
        came = script.run(seen)
        assert came == (expected, "InjectedError: in the processor's thread"), came
        return
    assert script.run(seen) == (expected, "")
    assert seen.paths
    ended = 0
    for path, name in seen.paths.items():
        fails = Seen(path, WAYS_IN)
        found, why = script.run(fails)
        assert found == expected, (name, found)
        assert fails.has_failed, name
        assert not why or why.startswith("InjectedError") or why == "its end failed", why
        ended += bool(why)
    print(len(seen.paths), "calls,", ended, "of them ended protection", flush=True)


if __name__ == "__main__":
    status = 0
    try:
        main()
    except BaseException:  # noqa: BLE001  # whatever it is
        traceback.print_exc()
        status = 1
    os._exit(status)  # threads of a run that failed would wait
