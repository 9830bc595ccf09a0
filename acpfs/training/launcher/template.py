"""The template: a process with everything imported, from which ranks are forked.

Executed as a file, standard library only.

`template.py DESCRIPTOR LAUNCHER IMPORTS MEMORY_BYTES`: each message on the socket has a socket for
a spare. The spare is forked twice, so that it becomes the launcher's own child; it warms what a
first step would have to make, says its number, and waits to be told which rank it is. Meanwhile a
thread touches so much memory for it. Nothing but imports happens in the template itself: threads of
a library that had computed there would be missing in all spares.
"""

from __future__ import annotations

import array
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
import threading
import time
import types
import warnings
import zipfile
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
MESSAGE_BYTES_MAX = 1 << 18
ADOPTED_S = 10.0
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
M_ARENA_MAX = -8
MADV_HUGEPAGE = 14
NEVER = -1
"""Of mallopt(3) and madvise(2)."""
NICE = 10
PIECE_BYTES = 4 << 20
HUGE_BYTES = 2 << 20
"""Who is told to be a rank waits for one piece at most: some milliseconds."""
ALSO = {
    "torch": (
        *(
            "torch.distributed",
            "torch.nn.parallel",
            "torch.optim",
            "torch._dynamo",
            "torch.distributed.device_mesh",
        ),
        *(
            "torch.distributed.tensor",
            "torch.distributed.fsdp",
            "torch.distributed.checkpoint",
            "torch.distributed.checkpoint.state_dict",
        ),
        *(
            "acpfs.training.resilience",
            "acpfs.training.torch.run",
            "acpfs.training.torch.device",
            "acpfs.training.torch.rendezvous",
        ),
    )
}
"""What a first step imports, and what `resilient` does: as much of it as there is."""


def serve(control: socket.socket, launcher: int, memory_bytes: int) -> dict[str, Any]:
    """Fork spares until the launcher is gone; comes back in a spare that has become a rank, with
    what it was told.
    """
    while True:
        data, descriptors = received(control)
        if not data:
            os._exit(0)
        middle = os.fork()
        if middle == 0:
            if os.fork():
                os._exit(0)
            control.close()
            return become(descriptors[0], launcher, memory_bytes)
        os.waitpid(middle, 0)
        os.close(descriptors[0])


def become(descriptor: int, launcher: int, memory_bytes: int) -> dict[str, Any]:
    """In the spare: wait until it is a rank."""
    os.setsid()
    _adopted_by(launcher)
    _dies_with_parent(signal.SIGKILL)
    _warm()
    with socket.socket(fileno=descriptor) as link:
        link.send(str(os.getpid()).encode())
        with _touching(memory_bytes):
            data, descriptors = received(link)
    if not data:
        os._exit(0)
    order: dict[str, Any] = json.loads(data)
    _dies_with_parent(signal.SIGTERM)
    for number, is_given in ((1, order["out"]), (2, order["err"])):
        if is_given:
            given = descriptors.pop(0)
            os.dup2(given, number)
            os.close(given)
    os.environ.clear()
    os.environ.update(order["environment"])
    if (numpy := sys.modules.get("numpy")) is not None:
        # else all ranks would draw the template's numbers; Python's own are seeded anew by fork
        numpy.random.seed()
    return order


def run(order: dict[str, Any]) -> None:
    """The program, as the interpreter would have it."""
    gc.unfreeze()
    program = order["program"]
    if os.environ.get("ACPFS_FAST_SAVES"):
        importlib.import_module("acpfs.training.launcher.fast_saves").arrange()
    sys.argv = list(program)
    # For good: `runpy.run_path` would take it away behind the last line, and a thread that goes on
    # there could not pickle what it has of the program's own classes.
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    vars(main)["__builtins__"] = builtins
    if order["module"]:
        sys.path.insert(0, str(Path.cwd()))
        _run_as_main(program[0], alters_name=True)
    elif Path(program[0]).is_dir() or zipfile.is_zipfile(program[0]):
        sys.path.insert(0, str(Path(program[0]).absolute()))
        _run_as_main("__main__", alters_name=False)
    else:
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        _run_file(main, str(Path(program[0]).absolute()))


def _run_as_main(name: str, *, alters_name: bool) -> None:
    """A module, as `-m` does: the interpreter's own way to do that, which has no public name.

    `alters_name`: whether `sys.argv[0]` becomes its file.
    """
    runpy._run_module_as_main(name, alters_name)  # type: ignore[attr-defined]  # noqa: SLF001


def _run_file(main: types.ModuleType, path: str) -> None:
    """A script, or what it was compiled to."""
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)
        if code is None:
            file.seek(0)
            code = compile(file.read(), path, "exec")
    vars(main).update(
        __file__=path,
        __cached__=None,
        __package__=None,
        __loader__=SourceFileLoader("__main__", path),
    )
    exec(code, vars(main))  # noqa: S102  # that is what it is for


def received(link: socket.socket) -> tuple[bytes, list[int]]:
    """A message, with the descriptors that came with it."""
    numbers = array.array("i")
    data, further, _, _ = link.recvmsg(
        MESSAGE_BYTES_MAX, socket.CMSG_SPACE(4 * numbers.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in further:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    return data, list(numbers)


def _adopted_by(launcher: int) -> None:
    deadline = time.monotonic() + ADOPTED_S
    while os.getppid() != launcher:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)


def _dies_with_parent(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _warm() -> None:
    """What torch makes when it computes for the first time.

    Its random numbers stay where they were.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    kept = torch.get_rng_state()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(2, 8)).sum().backward()
    optimizer.step()
    torch.set_rng_state(kept)


@contextlib.contextmanager
def _touching(size: int) -> Iterator[None]:
    """Meanwhile a thread touches so much memory of this process's heap, which is the only one and
    gives none back from then on.

    A new page costs a fault, and more where a hypervisor has taken back what was free for some
    seconds: all of a large state's fall into the first step of a rank that all others wait for.
    """
    if not size:
        yield
        return
    told = threading.Event()
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    with contextlib.suppress(AttributeError):  # another C library
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)
        libc.mallopt(M_ARENA_MAX, 1)
    begin = libc.malloc(
        ctypes.c_size_t(size)
    )  # here: another thread's arena has no such room, and would map it by itself
    if not begin:
        yield
        return
    thread = threading.Thread(
        target=_touch, args=(libc, begin, size, told), name="touch", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        told.set()
        thread.join()
        libc.free(ctypes.c_void_p(begin))


def _touch(libc: ctypes.CDLL, begin: int, size: int, told: threading.Event) -> None:
    """In its thread, behind whoever has work to do: of this thread alone Linux changes the
    priority.
    """
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    first = -(-begin // HUGE_BYTES) * HUGE_BYTES
    libc.madvise(
        ctypes.c_void_p(first),
        ctypes.c_size_t((begin + size - first) // HUGE_BYTES * HUGE_BYTES),
        MADV_HUGEPAGE,
    )
    for offset in range(0, size, PIECE_BYTES):
        if told.is_set():
            break
        libc.memset(
            ctypes.c_void_p(begin + offset), 0, ctypes.c_size_t(min(PIECE_BYTES, size - offset))
        )


def _import(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)
        for further in ALSO.get(name, ()):
            with contextlib.suppress(
                ImportError
            ):  # another torch, or an interpreter that has no acpfs
                importlib.import_module(further)


def main() -> None:
    """Entry point."""
    del sys.path[0]  # this file's directory is none of the program's business
    descriptor, launcher, imports, memory_bytes = sys.argv[1:]
    _import(json.loads(imports))
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
    for stream in (sys.stdout, sys.stderr):
        # as python -u
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page
    run(serve(socket.socket(fileno=int(descriptor)), int(launcher), int(memory_bytes)))


if __name__ == "__main__":
    main()
