"""`tft_register_…_handler`: one function each, as the product has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from acpfs.compatible.framework import register_handler
from acpfs.compatible.handlers import Event


def tft_register_save_ckpt_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    register_handler(Event.SAVE, func, ctx)


def tft_register_rename_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    register_handler(Event.RENAME, func, ctx)


def tft_register_exit_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    register_handler(Event.EXIT, func, ctx)


def tft_register_stop_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    register_handler(Event.STOP, func, ctx)


def tft_register_clean_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    register_handler(Event.CLEAN, func, ctx)


def tft_register_rebuild_group_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    register_handler(Event.REBUILD_GROUP, func, ctx)


def tft_register_repair_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    register_handler(Event.REPAIR, func, ctx)


def tft_register_rollback_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    register_handler(Event.ROLLBACK, func, ctx)


def tft_register_stream_sync_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    register_handler(Event.STREAM_SYNC, func, ctx)


def tft_register_zit_upgrade_rollback_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    register_handler(Event.ZIT_UPGRADE_ROLLBACK, func, ctx)


def tft_register_zit_upgrade_repair_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    register_handler(Event.ZIT_UPGRADE_REPAIR, func, ctx)


def tft_register_zit_upgrade_rebuild_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    register_handler(Event.ZIT_UPGRADE_REBUILD, func, ctx)


def tft_register_zit_downgrade_rebuild_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    register_handler(Event.ZIT_DOWNGRADE_REBUILD, func, ctx)
