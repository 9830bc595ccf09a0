"""Who has the charge of a fault: the first that takes it."""

from __future__ import annotations

import threading

import pytest

from acpfs.training.interrupt import Charge, Interrupter


def charge_of(run: list[str], done: threading.Event | None = None) -> Charge:
    def handle() -> None:
        assert charge.take()
        run.append(threading.current_thread().name)
        if done:
            done.set()

    charge = Charge(Interrupter(threading.get_ident(), lambda: False, 3600.0, 3600.0), handle)
    return charge


def test_a_main_thread_that_came_is_not_replaced() -> None:
    run: list[str] = []
    charge = charge_of(run)
    assert charge.take()
    charge.stand_in()
    assert charge.take()  # may be asked again
    assert not run


@pytest.mark.clause("T24")
def test_a_main_thread_that_comes_late_waits_and_goes_on_when_nobody_commands() -> None:
    run: list[str] = []
    done = threading.Event()
    charge = charge_of(run, done)
    late = list[bool]()
    main = threading.Thread(target=lambda: late.append(charge.take()))
    charge._interrupter.hand_over = lambda thread: None  # type: ignore[method-assign]  # this thread is not to get an exception
    charge.stand_in()
    done.wait()
    main.start()
    assert run == ["acpfs-stand-in"]
    assert not late
    charge.give_up()
    main.join()
    assert late == [False]
