"""What holds the tree in shape: import direction, idioms, and that contract and tests cite each
other.

One test per rule, which names each file that breaks it: a test per rule and file was a third of all
tests, most of its time the runner's.
"""

from __future__ import annotations

import ast
import functools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.rig.past_lower import OF_OTHERS, PAST_LOWER

REPOSITORY = Path(__file__).parents[1]
WIDTH_MAX = 100
PACKAGE = REPOSITORY / "acpfs"
LAYERS = [
    "cli",
    "compatible",
    "training",
    "torch",
    "client",
    "worker",
    "mounting",
    "supervisor",
    "control",
    "transport",
    "filesystem",
    "writeback",
    "ram",
    "backing",
    "exchange",
    "links",
]
"""From top to bottom; a layer imports only what stands to its right, and the bottom."""
BOTTOM = {
    "errors",
    "types",
    "checkpoints",
    "checksum",
    "config",
    "descriptors",
    "drain_records",
    "lock_holders",
    "logger",
    "processes",
    "runtime",
}
MAY_NOT = {
    "cli": {"transport", "filesystem", "writeback", "ram", "backing", "client"},
    "compatible": {
        "worker",
        "mounting",
        "supervisor",
        "transport",
        "filesystem",
        "writeback",
        "ram",
        "backing",
    },
    "training": {
        "worker",
        "mounting",
        "supervisor",
        "transport",
        "filesystem",
        "writeback",
        "ram",
        "backing",
    },
    "torch": {
        "worker",
        "mounting",
        "supervisor",
        "transport",
        "filesystem",
        "writeback",
        "ram",
        "backing",
    },
    "client": {
        "worker",
        "mounting",
        "supervisor",
        "transport",
        "filesystem",
        "writeback",
        "ram",
        "backing",
    },
    "mounting": {"filesystem"},
    "supervisor": {"transport", "filesystem", "writeback", "backing"},
    "control": {"transport", "filesystem", "writeback", "ram", "backing"},
    "writeback": {"transport", "filesystem"},
}
"""Beyond the direction: what a layer has no business with."""
ROOMS = [
    ("adopting",),
    ("engine",),
    ("commits",),
    ("failures",),
    ("streams",),
    ("order",),
    ("guard",),
    ("members",),
    ("sources",),
    ("copies",),
    ("manifest",),
    ("evidence",),
    ("arrival", "parts", "listener", "engine_records", "report"),
    ("log",),
]
"""Of `acpfs.writeback`, from top to bottom; modules that are in none stand beside them."""
FILESYSTEM_ROOMS = {
    "facade": (
        "at_once construction file_reports filesystem interrupted invariants known_files "
        "preloading salvage scrub"
    ),
    "open files": "closes copy_range directories files lane_use open_files opens syncing",
    "names": (
        "attribute_calls awaited_names changes doubtful_closes lending mending names needed_nodes "
        "node_use paths pointer_content urgent"
    ),
    "moving bytes": (
        "admission eviction hold outgrown pages_ahead payers reads spilling warming writable"
    ),
    "backing view": (
        "ahead backing_space beneath bursts earlier_saves first_sight lower_reads lowerview "
        "nameless notices questions read_handle recognition whole_reads"
    ),
    "bytes": (
        "charges close_states closing contents copy_aside earlier_calls earlier_writers "
        "eviction_order file_writers fullness handles kept_handles kernel_writes lanes last_close "
        "loads marks missing outlook overflow retention room unseen_room versions"
    ),
    "inodes": (
        "acls body catalogue damaged_files durations expectations fill from_members "
        "kept_listings known_names lent likely_sizes nodes op_paths pins records runs "
        "spare_threads steps upper"
    ),
}
"""Of `acpfs.filesystem`, from top to bottom → its modules (docs/ARCHITECTURE.md).

A new module is put into the room whose subject it has.
"""
FACE_MAX = 10
"""So many names other rooms have of one, as a reader can keep in mind; `construction` knows all."""
WIDE_ROOMS = {"names", "moving bytes", "bytes", "inodes"}
"""Those that show more still: 11, 12, 22 and 53."""
BANNED_NAMES = re.compile(r"(^|_)(utils?|helpers?|managers?|misc|common)(_|$)")

UNGUESSED = {
    "beware": "what is done about it",
    "changeable": "writable",
    "distrust": "what is looked at anew",
    "doubt": "what is not known",
    "doubts": "what is not known",
    "keeping": "eviction, or what is kept",
    "leaving": "eviction",
    "once": "what is not repeated",
    "outgrow": "move_out",
    "remainder": "rest",
}
"""Names that had to be learnt, or were near-twins of others → what to say."""
HOMONYMS = {
    r"\b(?:other|another)(?: live| missing)? nodes?\b": "member",
    r"\bmemory nodes?\b": "NUMA node",
    r"\bas it is installed\b": "the installed code",
}
"""In comments, docstrings and the documents on the code: words that mean something else here → what
to say.
"""
MEMBERS_ARE_NODES = {"config.py", "cli", "client", "control", "training", "compatible"}
"""There a node is what users know: a machine of the job, or a member by the name that commands and
SEMANTICS give it.
"""

VALUES = re.compile(
    r"^(bool|int|float|str|bytes|Path|Exception|BaseException|(dict|list|set|tuple)\b.*)$"
)
"""State, and no part of anything: whoever knows it may say it."""
PUT_IN_LATER = {
    "writeback/engine.py: stream.following": (
        "the stream that comes next is there when this one is under way"
    ),
}
"""Objects that others put in after construction → why. Only shorter from here."""

TAKES_AN_INODE_LOCK = {
    "copy_file_range",
    "fallocate",
    "ftruncate",
    "lseek",
    "posix_fallocate",
    "pwrite",
    "pwritev",
    "truncate",
    "unlink",
    "utime",
}
"""System calls that take the inode lock of the file they change. On a tmpfs lseek does, too."""
OUR_INODE_LOCKS = {"fallocate", "punch_hole", "mark_file", "write_all", "set_atime", "set_mtime"}
INODE_LOCKS_OF = {
    "no file of the kernel's lane: a new one, or one of our own": {
        "filesystem/content/contents.py: _rehouse",
        "filesystem/content/fill.py: *",
        "filesystem/content/warming.py: *",
        "filesystem/content/whole_reads.py: *",
        "ram/kept.py: *",
        "ram/mapped_records.py: *",
        "ram/prefault.py: *",
        "ram/spill_directory.py: *",
        "ram/state_space.py: *",
        "ram/tier.py: _copy_all, _copy_data, _renew_copy, _try_mapping, copy, copy_steady",
        "writeback/sources/spill.py: *",
    },
    "a staging file, in threads that may wait for the backing directory": {
        "filesystem/content/outgrown.py: _complete, _move, _send",
        "filesystem/content/overflow.py: *",
    },
    "here, or in the file's own thread: `Contents.locking`": {
        (
            "filesystem/content/contents.py: _allocate_piece, _beyond, _emptied, empty, "
            "truncate, write"
        ),
        "filesystem/content/outgrown.py: _has_data",
        "filesystem/copy_range.py: _copy_range",
        "filesystem/files.py: lseek",
    },
    "in the file's own thread": {
        "filesystem/kernel_writes.py: _mark, mark_file",
        "filesystem/pages_ahead.py: _take_piece",
    },
    "under the lock, and not of a file that is handed over": {
        "filesystem/kernel_writes.py: expect, expect_mappings",
        "filesystem/pages_ahead.py: _give_back, _punch_end, _punch_hole, _take, take",
        "ram/tier.py: _truncate, _unlink, punch_hole",
        "writeback/sources/source.py: _seek",
    },
    "the kernel has the inode lock of the mount's file until the call is answered": {
        "filesystem/content/outgrown.py: _punch, relieve",
        "filesystem/kernel_writes.py: mark, set_times",
    },
}
"""Why none of these is held up by an application in a thread that others need
(docs/internals/concurrency.md) → module: functions."""

SOURCES = sorted(p for p in PACKAGE.rglob("*.py"))
TESTS = sorted(p for p in (REPOSITORY / "tests").rglob("*.py"))
CLAUSE = re.compile(r"\*\*([STX]\d+)\.\*\*")
CONTRACTS = [
    REPOSITORY / "docs" / "SEMANTICS.md",
    *sorted((REPOSITORY / "docs" / "internals" / "clauses").glob("*.md")),
]


def named(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parsed once for all rules, which took most of their time."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


@pytest.fixture(scope="module", autouse=True)
def _trees_are_large() -> Iterator[None]:
    yield
    nodes_of.cache_clear()
    tree_of.cache_clear()


def imported_layers(path: Path) -> Iterator[tuple[str, int]]:
    """(layer or module below acpfs, line) of every import, also those inside functions."""
    for node in nodes_of(path):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "acpfs"
        ):
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            yield from ((name, node.lineno) for name in names)
        elif isinstance(node, ast.Import):
            yield from (
                (alias.name.split(".")[1], node.lineno)
                for alias in node.names
                if alias.name.startswith("acpfs.")
            )


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in nodes_of(path) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downwards(layer: str) -> None:
    allowed = set(LAYERS[LAYERS.index(layer) :]) | BOTTOM
    if layer == "cli":
        allowed |= {"client"}
    allowed -= MAY_NOT.get(layer, set())
    wrong = []
    for path in sorted((PACKAGE / layer).rglob("*.py")):
        wrong += [
            f"{named(path)}:{line} imports {name}"
            for name, line in imported_layers(path)
            if name not in allowed and name != "__version__"
        ]
    assert wrong == []


def test_rooms_import_downwards() -> None:
    height = {name: height for height, names in enumerate(ROOMS) for name in names}
    wrong = []
    for path in sorted((PACKAGE / "writeback").rglob("*.py")):
        room = path.relative_to(PACKAGE / "writeback").parts[0].removesuffix(".py")
        for node in nodes_of(path):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.startswith("acpfs.writeback")
            ):
                parts = node.module.split(".")[2:]
                others = parts[:1] or [alias.name for alias in node.names]
                wrong += [
                    f"{named(path)}:{node.lineno} imports {name}"
                    for name in others
                    if height[name] < height[room]
                ]
    assert wrong == []


def _imports_within(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, module of the file system, name) of every import of one of the others."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("acpfs.filesystem."):
            module = str(node.module).rpartition(".")[2]
            for alias in node.names:
                is_package = module == "content"
                yield node.lineno, alias.name if is_package else module, alias.name


def test_rooms_of_the_file_system_import_downwards_and_show_little() -> None:
    order = list(FILESYSTEM_ROOMS)
    room_of = {one: room for room, modules in FILESYSTEM_ROOMS.items() for one in modules.split()}
    paths = sorted((PACKAGE / "filesystem").rglob("*.py"))
    paths = [path for path in paths if path.name != "__init__.py"]
    assert sorted(room_of) == sorted(path.stem for path in paths)
    wrong = []
    shown: dict[str, set[str]] = {room: set() for room in order}
    for path in paths:
        room = room_of[path.stem]
        for line, module, name in _imports_within(path):
            other = room_of[module]
            if order.index(other) < order.index(room):
                wrong.append(f"{named(path)}:{line} imports {module}, of {other}")
            elif other != room and path.stem != "construction":
                shown[other].add(name)
    assert wrong == []
    assert {room for room, names in shown.items() if len(names) > FACE_MAX} == WIDE_ROOMS


def test_the_bottom_imports_only_the_bottom() -> None:
    wrong = []
    for name in BOTTOM:
        wrong += [
            f"{name}:{line} imports {other}"
            for path in (PACKAGE / f"{name}.py", *sorted((PACKAGE / name).glob("*.py")))
            if path.exists()
            for other, line in imported_layers(path)
            if other not in BOTTOM
        ]
    assert wrong == []


def test_torch_is_imported_only_where_it_is_the_subject() -> None:
    wrong = []
    for path in SOURCES:
        below = path.relative_to(PACKAGE).parts
        is_subject = below[:2] in (("training", "torch"), ("training", "frameworks"))
        if below[0] != "torch" and not is_subject:
            wrong += [
                f"{named(path)}:{line} imports {name}"
                for name, line, late in _modules(path)
                if _is_torch(name) or (not late and _needs_torch(name))
            ]
    assert wrong == []


def test_contents_have_one_checksum() -> None:
    others = {"checksum.py", "member_records.py", "name_filter.py", "directory.py", "scopes.py"}
    others |= {"journal_frames.py"}
    """`acpfs.checksum` itself, and what hashes records and names."""
    found = {
        path.name
        for path in SOURCES
        if re.search(r"^(import|from) xxhash", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found - others == set(), "contents have theirs from acpfs.checksum"


def test_what_a_rank_says_cannot_fail_it() -> None:
    """A stream may be full or closed: in a rank and in its launcher `last_words` and `_show` write
    to them (T235, T236), and whoever only begins, or says so beside an exit.
    """
    beginners = {"coordinator/__main__.py", "coordinator/meeting.py"}
    told = {
        str(path.relative_to(PACKAGE / "training"))
        for path in (PACKAGE / "training").rglob("*.py")
        if re.search(r"sys\.std(err|out)\.(write|flush)|print_exception\(", path.read_text())
    }
    assert told == beginners | {"last_words.py", "launcher/node.py"}


def test_only_the_verbs_say_where_bytes_are() -> None:
    """`tier`, `here` and `rest` of a body are set by its own methods; a node gets its body from
    `Contents`, or before there is one.
    """
    placed: set[str] = set()
    given: set[str] = set()
    for path in sorted((PACKAGE / "filesystem").rglob("*.py")):
        stores = [
            node
            for node in nodes_of(path)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        ]
        placed |= {
            path.name
            for node in stores
            if node.attr in ("tier", "here", "rest") and ast.unparse(node.value) != "self"
        }
        given |= {path.name for node in stores if node.attr == "body"}
    assert placed == set()
    assert given == {"contents.py", "nodes.py", "missing.py"}


def _is_torch(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] in (
        "torch",
        "torch_npu",
        "transformers",
        "accelerate",
        "lightning",
        "megatron",
        "mindspore",
    )


def _needs_torch(name: str) -> bool:
    return name.startswith(("acpfs.torch", "acpfs.training.torch", "acpfs.training.frameworks"))


def _modules(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, whether it is not carried out when the module is imported) of every import."""
    tree = tree_of(path)
    for_types = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    late = {node for block in (*functions(path), *for_types) for node in ast.walk(block)}
    inside = {node.lineno for node in late if isinstance(node, ast.Import | ast.ImportFrom)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno, node.lineno in inside
            yield from (
                (f"{node.module}.{alias.name}", node.lineno, node.lineno in inside)
                for alias in node.names
            )
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, node.lineno in inside) for alias in node.names)


def taken_locks(node: ast.AST, function: str = "") -> Iterator[str]:
    """Functions that name such a call."""
    for child in ast.iter_child_nodes(node):
        inner = (
            child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        )
        is_of_os = (
            isinstance(child, ast.Attribute)
            and isinstance(child.value, ast.Name)
            and child.value.id == "os"
            and child.attr in TAKES_AN_INODE_LOCK
        )
        is_ours = isinstance(child, ast.Name) and child.id in OUR_INODE_LOCKS
        if is_of_os or is_ours:
            yield inner
        yield from taken_locks(child, inner)


def is_told_whole(function: str, told: set[str]) -> bool:
    """Whether all functions of its module are told of at once."""
    return function.partition(": ")[0] + ": *" in told


@pytest.mark.clause("S420")
def test_no_thread_that_others_need_takes_an_inode_lock_that_an_application_may_keep() -> None:
    """A call that is new here is told where it is made, and why nobody else waits for it."""
    rooms = [PACKAGE / "filesystem", PACKAGE / "ram", PACKAGE / "writeback" / "sources"]
    found = {
        f"{path.relative_to(PACKAGE)}: {function}"
        for room in rooms
        for path in room.rglob("*.py")
        for function in taken_locks(tree_of(path))
    }
    told = {
        f"{module}: {function}"
        for places in INODE_LOCKS_OF.values()
        for module, _, functions in (place.partition(": ") for place in places)
        for function in functions.split(", ")
    }
    found = {one.partition(": ")[0] + ": *" if is_told_whole(one, told) else one for one in found}
    assert (found - told, told - found) == (set(), set())


LOCKED_BY_EXEC = frozenset(
    "stat environ maps smaps smaps_rollup numa_maps pagemap mem auxv io wchan stack syscall "
    "personality map_files exe cwd root".split()
)
"""Of a process' directory in /proc (see `acpfs.processes`); and what is below `fd` and `ns`."""
ASKED_ALL_THE_SAME = {
    "acpfs/processes.py:stat_of": "asked by whom the next two are",
    "acpfs/filesystem/closing.py:_state_and_flags": "of who has no memory: that is no exec",
    "acpfs/filesystem/last_close.py:_ask": "in a thread of its own, for which nobody waits long",
    "acpfs/control/registry.py:_stat": "of a process that serves a mount: its files are on none",
    "acpfs/lock_holders.py:_has_link": "before Linux 5.14, where no other way tells it",
    "acpfs/cli/verbs/ready.py:_is_here": "a command, and of the daemon alone",
    "acpfs/training/coordinator/exiting.py:watch": "a job's coordinator, which serves no mount",
    "acpfs/training/coordinator/exiting.py:started_at": "the same",
    "acpfs/training/coordinator/exiting.py:status_of_exiting": "the same",
    "acpfs/training/coordinator/working.py:_moved": "the same",
    "acpfs/training/coordinator/working.py:_threads": "the same",
}
"""Who reads what an exec keeps locked, and why no exec waits for that → module: functions."""


def _asks_what_an_exec_locks(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="stat_of")):
            return True
        case ast.BinOp(
            left=ast.Name(id="task" | "thread" | "process" | "directory"),
            op=ast.Div(),
            right=ast.Constant(value=str() as name),
        ):
            return name in LOCKED_BY_EXEC
        case ast.JoinedStr(values=[ast.Constant(value="/proc/"), *parts]):
            text = "".join(
                str(one.value) if isinstance(one, ast.Constant) else "*" for one in parts
            )
            below = text.removeprefix("*/").removeprefix("task/*/")
            return below in LOCKED_BY_EXEC or below.startswith(("fd", "ns/"))
    return False


def test_nobody_asks_of_a_process_what_its_exec_keeps_locked() -> None:
    asking = {
        f"{named(path)}:{function.name}"
        for path in SOURCES
        for function in functions(path)
        if any(map(_asks_what_an_exec_locks, ast.walk(function)))
    }
    assert asking == set(ASKED_ALL_THE_SAME)


def test_shell_is_no_wider_than_python() -> None:
    """ruff looks at Python alone."""
    scripts = [
        *(path for path in (REPOSITORY / "tools").iterdir() if path.suffix in ("", ".sh")),
        *PACKAGE.rglob("*.sh"),
        REPOSITORY / ".ci" / "run",
    ]
    texts = {path: path.read_text(encoding="utf-8") for path in scripts if path.is_file()}
    assert len(texts) > 10
    wide = [
        f"{named(path)}:{number}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > WIDTH_MAX
    ]
    assert wide == []


def test_modules_say_what_they_own() -> None:
    texts = {
        named(path): ast.get_docstring(tree_of(path)) or ""
        for path in SOURCES
        if path.name != "__init__.py"
    }
    assert [name for name, text in texts.items() if not text] == [], "no docstring"
    assert [name for name, text in texts.items() if len(text.splitlines()) > 25] == []


def test_names_mean_something() -> None:
    # mount(8) calls the program that it runs for a file system type its "mount helper"
    assert [
        named(path)
        for path in SOURCES + TESTS
        if path.stem != "mount_helper" and BANNED_NAMES.search(path.stem)
    ] == []


def test_a_class_has_its_name_alone() -> None:
    """Training has words of its own."""
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        if "training" not in path.parts:
            for name in re.findall(
                r"^class ([A-Z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE
            ):
                found.setdefault(name, []).append(named(path))
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_a_module_has_its_name_alone() -> None:
    """Commands and training have words of their own."""
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        if path.name != "__init__.py" and not {"cli", "client", "training"} & set(path.parts):
            found.setdefault(path.stem, []).append(named(path))
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_the_file_system_is_a_facade() -> None:
    """It shows calls, and how they are made; its parts go through constructors to who needs them,
    and only the worker has them to give.
    """
    tree = tree_of(PACKAGE / "filesystem" / "filesystem.py")
    facade = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "FileSystem"
    )
    shown = {
        target.attr
        for node in ast.walk(facade)
        for target in _assigned(node)
        if not target.attr.startswith("_")
    }
    assert shown - {"ctime_ns", "lookups", "trusted_since"} == {
        "settings",
        "lock",
        "steps",
        "attributes_at_once",
        "entry_at_once",
        "never_kept_at_once",
    }
    layers = {
        path.relative_to(PACKAGE).parts[0]
        for path in SOURCES
        if "import FileSystemParts" in path.read_text(encoding="utf-8")
    }
    assert layers == {"filesystem", "worker"}
    inside = re.compile(r"\b_?fs\._\w+")
    assert [
        f"{named(path)}: {found[0]}"
        for path in SOURCES + TESTS
        for found in inside.finditer(path.read_text(encoding="utf-8"))
    ] == []


def _assigned(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a statement gives something, also those of a tuple."""
    if (
        isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        and node.value is not None
        and ast.unparse(node.value) != "None"
    ):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (
                one
                for one in ast.walk(target)
                if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
            )


def _of_callables(tree: ast.Module) -> set[str]:
    """Names of attributes that are declared to be called."""
    declared = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("Callable[")
    ]
    targets = [node.target for node in declared]
    return {
        one.attr if isinstance(one, ast.Attribute) else one.id
        for one in targets
        if isinstance(one, ast.Attribute | ast.Name)
    }


def _slots_filled(path: Path, callables: set[str]) -> Iterator[str]:
    """What is to be called, and is assigned by others than the constructor, or than `follow`, by
    which one asks to be told.

    A record and its keeper may share a module.
    """
    tree = tree_of(path)
    others = callables - _of_callables(tree)
    made = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "follow")
    ]
    in_constructors = {node for function in made for node in ast.walk(function)}
    for node in ast.walk(tree):
        for target in _assigned(node):
            is_own = ast.unparse(target.value) == "self"
            if (target.attr in others and not is_own) or (
                is_own and node not in in_constructors and target.attr in callables - others
            ):
                yield f"{path.relative_to(PACKAGE)}: {ast.unparse(target)}"


def test_collaborators_come_through_constructors() -> None:
    apart: dict[str, list[Path]] = {"training": [], "compatible": [], "": []}
    for path in SOURCES:
        layer = path.relative_to(PACKAGE).parts[0]
        apart[layer if layer in apart else ""].append(path)
    found = set[str]()
    for paths in apart.values():
        callables = {name for path in paths for name in _of_callables(tree_of(path))}
        found |= {slot for path in paths for slot in _slots_filled(path, callables)}
    assert found == set(), "give it at construction"


PARAMETERS_MAX = 8


def _parameters(made: ast.FunctionDef) -> int:
    arguments = made.args
    return len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1


def test_constructors_have_few_parameters() -> None:
    """What belongs together has a name of its own, and comes as one."""
    many: set[str] = set()
    for path in SOURCES:
        for owner in (node for node in nodes_of(path) if isinstance(node, ast.ClassDef)):
            for made in owner.body:
                if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                    place = f"{path.relative_to(PACKAGE)}: {owner.name}"
                    many |= {place} if _parameters(made) > PARAMETERS_MAX else set()
    assert many == set(), "what of it belongs together?"


def _declared_empty(path: Path) -> Iterator[str]:
    """Names of attributes of an object of ours that a constructor declares with nothing in them, or
    with None.
    """
    for made in (node for node in functions(path) if node.name == "__init__"):
        for node in ast.walk(made):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Attribute)
                and ast.unparse(node.target.value) == "self"
            ):
                kinds = {part.strip() for part in ast.unparse(node.annotation).split("|")} - {
                    "None"
                }
                is_empty = node.value is None or ast.unparse(node.value) == "None"
                if is_empty and not all(VALUES.match(kind) for kind in kinds):
                    yield node.target.attr


def _objects_put_in(path: Path, empty: dict[str, set[str]]) -> Iterator[str]:
    """What a module assigns to an attribute of another's object, which a module that it imports has
    declared empty.

    A record and its keeper may share a module.
    """
    imported = {name for name, _line, _late in _modules(path)}
    own = set(_declared_empty(path))
    for node in nodes_of(path):
        for target in _assigned(node):
            if (
                ast.unparse(target.value) != "self"
                and target.attr not in own
                and empty.get(target.attr, set()) & imported
            ):
                yield f"{path.relative_to(PACKAGE)}: {ast.unparse(target)}"


def test_objects_are_not_put_in_later() -> None:
    """As above, for what is no callable: `self.x: X | None = None`, which another module fills."""
    empty: dict[str, set[str]] = {}
    for path in SOURCES:
        for name in _declared_empty(path):
            empty.setdefault(name, set()).add(
                ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
            )
    found = {slot for path in SOURCES for slot in _objects_put_in(path, empty)}
    assert found - PUT_IN_LATER.keys() == set(), (
        "give it at construction, or to the call that needs it"
    )
    assert PUT_IN_LATER.keys() - found == set(), "take it out of the list"


def test_only_steps_change_where_an_operation_is() -> None:
    """`Op.take` and `Op.put` look into the tables of `log.stages`; whoever assigned would pass them
    by.
    """
    wrong = []
    for path in SOURCES:
        if path.relative_to(PACKAGE) != Path("writeback/log/ops.py"):
            tree = tree_of(path)
            targets = [target for node in ast.walk(tree) for target in _assigned(node)]
            wrong += [
                f"{named(path)}:{one.lineno} {ast.unparse(one)}"
                for one in targets
                if one.attr in ("stage", "aside")
            ]
            calls = [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"
            ]
            wrong += [
                f"{named(path)}:{one.lineno}"
                for one in calls
                if ast.unparse(one.args[1]) in ("'stage'", "'aside'")
            ]
    assert wrong == []


LINK_COUNTS = {
    "nlink": {
        "backing": "what a stat says",
        "filesystem/attribute_calls.py": "shown",
        "filesystem/first_sight.py": "asks more of what may have several names",
        "filesystem/lowerview.py": "counts names that nobody has looked up here",
        "filesystem/nodes.py": "adopts it",
        "filesystem/recognition.py": "asks more of what may have several names",
        "transport": "shown",
        "writeback/commits/placing.py": "where the storage counts links, as probed",
        "writeback/streams/equal.py": "where the storage counts links, as probed",
        "writeback/streams/spares.py": "where the storage counts links, as probed",
    },
    "shown_links": {
        "filesystem/attribute_calls.py": "shown",
        "filesystem/invariants.py": "in words for people",
        "filesystem/nodes.py": "defined, and recorded",
    },
    "directory_links": {"filesystem/nodes.py": "counted only where the storage counts"},
}
"""Where a link count is read.

Everywhere else it would decide something, and it is a hint of the storage (S410).
"""


def test_no_link_count_decides_anything() -> None:
    def is_named(path: Path, places: dict[str, str]) -> bool:
        return any(path.is_relative_to(PACKAGE / place) for place in places)

    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.attr}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and not is_named(path, LINK_COUNTS.get(node.attr, {"": "another attribute"}))
    ]
    assert wrong == []


COMMITS = {
    "ram/state.py": "steps",
    "filesystem/steps.py": "steps of calls, of which a result may be withheld",
    "filesystem/content/outgrown.py": "what the step that asked for it has changed",
    "writeback/members/incarnation.py": "at the start, before anybody else is there",
    "writeback/sources/spill.py": "the same",
}
"""Where a transaction is ended by a word.

Everywhere else it is a step's, which a bug does not commit (S412).
"""


def test_transactions_end_with_steps() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and node.attr == "commit"
        and "state" in ast.unparse(node.value)
        and str(path.relative_to(PACKAGE)) not in COMMITS
    ]
    assert wrong == []


def _no_answers() -> set[str]:
    """Errors of the package that `state.is_answer` takes for bugs."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }
    answers = {"OSError", "AcpfsError", "CancelledError"}
    while more := {name for name, found in bases.items() if found & answers} - answers:
        answers |= more
    errors = {"Exception", "BaseException", "RuntimeError", "ValueError", "LookupError", "KeyError"}
    while more := {name for name, found in bases.items() if found & errors} - errors - answers:
        errors |= more
    return errors


def _is_step(item: ast.withitem) -> bool:
    call = item.context_expr
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "step"
    )


def test_a_step_ends_with_an_answer() -> None:
    """Anything else abandons the state, and ends the worker (S412)."""
    no_answers = _no_answers()
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in SOURCES
        for block in ast.walk(tree_of(path))
        if isinstance(block, ast.With) and any(_is_step(item) for item in block.items)
        for node in ast.walk(block)
        if isinstance(node, ast.Raise)
        and node.exc is not None
        and ast.unparse(node.exc).partition("(")[0] in no_answers
    ]
    assert wrong == []


def test_what_has_happened_to_an_operation_is_said_once() -> None:
    """`let_go` and `delayed` are no states: one place says each, and nobody takes the first one
    back.
    """
    found: dict[str, set[str]] = {"let_go": set(), "delayed": set()}
    for path in sorted((PACKAGE / "writeback").rglob("*.py")):
        for node in nodes_of(path):
            for target in _assigned(node):
                if target.attr in found:
                    found[target.attr].add(f"{path.name}: {ast.unparse(node)}")
    assert found["let_go"] == {"log.py: op.let_go = True"}
    assert {text.partition(":")[0] for text in found["delayed"]} == {"gate.py"}


def test_names_need_not_be_learnt() -> None:
    """Words that said nothing to a stranger, and were replaced: they do not come back."""
    wrong = [named(path) for path in SOURCES if path.stem in UNGUESSED]
    for path in SOURCES:
        defined = [
            node
            for node in nodes_of(path)
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        names = [(node.name.strip("_").lower(), node.lineno) for node in defined]
        wrong += [
            f"{named(path)}:{line}: {name}: say {UNGUESSED[name]}"
            for name, line in names
            if name in UNGUESSED
        ]
    assert wrong == []


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and docstrings, with the line in which they begin."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT or (
                token.type == tokenize.STRING and token.string.startswith('"""')
            ):
                yield token.start[0], " ".join(token.string.split())


def test_a_word_means_one_thing() -> None:
    ours = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] not in MEMBERS_ARE_NODES]
    prose = [(f"{named(path)}:{line}", text) for path in ours for line, text in _prose(path)]
    documents = [
        REPOSITORY / "docs" / "ARCHITECTURE.md",
        *sorted((REPOSITORY / "docs" / "internals").glob("*.md")),
    ]
    prose += [(named(path), path.read_text(encoding="utf-8")) for path in documents]
    found = [
        (place, word[0], say)
        for place, text in prose
        for pattern, say in HOMONYMS.items()
        for word in re.finditer(pattern, text)
    ]
    assert found == []


def _several_assignments(node: ast.AST) -> bool:
    """`a, b = x, y`, which is two lines; not an exchange, and not what takes a sequence apart."""
    if isinstance(node, ast.Assign) and len(node.targets) > 1:
        return True
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    values = node.value.elts
    if any(isinstance(value, ast.Starred) for value in values):
        return False
    read = {ast.unparse(inner) for value in values for inner in ast.walk(value)}
    return any(
        isinstance(target, ast.Tuple)
        and not any(ast.unparse(written) in read for written in target.elts)
        for target in node.targets
    )


def _banned(path: Path, *, library: bool) -> Iterator[str]:
    for node in nodes_of(path):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{line}: bare except"
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield f"{line}: star import"
        if _several_assignments(node):
            yield f"{line}: several assignments in one"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "time.sleep" and not library:
                yield f"{line}: sleep in a test"
            if called == "select.select" and any(
                ast.unparse(waited) != "[]" for waited in node.args[:3]
            ):
                yield (
                    f"{line}: select takes no descriptor beyond 1023; "
                    "acpfs.descriptors.readable, or poll"
                )
            if called == "print" and library and "cli" not in path.parts:
                yield f"{line}: print in a library"
        if (
            isinstance(node, ast.Import | ast.ImportFrom)
            and not library
            and "unittest.mock" in ast.unparse(node)
        ):
            yield f"{line}: mock"


def _sleeps(path: Path) -> Iterator[str]:
    """Also one that is only handed on."""
    for node in nodes_of(path):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        names = (
            [f"{node.module}.{alias.name}" for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else [name]
        )
        if "time.sleep" in names:
            yield f"{named(path)}:{getattr(node, 'lineno', 0)}"


def test_no_thread_of_a_pool_sleeps() -> None:
    """Threads of pools wait for the backing directory, or for futures: one that sleeps keeps others
    from theirs.
    """
    layers = ("filesystem", "writeback", "ram", "backing")
    paths = [path for layer in layers for path in sorted((PACKAGE / layer).rglob("*.py"))]
    assert [place for path in paths for place in _sleeps(path)] == []


ON_DESCRIPTORS = re.compile(
    r"os\.(close|copy_file_range|dup|dup2|fchmod|fchown|fdatasync|fstat|fsync|ftruncate|lseek"
    r"|posix_fadvise|posix_fallocate|pread|preadv|pwrite|pwritev|sendfile)"
)


def test_calls_on_descriptors_of_the_storage_go_through_lower() -> None:
    """But for those that are named with a reason: a double of the storage, with its faults, is
    asked for nothing else.

    By reading nobody can tell whose descriptor it is: each module with such calls says so, and a
    history of `tests/sim` sees whether it is true.
    """
    calls: dict[str, set[str]] = {}
    for layer in ("filesystem", "writeback"):
        for path in sorted((PACKAGE / layer).rglob("*.py")):
            for node in nodes_of(path):
                name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
                if ON_DESCRIPTORS.fullmatch(name):
                    calls.setdefault(str(path.relative_to(PACKAGE)), set()).add(name[3:])
    assert not PAST_LOWER.keys() & OF_OTHERS.keys()
    assert calls.keys() == PAST_LOWER.keys() | OF_OTHERS.keys()
    assert [
        module for module, (named, _why) in PAST_LOWER.items() if set(named) - calls[module]
    ] == [], "these are made no more"


HAVE_NO_STARTER = {"client", "torch", "training", "compatible"}
"""They are in a training process, whose threads are its own affair."""


def _threads_started(path: Path) -> Iterator[str]:
    """Also one that a library starts, where the call shows."""
    for node in nodes_of(path):
        name = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        if name in ("threading.Thread", "Thread", "trio.to_thread.run_sync", "ThreadPoolExecutor"):
            yield f"{named(path)}:{getattr(node, 'lineno', 0)}"


def test_threads_are_started_in_one_place() -> None:
    """Where the machine has none left, `acpfs.runtime.threads` waits; anybody else's RuntimeError
    would end the worker.
    """
    own = {PACKAGE / "runtime" / "threads.py", PACKAGE / "transport" / "native" / "hold_process.py"}
    """The second is a program of its own, which imports nothing of the package, and catches that
    error.
    """
    paths = [
        path
        for path in SOURCES
        if path not in own and path.relative_to(PACKAGE).parts[0] not in HAVE_NO_STARTER
    ]
    assert [place for path in paths for place in _threads_started(path)] == []


HAVE_A_RUNTIME = ("backing", "ram", "writeback", "filesystem", "worker", "control")
"""Layers whose parts get clock, threads and chance through their constructors.

Only longer from here.
"""
TAKES_OF_THE_MACHINE = {
    "worker/daemon.py: real_runtime": "a worker's process has one, made here",
    "control/client.py: time.monotonic": "in the processes of commands and clients",
    "control/client.py: threading.Event": "the same",
    "control/metric_table.py: time.time": (
        "a gauge knows a status only, in which times are the wall clock's"
    ),
}
"""Why they may all the same."""
TOUCHES_THE_KERNEL = {
    "transport/invalidations.py": "a thread that waits in the kernel for locks of requests",
    "transport/libfuse.py": "unmounts in a thread",
    "transport/request_turns.py": "how long a read of /dev/fuse may wait",
    "transport/native/continuations.py": (
        "how long callers have been waiting, and which died, by /proc"
    ),
    "transport/native/dispatch.py": (
        "a request that hung a worker is carried out in a thread of its own"
    ),
    "transport/native/hold_process.py": "is a process of its own, with nothing of acpfs",
    "transport/native/holding.py": "the process that holds writers, over a socket",
    "transport/native/hung_requests.py": "readers that stand in the kernel",
    "transport/native/operations.py": "the time that a caller of utimensat means by now",
    "transport/native/reader.py": "threads that read /dev/fuse",
    "transport/native/serve.py": "opens and closes /dev/fuse in a thread",
    "supervisor/child.py": "heartbeats of a worker's process",
    "supervisor/fallthrough.py": "looks at a mount point that may hang",
    "supervisor/handover.py": "two supervisors, over a socket",
    "supervisor/keeper.py": "its loop waits for sockets",
    "supervisor/keeper_client.py": "the other end of that",
    "supervisor/mount_state.py": "since when a worker is dead",
    "supervisor/supervisor.py": "its loop waits for processes, signals and sockets",
    "supervisor/templates.py": "the age of a process",
    "mounting/checks.py": "in a command's process, before there is a worker; a storage may hang",
    "mounting/doctor.py": "the same",
    "mounting/starting.py": "the same; waits for another daemon's socket",
}
"""Files of the other layers that have real clocks and threads, and why.

No history of `tests/sim` runs them.
"""
OF_THE_MACHINE = re.compile(
    r"time\.(monotonic|time|perf_counter|clock_gettime)(_ns)?|time\.sleep"
    r"|threading\.(Thread|Event|Condition|Timer|Semaphore|BoundedSemaphore|Barrier)"
    r"|THREADS|real_runtime|random\.\w+|secrets\.\w+"
)
"""What a history of `tests/sim` could not give instead."""
LOCKS_OF_FIELDS = {
    "backing/areas.py: _lock",
    "backing/attributes.py: _lock",
    "backing/calls.py: _lock",
    "backing/health.py: _lock",
    "backing/progress.py: _lock",
    "backing/read_rate.py: _lock",
    "filesystem/content/fill.py: _lock",
    "filesystem/content/from_members.py: _lock",
    "filesystem/last_close.py: _lock",
    "worker/mapped_pages.py: _lock",
    "worker/outbox.py: _lock",
    "writeback/arrival.py: _lock",
    "writeback/commits/garbage.py: _lock",
    "writeback/copies/member_journals.py: _lock",
    "writeback/copies/on_member.py: _lock",
    "writeback/copies/removals.py: _lock",
    "writeback/streams/room_there.py: _lock",
    "writeback/streams/scheduler.py: _lock",
    "backing/own_files.py: _calls_lock",
}
"""Kept while fields of their object are read or written, and no longer."""
LOCKS_OF_A_MOMENT = {
    "backing/terms.py: _lock": (
        "taken twice by one thread; kept over calls on the storage, whose double has no terms"
    ),
    "control/client.py: _lock": "in the processes of commands and clients",
    "filesystem/content/fill.py: _touching": "kept over a write to a tier file",
    "filesystem/upper.py: lock": "kept for a step, and let go before any wait",
    "ram/prefault.py: _pages": "kept while memory is allocated",
    "worker/link.py: _telling": "what it sends goes out in the outbox's thread",
    "writeback/manifest/manifest.py: _loading": (
        "kept over reads of the storage; of the two that load it a history has the engine alone"
    ),
}
"""The others that are made in those layers, and why: a history has one thread for all, and stands
still for ever where somebody keeps such a lock over a turn.

Whoever waits for storage, disk, network or another thread while he has a lock takes it from
`Threads.lock`.
"""
BARE_LOCKS = {"threading.Lock", "threading.RLock", "Lock", "RLock"}


def _locks_made(path: Path) -> Iterator[str]:
    """By what keeps them."""
    kept = {
        node.value: node.targets[0] if isinstance(node, ast.Assign) else node.target
        for node in nodes_of(path)
        if isinstance(node, ast.Assign | ast.AnnAssign)
    }
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in BARE_LOCKS:
            yield ast.unparse(kept.get(node, node)).removeprefix("self.")


def _taken_of_the_machine(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes_of(path):
        names = [ast.unparse(node)] if isinstance(node, ast.Attribute | ast.Name) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [alias.name for alias in node.names]
        yield from (
            (getattr(node, "lineno", 0), name) for name in names if OF_THE_MACHINE.fullmatch(name)
        )


@pytest.mark.parametrize("layer", HAVE_A_RUNTIME)
def test_clock_threads_and_chance_are_given(layer: str) -> None:
    """`acpfs.runtime`: docs/CONTRIBUTING.md says how a part gets them."""
    assert [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in sorted((PACKAGE / layer).rglob("*.py"))
        for line, name in _taken_of_the_machine(path)
        if f"{path.relative_to(PACKAGE)}: {name}" not in TAKES_OF_THE_MACHINE
    ] == []


def test_locks_that_are_kept_over_a_wait_are_given() -> None:
    made = {
        f"{path.relative_to(PACKAGE)}: {lock}"
        for layer in HAVE_A_RUNTIME
        for path in sorted((PACKAGE / layer).rglob("*.py"))
        for lock in _locks_made(path)
    }
    assert made == LOCKS_OF_FIELDS | LOCKS_OF_A_MOMENT.keys()


@pytest.mark.parametrize("layer", ["transport", "supervisor", "mounting"])
def test_real_clocks_and_threads_are_where_the_kernel_is_touched(layer: str) -> None:
    have = {
        str(path.relative_to(PACKAGE))
        for path in (PACKAGE / layer).rglob("*.py")
        if any(_taken_of_the_machine(path))
    }
    assert have == {name for name in TOUCHES_THE_KERNEL if name.startswith(f"{layer}/")}


def test_no_banned_idioms_in_the_package() -> None:
    assert [
        f"{named(path)}:{found}" for path in SOURCES for found in _banned(path, library=True)
    ] == []


def test_no_banned_idioms_in_tests() -> None:
    tests = [path for path in TESTS if "frameworks" not in path.parts]
    assert [
        f"{named(path)}:{found}" for path in tests for found in _banned(path, library=False)
    ] == []


STOPS_OTHERS = {
    "rig/processes.py": "waits until they stand still",
    "drill/stand.py": "waits also for calls that are under way, or kills next",
    "deploy/node_rig.py": "kills next",
    "training/test_gasp_processes.py": "the same helper sends SIGCONT and SIGKILL",
    "training/ranks/replace_storm.py": "stops at any moment",
}
"""Why they send it by themselves."""


def _stops_another(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and any(ast.unparse(argument) == "signal.SIGSTOP" for argument in node.args)
        and ast.unparse(node) != "os.kill(os.getpid(), signal.SIGSTOP)"
    )


def test_who_is_stopped_stands_still() -> None:
    """SIGSTOP returns before: `tests.rig.processes.stop_processes` waits for it."""
    stops = {
        str(path.relative_to(REPOSITORY / "tests"))
        for path in TESTS
        for node in nodes_of(path)
        if _stops_another(node)
    }
    assert stops == STOPS_OTHERS.keys()


def test_no_random_example_has_a_limit_in_time() -> None:
    """A machine that stands still for a moment exceeds it; `tests/conftest.py` takes hypothesis's
    own ones away.
    """
    assert settings.default is not None
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check


def _never_called(path: Path) -> Iterator[str]:
    """What a function defines inside and does not use: a test whose `run(scenario)` is forgotten
    passes always.
    """
    for outer in functions(path):
        names = {node.id for node in ast.walk(outer) if isinstance(node, ast.Name)}
        inner = [
            node
            for node in outer.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list
        ]
        yield from (
            f"{named(path)}:{node.lineno}: {node.name}" for node in inner if node.name not in names
        )


def test_what_a_function_defines_inside_is_used() -> None:
    assert [found for path in SOURCES + TESTS for found in _never_called(path)] == []


# -- the contract


def numbers_of_clauses() -> list[str]:
    return [
        number for page in CONTRACTS for number in CLAUSE.findall(page.read_text(encoding="utf-8"))
    ]


def clauses() -> set[str]:
    return set(numbers_of_clauses())


@functools.cache
def citations() -> dict[str, list[str]]:
    """Clause → tests that cite it with `pytest.mark.clause(…)` or the short form `clause(…)`."""
    found: dict[str, list[str]] = {}
    for path in TESTS:
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "clause",
                "pytest.mark.clause",
            ):
                for argument in node.args:
                    if isinstance(argument, ast.Constant):
                        found.setdefault(str(argument.value), []).append(
                            f"{named(path)}:{node.lineno}"
                        )
    return found


def test_every_clause_is_cited_by_a_test() -> None:
    assert sorted(clauses() - citations().keys()) == []


def test_every_citation_names_a_clause() -> None:
    assert {clause: where for clause, where in citations().items() if clause not in clauses()} == {}


def test_numbers_of_clauses_are_used_once() -> None:
    found = numbers_of_clauses()
    assert len(found) == len(set(found))
