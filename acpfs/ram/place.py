"""Where a RAM tier lies: one directory per (volume, node), on a tmpfs of its own where this process
may mount one.

The directory outlives the daemon. The next mount of the same backing directory takes it over with
all that is left in it; `give_up` removes it once nothing is. `meta.json` inside says whose it is,
and a tier that belongs to another backing directory is refused. A lock beside it keeps a second
daemon out. Not thread-safe: used at start and end, and by `set ram`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from acpfs.errors import MachineError, RefusedError
from acpfs.ram.memory import PAGE_BYTES
from acpfs.ram.mounts import bind, mount_tmpfs, mounted_at, unmount
from acpfs.ram.numa import mount_option, policy_of
from acpfs.ram.shortage import available_bytes
from acpfs.ram.state_space import RESERVE_BYTES, StateSpace

# not a temporary file: the one tmpfs that every user has
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
STATE_SLACK_BYTES_MIN = 128 << 20
STATE_BYTES_MAX = 2 << 30
"""How far the state's tmpfs grows, whatever the budget is."""
BALLAST = "reserve"
DATA = "data"
"""The bytes have a tmpfs of their own below the state's: writers that the daemon does not see can
fill it, and the state must go on.
"""
SLACK_BYTES_MIN = 256 << 20
SLACK_BYTES_MAX = 2 << 30
"""How far the bytes may go beyond the budget for a moment: what writers in the passthrough lane
write until they are held. At 8 GB/s the smallest is 32 ms of writing, the largest is one write(2),
which Linux cuts at 2 GiB.
"""
HUGE_CHOICES = ("within_size", "advise", "")
"""Not every kernel is built with huge pages."""
SMALL_PAGES = "with small pages large writes take about 4 times as long"
"""Huge ones: 22.9 instead of 3.0 GB/s for a new file (bench/results/native.md)."""
_META = "meta.json"
_SUFFIXES = frozenset({".sock", ".handover", ".json", ".log"})
"""Of a mount's files in the run directory. What a node id has behind a dot is part of it."""
_GIVEN_UP = "given-up"
"""A mark in a tier that holds nothing any more and is being removed."""
STATE_FILE = "state.sqlite"


@dataclass(slots=True)
class Place:
    """A RAM tier's directory, taken; `warnings` are for the log and `status`."""

    directory: Path
    budget_bytes: int
    own_tmpfs: bool
    huge: str
    found: bool
    lock_fd: int
    warnings: list[str] = field(default_factory=list)
    names: Collection[str] = ()
    """See `find_again`."""
    kept_until: float | None = None
    """All that an earlier mount of the node had closed before then was found elsewhere, by its
    clock; None: that is not known.
    """
    is_lent: bool = False
    """Whether its tmpfs was given more than its size since `fit` looked last."""


def take(
    tiers: Path,
    volume_id: str,
    node_id: str,
    backing: Path,
    budget_bytes: int,
    *,
    numa: str = "default",
    shared_memory: Path = SHARED_MEMORY,
    lock_fd: int = -1,
    names: Collection[str] = (),
) -> Place:
    """Find or make the tier of this volume and node, below `tiers` (in the runtime directory).

    `numa`: its memory policy.

    `lock_fd`: the lock that an earlier worker of the same mount had, and that was kept. `names`:
    see `find_again`.

    Raises:
        RefusedError: another daemon uses it, or it belongs to another backing directory.
        MachineError: no tmpfs is large enough, or the memory policy names what this machine has not
            got.
    """
    policy = mount_option(numa)
    name = f"{volume_id}-{node_id}"
    if lock_fd >= 0:
        find_again(tiers / name, lock_fd, names)
    lock_fd = _lock(tiers / f"{name}.lock", name) if lock_fd < 0 else lock_fd
    try:
        place = _take_locked(
            tiers / name,
            shared_memory / f"acpfs-{os.getuid()}" / name,
            budget_bytes,
            policy,
            lock_fd,
        )
        _check_owner(place, volume_id, node_id, backing)
    except BaseException:
        os.close(lock_fd)
        raise
    place.names = names
    place.warnings += _others_left(tiers, volume_id, name)
    return place


def find_again(directory: Path, lock_fd: int, names: Collection[str] = ()) -> bool:
    """Show the tier at its place again where somebody has moved the run directory away; whether
    anything was done for that.

    The lock lies beside it, and is open: by its path now the tier is found. `names`: of the mount's
    files in the run directory, without their suffix.
    """
    moved = Path(os.readlink(f"/proc/self/fd/{lock_fd}").removesuffix(".lock"))
    if moved == directory or moved.name != directory.name or mounted_at(str(moved)) is None:
        return False
    if mounted_at(str(directory)) is None:
        _private_directory(directory)
        bind(moved, directory)
    elif directory.stat().st_dev != moved.stat().st_dev:
        return False  # another one is there by now
    _bring_back(moved.parent.parent, directory.parent.parent, {*names, directory.name})
    # What shows where the tier was is the last to go: who dies before finds it, and does the rest.
    with contextlib.suppress(OSError):  # there it would stay for ever
        unmount(moved, detach=True)
    lock = directory.with_name(f"{directory.name}.lock")
    if not os.path.lexists(lock):
        with contextlib.suppress(OSError):
            moved.with_name(lock.name).rename(lock)
    return True


def _bring_back(moved: Path, runtime: Path, names: Collection[str]) -> None:
    """What lay beside the tiers: the node id, locks, and what says how the mount is to be ended.

    Each by a rename, and nothing over what has been made anew. What is of other mounts they bring
    back themselves, or they were begun where it lies now; and what is remembered for all is copied.
    """
    for found in [one for one in moved.glob("*/*") if one.parent.name != "tiers"]:
        place = runtime / found.parent.name / found.name
        with contextlib.suppress(OSError):
            place.parent.mkdir(mode=found.parent.stat().st_mode & 0o777, exist_ok=True)
            if found.is_dir():
                _copy_missing(found, place)
            elif _is_of(found, names) and not os.path.lexists(place):
                found.rename(place)


def _is_of(file: Path, names: Collection[str]) -> bool:
    return file.name in names or (file.suffix in _SUFFIXES and file.stem in names)


def _copy_missing(directory: Path, place: Path) -> None:
    place.mkdir(mode=directory.stat().st_mode & 0o777, exist_ok=True)
    for file in directory.iterdir():
        if file.is_file() and not os.path.lexists(place / file.name):
            temporary = place / f".{file.name}.new"
            shutil.copy2(file, temporary)
            temporary.rename(place / file.name)


def slack_bytes(budget_bytes: int) -> int:
    """How far beyond its budget a RAM tier's tmpfs can be filled."""
    return min(SLACK_BYTES_MAX, max(SLACK_BYTES_MIN, budget_bytes // 8))


def resize(place: Place, budget_bytes: int) -> None:
    """Give the tier's tmpfs the size that a budget takes; while it holds more, `fit` does the rest.

    Raises:
        MachineError: it lies on a tmpfs that is not ours to resize, and that is smaller.
    """
    if not place.own_tmpfs and budget_bytes > _capacity_bytes(place.directory):
        raise MachineError(f"{place.directory} has only {_capacity_bytes(place.directory)} bytes")
    place.budget_bytes = budget_bytes
    if place.own_tmpfs:
        with contextlib.suppress(
            OSError
        ):  # smaller than what the state takes: that is as large as it has to be
            mount_tmpfs(place.directory, _state_size(budget_bytes), remount=True)
        fit(place)


def fit(place: Place) -> bool:
    """Bring the tmpfs of the bytes to the size of the budget, or as near to it as what it still
    holds lets; whether it is there.

    Cheap when it is: called every second, so that a budget that was lowered is followed as RAM
    drains.
    """
    if not place.own_tmpfs:
        return True
    if place.is_lent:  # not between two looks of whoever lends it
        place.is_lent = False
        return False
    wanted = _rounded(place.budget_bytes + slack_bytes(place.budget_bytes))
    capacity = _capacity_bytes(place.directory / DATA)
    # Never more than it has, whatever was written: a write of a passthrough writer that cannot be
    # held ends at this limit.
    size = max(
        wanted, min(capacity, _rounded(taken_bytes(place) + slack_bytes(place.budget_bytes)))
    )
    if size != capacity:
        try:
            mount_tmpfs(place.directory / DATA, f"size={size}", remount=True)
        except OSError:  # more was written meanwhile
            return False
    return size == wanted


def lend(place: Place) -> None:
    """Let the tmpfs of the bytes take half of the memory that the machine has left, or a whole
    slack where it has that.

    For writers that nobody holds for a moment: the kernel would tell them ENOSPC. How much they
    write until it is looked again is a matter of how long that takes, and no number is sure to be
    enough for it. `fit` takes it back, not before its second look, as RAM drains.
    """
    if not place.own_tmpfs:
        return
    slack = slack_bytes(place.budget_bytes)
    try:
        available = max(0, available_bytes())
    except OSError:  # no descriptor left to look with
        available = slack
    place.is_lent = True
    size = _rounded(taken_bytes(place) + max(available // 2, min(slack, available)))
    if size > (size_bytes(place) or size):
        with contextlib.suppress(OSError):  # not allowed to: it ends where it ends
            mount_tmpfs(place.directory / DATA, f"size={size}", remount=True)


def _rounded(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def let_go(place: Place) -> None:
    """Leave the tier to the next daemon."""
    os.close(place.lock_fd)


def give_up(place: Place) -> None:
    """Remove the tier; called when nothing is left in it that the backing directory has not got."""
    with contextlib.suppress(OSError):
        (place.directory / _GIVEN_UP).touch()  # with it nobody takes over what is half gone
    if place.own_tmpfs:
        with contextlib.suppress(OSError):
            shutil.rmtree(
                place.directory / DATA, ignore_errors=True
            )  # a container that was started meanwhile may have a copy of the mount
            unmount(place.directory, detach=True)
            place.directory.rmdir()
    else:
        shutil.rmtree(place.directory, ignore_errors=True)
    os.close(place.lock_fd)


def way_out(place: Place) -> str:
    """For a tier that cannot be used as it is: what is there, that it was left alone, and what a
    person can do.
    """
    files = 0
    size = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(place.directory / DATA):
            files = files + 1
            size = size + os.lstat(place.directory / DATA / name).st_size
    remove = f"umount -l {place.directory}" if place.own_tmpfs else f"rm -r {place.directory}"
    return (
        f"{files} files of {size} bytes in {place.directory / DATA} may not be on the backing "
        "directory, and were left alone: "
        f"copy them with `acpfs salvage {place.directory} TARGET`, then start without them after "
        f"`{remove}`"
    )


def _lock(path: Path, name: str) -> int:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise RefusedError(
            f"the identity is in use: another acpfs on this machine serves volume and node {name}"
        ) from None
    return fd


def _take_locked(own: Path, shared: Path, budget_bytes: int, policy: str, lock_fd: int) -> Place:
    if _is_left(shared):
        return _on_shared_memory(
            shared,
            budget_bytes,
            policy,
            lock_fd,
            found=True,
            reason="what is left of the last mount lies there",
        )
    _private_directory(own)
    if mounted_at(str(own)) is not None and not _is_left(own):
        unmount(own, detach=True)  # its maker, or who removed it, died in the middle
    if mounted_at(str(own)) is not None:
        data = mounted_at(str(own / DATA))
        if data is None:
            raise MachineError(
                f"{own} has no tmpfs for its bytes; move what is in {own / DATA} away, and "
                "unmount it"
            )
        place = Place(
            own,
            budget_bytes,
            own_tmpfs=True,
            huge=_huge_of(data.options),
            found=_is_left(own),
            lock_fd=lock_fd,
        )
        if not policy and policy_of(data.options) != "default":
            # what default means, but for a remount, which takes it for nothing said
            policy = ",mpol=local"
        return _resized(place, budget_bytes, policy)
    try:
        huge = _mount(own, budget_bytes, policy)
    except OSError as error:
        with contextlib.suppress(OSError):
            unmount(own, detach=True)
        own.rmdir()
        return _on_shared_memory(
            shared,
            budget_bytes,
            policy,
            lock_fd,
            found=False,
            reason=f"mounting a tmpfs: {error.strerror}",
        )
    return Place(own, budget_bytes, own_tmpfs=True, huge=huge, found=False, lock_fd=lock_fd)


def _resized(place: Place, budget_bytes: int, policy: str) -> Place:
    if policy:
        try:
            mount_tmpfs(place.directory / DATA, policy.removeprefix(","), remount=True)
        except OSError as error:
            raise _policy_refused(policy, error) from error
    resize(place, budget_bytes)
    return place


def _mount(directory: Path, budget_bytes: int, policy: str) -> str:
    mount_tmpfs(directory, f"{_state_size(budget_bytes)},mode=0700")
    (directory / DATA).mkdir(mode=0o700)
    for huge in HUGE_CHOICES:
        options = f"{_data_size(budget_bytes)},mode=0700{policy}" + (
            f",huge={huge}" if huge else ""
        )
        try:
            mount_tmpfs(directory / DATA, options)
        except OSError as error:
            if error.errno == errno.EINVAL and huge:
                continue
            if error.errno == errno.EINVAL and policy:
                raise _policy_refused(policy, error) from error
            raise
        return huge or "never"
    raise AssertionError("unreachable: the last choice returns or raises")


def _policy_refused(policy: str, error: OSError) -> MachineError:
    return MachineError(
        f"the kernel refuses the memory policy {policy.removeprefix(',')} that `numa` asks for: "
        f"{error.strerror}"
    )


def _data_size(budget_bytes: int) -> str:
    """nr_inodes=0: small files must not run out of inodes."""
    return f"size={_rounded(budget_bytes + slack_bytes(budget_bytes))},nr_inodes=0"


def _state_size(budget_bytes: int) -> str:
    """Room for the state database: a few hundred bytes per file, and its write-ahead log."""
    return f"size={max(STATE_SLACK_BYTES_MIN, budget_bytes // 16)},nr_inodes=0"


def state_space(place: Place) -> StateSpace:
    """Room for the state database."""
    if place.own_tmpfs:
        return StateSpace(partial(_free_bytes, place.directory), partial(_grow_state, place))
    reserve = shared_reserve_bytes(_capacity_bytes(place.directory), place.budget_bytes)
    return StateSpace(
        partial(_free_bytes, place.directory),
        ballast=place.directory / BALLAST,
        reserve_bytes=reserve,
    )


def shared_reserve_bytes(capacity_bytes: int, budget_bytes: int) -> int:
    """The state's reserve on a tmpfs that has the bytes of files, too: from what their budget
    leaves.

    With more, a RAM tier that is full as it may be, where writers are to wait, would count as a
    state that has no room.
    """
    return min(RESERVE_BYTES, max(0, capacity_bytes - budget_bytes) // 4)


def _free_bytes(directory: Path) -> int:
    try:
        info = os.statvfs(directory)
    except FileNotFoundError:
        return 1 << 62  # it was moved away, and is found again in a moment
    return info.f_frsize * info.f_bavail


def _grow_state(place: Place) -> bool:
    """By half, as far as the machine has memory; False: it stays as it is."""
    if not place.own_tmpfs:
        return False
    capacity = _capacity_bytes(place.directory)
    size = _rounded(
        min(
            capacity + max(capacity // 2, STATE_SLACK_BYTES_MIN),
            max(STATE_BYTES_MAX, place.budget_bytes // 8),
        )
    )
    if size <= capacity or available_bytes() < 2 * (size - capacity):
        return False
    try:
        mount_tmpfs(place.directory, f"size={size}", remount=True)
    except OSError:
        return False
    return True


def taken_bytes(place: Place) -> int:
    """Bytes that the tier's own tmpfs holds now, those among them that the kernel has only just
    written.
    """
    try:
        info = os.statvfs(place.directory / DATA)
    except FileNotFoundError:
        return 0  # see `_free_bytes`
    return info.f_frsize * (info.f_blocks - info.f_bfree)


def size_bytes(place: Place) -> int:
    """Most that the tier's own tmpfs takes."""
    try:
        return _capacity_bytes(place.directory / DATA)
    except FileNotFoundError:
        return 0  # see `_free_bytes`


def spare_tmpfs(place: Place, size_bytes: int) -> int | None:
    """A file without a name on another tmpfs like the tier's, for memory that is to be given back
    later; it ends with its descriptor.

    None where the tier has no tmpfs of its own, or the kernel refuses.
    """
    if not place.own_tmpfs:
        return None
    data = mounted_at(str(place.directory / DATA))
    policy = policy_of(data.options) if data is not None else "default"
    options = f"size={size_bytes},mode=0700,huge={place.huge}" + (
        f",mpol={policy}" if policy != "default" else ""
    )
    directory = place.directory / "spare"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        mount_tmpfs(directory, options)
        try:
            return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        finally:
            unmount(directory, detach=True)
    except OSError:
        return None


def _others_left(tiers: Path, volume_id: str, mine: str) -> list[str]:
    """Tiers of the same backing directory that no daemon has: left by a mount that had another id,
    and alone drains them.
    """
    warnings = []
    for file in sorted(tiers.glob(f"{volume_id}-*.lock")):
        name = file.name.removesuffix(".lock")
        if name == mine or mounted_at(str(tiers / name)) is None:
            continue
        with contextlib.suppress(RefusedError):
            os.close(_lock(file, name))
            node = name.removeprefix(f"{volume_id}-")
            warnings.append(
                f"an earlier mount under node id {node} left a RAM tier that is not drained: "
                f"mount with --node-id {node} to drain it"
            )
    return warnings


def _on_shared_memory(
    directory: Path, budget_bytes: int, policy: str, lock_fd: int, *, found: bool, reason: str
) -> Place:
    _private_directory(directory.parent)
    if not found:
        shutil.rmtree(directory, ignore_errors=True)  # who removed the last one died in the middle
    _private_directory(directory)
    capacity = _capacity_bytes(directory)
    if budget_bytes > capacity:
        raise MachineError(
            f"no tmpfs of its own for the RAM tier ({reason}), and {directory.parent.parent} has "
            f"only {capacity >> 20} MiB: "
            f"give a smaller ram, or more shared memory"
        )
    warning = (
        f"the RAM tier lies in {directory.parent.parent} ({reason}): {SMALL_PAGES}, and others "
        "can fill it"
    )
    place = Place(
        directory,
        budget_bytes,
        own_tmpfs=False,
        huge="never",
        found=found,
        lock_fd=lock_fd,
        warnings=[warning],
    )
    if policy:
        place.warnings.append(
            "the memory policy that `numa` asks for has no effect: it takes a tmpfs of its own"
        )
    return place


def _private_directory(path: Path) -> None:
    """A directory of ours that nobody else can enter; a symlink or somebody else's directory at
    that name is refused.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    st = path.lstat()
    if not stat.S_ISDIR(st.st_mode) or st.st_uid != os.getuid() or st.st_mode & 0o077:
        raise RefusedError(f"{path} is not a private directory of this user")


def _capacity_bytes(path: Path) -> int:
    info = os.statvfs(path)
    return info.f_frsize * info.f_blocks


def _huge_of(options: str) -> str:
    return next(
        (option.partition("=")[2] for option in options.split(",") if option.startswith("huge=")),
        "never",
    )


def _is_left(directory: Path) -> bool:
    """Whether an earlier daemon may have left something, whatever of its own files is missing.

    What is in doubt is never thrown away.
    """
    if not directory.is_dir() or (directory / _GIVEN_UP).exists():
        return False
    return _has_meta(directory) or (directory / STATE_FILE).exists() or has_bytes(directory)


def has_bytes(directory: Path) -> bool:
    """Whether there are tier files in a tier's directory."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory / DATA) as entries:
        return next(entries, None) is not None
    return False


def _has_meta(directory: Path) -> bool:
    try:
        (directory / _META).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _check_owner(place: Place, volume_id: str, node_id: str, backing: Path) -> None:
    file = place.directory / _META
    if not _has_meta(place.directory):
        if place.found:  # its name says whose it is, and nobody else can make such a directory
            place.warnings.append(
                f"{file} was gone, and was made anew: somebody removes files in the RAM tier"
            )
        _write_whole(
            file,
            json.dumps({"volume_id": volume_id, "node_id": node_id, "backing": os.fspath(backing)}),
        )
        return
    try:
        meta = json.loads(file.read_text())
        owner = (meta["volume_id"], meta["node_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedError(
            f"{file} is damaged; move {place.directory} away to start without what is left in it"
        ) from error
    if owner != (volume_id, node_id):
        raise RefusedError(
            f"the RAM tier {place.directory} belongs to {meta.get('backing')} (volume "
            f"{owner[0]}, node {owner[1]})"
        )


def _write_whole(file: Path, text: str) -> None:
    """All of it or nothing, also for who is killed."""
    temporary = file.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    fd = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(fd, "w") as stream:
        stream.write(text)
    temporary.rename(file)
