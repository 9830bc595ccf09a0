"""Whether a device's memory was lost while the optimizer wrote to it, by times that the framework
gives. As the product decides it.
"""

from __future__ import annotations

from acpfs.compatible.refusal import UnsupportedError

_times: dict[str, int] = {}


def tft_set_update_start_time(start_time: int | None = None) -> None:
    _times["start"] = _given(start_time)


def tft_set_update_end_time(end_time: int | None = None) -> None:
    _times["end"] = _given(end_time)


def _given(value: int | None) -> int:
    if value is None:
        raise UnsupportedError(
            "without a time the product asks an event of the NPU: give the device's own time"
        )
    return value


def tft_can_do_uce_repair(
    hbm_error_time: int, start_time: int | None = None, end_time: int | None = None
) -> bool:
    """Whether the error came after the update, or inside one that a later update's state
    replaces.
    """
    start = _times.get("start") if start_time is None else start_time
    end = _times.get("end") if end_time is None else end_time
    if not hbm_error_time or not start or not end:
        return False
    return max(start, end) < hbm_error_time or start < hbm_error_time < end
