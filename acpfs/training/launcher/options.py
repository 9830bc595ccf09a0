"""torchrun's command line, as a record; what is acpfs-run's own beside it.

Pure, but for counting devices.

Options may be written with `_` or `-`, and `PET_NAME` in the environment is the default of an
option, as with torchrun. What torchrun can do and this cannot is refused by name.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from acpfs.config import parse_size
from acpfs.errors import ConfigError
from acpfs.training.launcher.streams import Streams

PORT = 29400
"""Where launchers meet when nobody names a port; torchrun's own."""
STATUSES: Mapping[str, str] = {
    "0": "all ranks ended with 0",
    "75": (
        "start the job again, it goes on from what was saved: a rank left with 75 (a gasp is "
        "there), or all ended with 0 after SIGTERM"
    ),
    "69": "a node was lost, or did not come, or the other side of a cut goes on",
    "127": "the program of a rank cannot be started",
    "2": "options that make no sense",
    "another one": "of the first rank that failed: its own, or 128 and the signal's number",
}
"""What a scheduler gets, and when."""
_REFUSED = (
    "logs-specs",
    "numa-binding",
    "virtual-local-rank",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
)
_IGNORED = ("monitor-interval", "start-method", "event-log-handler", "rdzv-conf", "local-addr")
"""Processes are waited for and not polled; there is one way to start them, and one to meet."""


@dataclass(frozen=True)
class Options:
    """What to run, and how."""

    program: tuple[str, ...]
    """A script with its arguments; a module's name, or a program, where one of the next two says
    so.
    """
    is_module: bool = False
    no_python: bool = False
    nodes_min: int = 1
    nodes_max: int = 1
    per_node: int = 1
    node_rank: int | None = None
    run_id: str = "none"
    endpoint: str = ""
    """Where launchers of several nodes meet; empty on one node."""
    restarts_max: int = 0
    stop_s: float = 30.0
    """From SIGTERM to SIGKILL."""
    signals: tuple[signal.Signals, ...] = (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
    )
    role: str = "default"
    log_directory: Path | None = None
    streams: Streams = field(default_factory=Streams)
    spares: int = 0
    imports: tuple[str, ...] = ()
    """What the template imports; none: there is no template."""
    spare_bytes: int = 0
    """Memory that a spare has touched."""
    replaces: bool = False
    """Whether a rank that dies gets a process anew, and the others go on."""
    cache: Path | None = None
    has_fast_saves: bool = False
    """Whether ranks have `acpfs.torch` in the place of torch's save and load."""
    save_directory: Path | None = None


def parsed(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Options:
    """The options of a command line.

    Raises:
        ConfigError: a combination that makes no sense, or that there is not.
        SystemExit: argparse has told what is wrong, or the help was wanted.
    """
    environment = os.environ if environment is None else environment
    parser = command_line()
    known = {
        name.lstrip("-").replace("-", "_")
        for action in parser._actions  # noqa: SLF001
        for name in action.option_strings
    }
    parser.set_defaults(
        **{
            name: value
            for name in known
            if (value := environment.get(f"PET_{name.upper()}")) not in (None, "", "0")
        }
    )
    own = _own(arguments, parser)
    given = parser.parse_args([_dashed(word) for word in own] + list(arguments[len(own) :]))
    for name in _REFUSED:
        if getattr(given, name.replace("-", "_")):
            raise ConfigError(
                f"--{name}: acpfs-run has no such thing; start this job with torchrun"
            )
    return _options(given)


def _options(given: argparse.Namespace) -> Options:
    nodes_min, nodes_max = (1, 1) if given.standalone else _nodes(given.nnodes)
    if given.module and given.no_python:
        raise ConfigError("-m and --no-python exclude each other")
    if given.rdzv_backend not in ("static", "c10d", ""):
        raise ConfigError(
            f"--rdzv-backend {given.rdzv_backend}: launchers meet at one of them; c10d or static"
        )
    spares = int(given.spares)
    imports = tuple(word for words in given.template_import for word in words.split(",") if word)
    if given.no_python and (spares or imports):
        raise ConfigError(
            "--spares and --template-import fork from Python; --no-python is something else"
        )
    if given.no_python and given.fast_saves:
        raise ConfigError("--fast-saves is for a program of Python's, and --no-python is none")
    several = nodes_max > 1
    if several and not (given.rdzv_endpoint or given.master_addr):
        raise ConfigError(
            "several nodes meet at --rdzv-endpoint HOST:PORT, or at --master-addr of node 0"
        )
    static = several and not given.rdzv_endpoint
    if static and given.node_rank is None:
        raise ConfigError("--master-addr without --node-rank: which node is this?")
    return Options(
        (given.program, *given.arguments),
        is_module=bool(given.module),
        no_python=bool(given.no_python),
        nodes_min=nodes_min,
        nodes_max=nodes_max,
        per_node=_per_node(given.nproc_per_node),
        node_rank=None if given.node_rank is None else int(given.node_rank),
        run_id=given.rdzv_id,
        endpoint=""
        if not several
        else _endpoint(given.rdzv_endpoint or f"{given.master_addr}:{given.master_port or PORT}"),
        restarts_max=int(given.max_restarts),
        stop_s=float(given.shutdown_timeout),
        signals=_signals(given.signals_to_handle),
        role=given.role,
        log_directory=None if given.log_dir is None else Path(given.log_dir),
        streams=Streams.parsed(given.redirects, given.tee, given.local_ranks_filter),
        spares=spares,
        imports=imports or (("torch",) if spares else ()),
        spare_bytes=_spare_bytes(given.spare_memory),
        replaces=given.on_fault == "replace",
        cache=None if given.cache is None else Path(given.cache).absolute(),
        has_fast_saves=bool(given.fast_saves),
        save_directory=None if given.save_dir is None else Path(given.save_dir).absolute(),
    )


def command_line() -> argparse.ArgumentParser:
    """The parser; the manual page is made of it."""
    parser = argparse.ArgumentParser(
        prog="acpfs-run",
        description=(
            "Start the ranks of this node, as torchrun does; replace one that dies, or restart all."
        ),
        epilog="Exit status: "
        + "; ".join(f"{status}: {when}" for status, when in STATUSES.items()),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nnodes", default="1", metavar="N|MIN:MAX", help="nodes, each with its launcher")
    add("--nproc-per-node", default="1", metavar="N|auto|cpu|gpu", help="ranks of this node")
    add(
        "--node-rank",
        metavar="N",
        help="which of them this is; without it, in the order in which they come",
    )
    add("--rdzv-backend", default="static", help="c10d or static: both meet at the endpoint")
    add(
        "--rdzv-endpoint",
        default="",
        metavar="HOST[:PORT]",
        help=f"where launchers meet; port {PORT}",
    )
    add("--rdzv-id", default="none", help="name of the job")
    add("--master-addr", default="", help="host of node 0")
    add("--master-port", default="", metavar="PORT", help=f"where launchers meet there; {PORT}")
    add("--standalone", action="store_true", help="one node, whatever else is said")
    add(
        "--max-restarts",
        default=0,
        metavar="N",
        help="so often all ranks start anew after one has failed",
    )
    add(
        "--shutdown-timeout",
        default=30.0,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL; a gasp has to be done by then",
    )
    add(
        "--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        help="signals that are a planned end",
    )
    add(
        "--role", default="default", metavar="NAME", help="before each line that is shown of a rank"
    )
    add("-m", "--module", action="store_true", help="the program is a module's name")
    add("--no-python", action="store_true", help="the program is none of Python's")
    add("--run-path", action="store_true", help="as without it")
    add("--log-dir", metavar="DIR", help="where the files of ranks' output are; kept")
    add(
        "-r",
        "--redirects",
        default="0",
        help="what of a rank goes to files: 0 nothing, 1 stdout, 2 stderr, 3 both; or RANK:N,…",
    )
    add("-t", "--tee", default="0", help="what goes to files and is shown all the same")
    add("--local-ranks-filter", default="", help="ranks of this node whose output is shown")
    for name in _REFUSED:
        add(
            f"--{name}",
            help=argparse.SUPPRESS,
            default=None,
            **({"action": "store_true"} if name.startswith("virtual") else {}),  # type: ignore[arg-type]
        )
    for name in _IGNORED:
        add(f"--{name}", help=argparse.SUPPRESS)
    own = parser.add_argument_group("what torchrun has not")
    own.add_argument(
        "--on-fault",
        choices=("restart", "replace"),
        default="restart",
        help="all ranks, or the one that died",
    )
    own.add_argument(
        "--spares",
        default=0,
        metavar="N",
        help="processes of this node that are ready to become a rank",
    )
    own.add_argument(
        "--spare-memory",
        default="0",
        metavar="SIZE",
        help="what each of them holds ready for a rank's tensors, as 8G",
    )
    own.add_argument(
        "--template-import",
        action="append",
        default=[],
        metavar="MODULE",
        help="what they have imported; torch",
    )
    own.add_argument(
        "--cache",
        metavar="DIR",
        help="compile and kernel caches, in the mount, where they stay in RAM",
    )
    own.add_argument(
        "--fast-saves",
        action="store_true",
        help="torch.save and torch.load in a mount by several threads, with the same files",
    )
    own.add_argument(
        "--save-dir",
        metavar="DIR",
        help="what `protect` is given; launchers of several nodes find their certificate there",
    )
    add("program", help="script, module, or program")
    add("arguments", nargs=argparse.REMAINDER)
    return parser


def _own(arguments: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The words in front of the program: those behind it are its own, with all their
    underscores.
    """
    with_value = {
        name
        for action in parser._actions  # noqa: SLF001
        if action.nargs != 0
        for name in action.option_strings
    }
    found: list[str] = []
    takes = False
    for word in arguments:
        if not takes and not word.startswith("-"):
            break
        found.append(word)
        takes = not takes and _dashed(word) in with_value
    return found


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < least <= most:
        raise ConfigError(f"--nnodes {text}: a number, or MIN:MAX")
    return least, most


def accelerators() -> int:
    """Of this node."""
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) or len(
        list(Path("/dev").glob("davinci[0-9]*"))
    )


def _per_node(text: str) -> int:
    if text == "cpu":
        return os.cpu_count() or 1
    if text in ("gpu", "auto", "npu", "xpu"):
        devices = accelerators()
        if not devices and text != "auto":
            raise ConfigError(f"--nproc-per-node {text}: this node has none")
        return devices or os.cpu_count() or 1
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"--nproc-per-node {text}: a number, auto, cpu or gpu")
    return int(text)


def _spare_bytes(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError:
        size = -1
    if size < 0:
        raise ConfigError(f"--spare-memory {text}: a size, as 8G")
    return size


def _endpoint(text: str) -> str:
    host, colon, port = text.rpartition(":")
    return text if colon and port.isdecimal() and host else f"{text}:{PORT}"


def _signals(text: str) -> tuple[signal.Signals, ...]:
    try:
        return tuple(signal.Signals[name.strip()] for name in text.split(",") if name.strip())
    except KeyError as error:
        raise ConfigError(f"--signals-to-handle: there is no signal {error.args[0]}") from None
