"""What `mindio_acp` promises, through the mount: the functions behind that package's names. torch
is imported where it is asked for.

Return codes are the product's, and where it says "failed" without a reason, the reason is in the
log (logger `acpfs.compatible`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from acpfs import client
from acpfs.compatible import product_container
from acpfs.compatible.whole_files import ReadableFile, WriteableFile
from acpfs.control import registry
from acpfs.control.client import request
from acpfs.errors import AcpfsError, DeadlineError, NotMountedError
from acpfs.logger import get_logger

log = get_logger("acpfs.compatible")
IN_MOUNT = 1
ELSEWHERE = 2
FAILED = -1
"""What `save` says: the product's "memfs", "fopen" and failure."""
SERVER_INFO: Mapping[str, tuple[int, int] | None] = {
    "memfs.data_block_pool_capacity_in_gb": (1, 1024),
    "memfs.data_block_size_in_mb": (1, 1024),
    "memfs.write.parallel.enabled": None,
    "memfs.write.parallel.thread_num": (2, 96),
    "memfs.write.parallel.slice_in_mb": (1, 1024),
    "background.backup.thread_num": (1, 256),
}
"""The product's keys and their ranges; None: true or false."""
OPEN_WAYS = ("memfs", "fopen")
TIMEOUT_S_MAX = 3600
COME = ("verified", "unknown", "in RAM")
"""What `preload` says of files that are in RAM."""


def initialize(server_info: dict[str, str] | None = None) -> int:
    """0 where a mount is there, -1 where none is or a key is not known.

    Nothing is started: the mount has its own settings.
    """
    try:
        _check(server_info or {})
        mounts = [
            record
            for record in registry.records()
            if record.alive and os.access(record.socket, os.W_OK)
        ]
        if not mounts:
            raise NotMountedError("no acpfs is mounted for this user")
        wanted = (server_info or {}).get("memfs.data_block_pool_capacity_in_gb")
        if wanted is not None:
            _compare(
                int(wanted) << 30,
                [client.status(record.mountpoint)["ram"]["budget_bytes"] for record in mounts],
            )
    except (AcpfsError, ValueError) as error:
        log.error("initialize", why=str(error))
        return FAILED
    return 0


def _check(server_info: Mapping[str, str]) -> None:
    for key, value in server_info.items():
        if key not in SERVER_INFO:
            raise ValueError(f"there is no key {key!r}; known are {', '.join(SERVER_INFO)}")
        limits = SERVER_INFO[key]
        if limits is None:
            if value not in ("true", "false"):
                raise ValueError(f"{key} = {value!r}: true or false")
        elif not str(value).isdecimal() or not limits[0] <= int(value) <= limits[1]:
            raise ValueError(f"{key} = {value!r}: {limits[0]} to {limits[1]}")


def _compare(wanted: int, budgets: list[int]) -> None:
    if max(budgets) < wanted:
        log.warning(
            "the mount has less RAM than the script asks for: --ram sets it",
            asked_bytes=wanted,
            ram_bytes=max(budgets),
        )


def create_file(path: str, mode: int = 0o600) -> WriteableFile:
    """A file to write; it has its name when it is closed."""
    return WriteableFile(path, mode)


def open_file(path: str) -> ReadableFile:
    """A file to read."""
    return ReadableFile(path)


def save(obj: Any, path: str, open_way: str = "memfs") -> int:
    """As `torch.save`, whole or not at all; 1 in a mount, 2 elsewhere, -1 when it failed."""
    from acpfs.training.torch import pickled_files

    try:
        _known_way(open_way)
        with _written(path) as file:
            pickled_files.save(obj, file)
    except Exception:  # whatever an object's own pickling raises; the caller is told by the code
        log.exception("save", path=path)
        return FAILED
    return IN_MOUNT if _lies_in_mount(path) else ELSEWHERE


def load(
    path: str, open_way: str = "memfs", map_location: Any = None, weights_only: bool = True
) -> Any:
    """As `torch.load`; also what the product itself saved.

    Raises:
        AcpfsError: a container of the product that is damaged, or of a kind that is not documented.
    """
    from acpfs.training.torch import pickled_files

    _known_way(open_way)
    with open(path, "rb") as file:
        container = product_container.read_container(file)
        if container is None:
            return pickled_files.load(path, map_location, weights_only)
        if container.plain_size is not None:
            file.seek(0)
            return file.read(container.plain_size)
        return pickled_files.load_rewritten(
            lambda target: product_container.rewrite(file, container, target),
            map_location,
            weights_only,
        )


def multi_save(obj: Any, path_list: Any) -> int | None:
    """The same file under several names: written once, then linked; copied where the storage has no
    links. None when it failed.
    """
    from acpfs.training.torch import pickled_files

    if not isinstance(path_list, list | tuple) or not path_list:
        log.error("multi_save", why="no list of paths")
        return None
    code = save(obj, path_list[0])
    if code == FAILED:
        return None
    for path in path_list[1:]:
        try:
            if not _linked(path_list[0], path):
                with _written(path) as file:
                    pickled_files.save(obj, file)
        except OSError as error:  # what cannot be pickled was noticed with the first
            log.error("multi_save", path=path, why=str(error))
            return None
    return code


def _linked(first: str, path: str) -> bool:
    temporary = os.path.join(
        os.path.dirname(os.path.abspath(path)), f".{os.path.basename(path)}.{os.getpid()}.link.tmp"
    )
    try:
        os.link(first, temporary)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            return False
        raise
    try:
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # it is there where both are one file already
            os.unlink(temporary)
    return True


@contextlib.contextmanager
def _written(path: str) -> Iterator[IO[bytes]]:
    """A file for torch to write, with the permissions that it would have made it with; its name
    comes last.
    """
    final = os.path.abspath(path)
    temporary = os.path.join(
        os.path.dirname(final),
        f".{os.path.basename(final)}.{os.getpid()}.{threading.get_ident()}.tmp",
    )
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, final)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _known_way(open_way: str) -> None:
    if open_way not in OPEN_WAYS:
        raise ValueError(f"open_way = {open_way!r}: memfs or fopen (both are the mount here)")


def _lies_in_mount(path: str) -> bool:
    try:
        registry.locate(os.path.abspath(path))
    except NotMountedError:
        return False
    return True


def register_checker(
    callback: Any, check_dict: Mapping[str, int], user_context: Any, timeout_sec: int
) -> int | None:
    """Have `callback(result, user_context)` called, in a thread, when each directory has so many
    files and all are persisted.

    Persisted: on stable storage, with checksums in the manifest. `result`: 0; -ETIMEDOUT: not in
    time; -EFBIG: more files than said; -EIO: the storage refused one. 1: it will be called; None:
    it will not.
    """
    try:
        if not callable(callback) or not check_dict:
            raise ValueError("it needs a callback and directories")
        if not 1 <= timeout_sec <= TIMEOUT_S_MAX:
            raise ValueError(f"timeout_sec = {timeout_sec}: 1 to {TIMEOUT_S_MAX}")
        for path, count in check_dict.items():
            if count < 0:
                raise ValueError(f"{count} files below {path}")
            registry.locate(os.path.abspath(path))
    except (ValueError, TypeError, AcpfsError) as error:
        log.error("register_checker", why=str(error))
        return None
    wanted = {os.path.abspath(path): count for path, count in check_dict.items()}
    deadline = time.monotonic() + timeout_sec

    def watch() -> None:
        callback(_checked(wanted, deadline), user_context)

    threading.Thread(target=watch, name="acpfs-checker", daemon=True).start()
    return 1


def _checked(wanted: Mapping[str, int], deadline: float) -> int:
    try:
        for path, count in wanted.items():
            client.wait_persisted(path, max(0.0, deadline - time.monotonic()), count=count)
            there = sum(len(files) for _, _, files in os.walk(path))
            if there > count:
                log.error("more files than the script said", path=path, said=count, found=there)
                return -errno.EFBIG
    except DeadlineError:
        return -errno.ETIMEDOUT
    except AcpfsError as error:
        log.error("the checker failed", why=str(error))
        return -errno.EIO
    return 0


def preload(*path: str | Iterable[str]) -> int:
    """Bring files to RAM, compared with their checksums; 0 when all are there, else 1."""
    paths = [
        name
        for given in path
        for name in ([given] if isinstance(given, str | os.PathLike) else given)
    ]
    try:
        if not paths:
            raise ValueError("no path is named")
        for name in paths:
            record, below = registry.locate(os.path.abspath(name))
            found = request(record, "preload", {"paths": [below], "latest": False, "wait": True})[
                "items"
            ]
            if bad := [file for file in found if file["status"] not in COME]:
                raise ValueError(f"{bad[0]['path']}: {bad[0]['status']}")
            if not found and not Path(name).is_dir():
                raise ValueError(f"{name} is not there")
    except (ValueError, AcpfsError) as error:
        log.error("preload", why=str(error))
        return 1
    return 0


def flush() -> int:
    """Return when everything that is complete in this user's mounts is persisted: 0; 1 where the
    storage refused some of it.
    """
    mounts = [
        record
        for record in registry.records()
        if record.alive and os.access(record.socket, os.W_OK)
    ]
    try:
        if not mounts:
            raise NotMountedError("no acpfs is mounted for this user")
        for record in mounts:
            client.flush(record.mountpoint)
    except AcpfsError as error:
        log.error("flush", why=str(error))
        return 1
    return 0


def convert(src: str, dst: str) -> int:
    """Write what the product saved as a plain torch file; 0, or -1."""
    try:
        if any(os.path.islink(path) for path in (src, dst)):
            raise ValueError("a symbolic link is not followed")
        product_container.convert(Path(src), Path(dst))
    except (OSError, ValueError, AcpfsError) as error:
        log.error("convert", source=src, target=dst, why=str(error))
        return FAILED
    return 0
