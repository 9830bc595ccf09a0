"""What is a checkpoint: recognition by path, for retention, the guard, preload and the view.

A checkpoint is a directory of a well-known shape (`iter_0001000`, `checkpoint-500`) directly under
a *save_dir*, or one file of such a shape, or several files that differ in one placeholder only.
Shapes are patterns: globs with placeholders, described at `DEFAULT_PATTERNS`. Pure: looks at paths
relative to the mount point and at nothing else, so it cannot tell whether a checkpoint is whole.
Thread-safe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from acpfs.errors import ConfigError

_SUFFIXES = (
    "bin",
    "ckpt",
    "distcp",
    "gguf",
    "h5",
    "hdf5",
    "keras",
    "msgpack",
    "npz",
    "pdparams",
    "pkl",
    "pt",
    "pth",
    "safetensors",
    "tar",
)

DEFAULT_PATTERNS = (
    "rank_{part}/{part}-{epoch}_{step}.ckpt",
    "rank_{part}/{part}-{epoch}_{step}.safetensors",
    "*epoch={epoch}*step={step}*",
    "*step={step}*",
    "*epoch={epoch}*",
    "epoch[-_]{epoch}[-_]step[-_]{step}",
    "epoch{epoch}[-_]step{step}",
    "iter[-_]{step}",
    "iteration[-_]{step}",
    "checkpoint[-_]{step}",
    "checkpoint{step}",
    "ckpt[-_]{step}",
    "global_step[-_]{step}",
    "global_step{step}",
    "step[-_]{step}",
    "step{step}",
    "epoch[-_]{epoch}",
    "epoch{epoch}",
    "checkpoint_{epoch}_{step}{suffix}",
    "epoch[-_]{epoch}{suffix}",
    "epoch{epoch}{suffix}",
    "checkpoint{epoch}{suffix}",
    "{model|weights|checkpoint|ckpt|state|snapshot|step|iter|optimizer|optim|opt|scheduler|ema|rng|net|g|d}[-_]{step}{suffix}",
    "{ckpt|model.ckpt}-{step}.{part}",
    "{part}-{epoch}_{step}.ckpt",
    "{part}-{epoch}_{step}.safetensors",
    "{step}/",
)
"""Shapes of Megatron, Transformers, DeepSpeed, Lightning, MindSpore, NeMo, TorchTitan, Ray,
TensorFlow, Orbax and home-made loops.

`*`, `?` and `[-_]` as in globs, never across `/`. `{step}`, `{epoch}`: a number, by which
checkpoints are ordered. `{suffix}`: an ending such as `.pt`. `{a|b}`: one of these texts; `{part}`:
any text. What stands in these two tells the files of one checkpoint apart and is not part of its
name. A pattern with `/` has that many directories in a row; one that ends in `/` is for directories
only. Upper and lower case are the same. Where several match, the outermost directory counts, and
then the order here; a pattern of nothing but a number counts only where no other matches, and not
for the chunks of an array store: below a directory named `c` (Zarr 3), or anywhere below one that
ends in `.zarr` or `.n5`. What looks like a temporary file (`.tmp` and the like) never matches.
"""

_PLACEHOLDER = re.compile(r"\{([^{}/]*)\}")
_GLOB = re.compile(r"(?P<choice>\[[A-Za-z0-9._+=-]+\])|.", re.DOTALL)
_TEMPORARY = re.compile(
    rb"^\.|\.(tmp|part|partial|temp|lock)(?![^._-])|[._-]tmp[._-]|~$", re.IGNORECASE
)
_STATE = re.compile(
    rb"\.(%s|npy|onnx|pickle|index)$|(^|/)(\.metadata|_METADATA|_CHECKPOINT_METADATA|commit_success\.txt"
    rb"|manifest\.ocdbt|checkpoint|saved_model\.pb|\.zarray|\.zgroup|zarr\.json)$"
    % "|".join(_SUFFIXES).encode()
)
_ARRAY = re.compile(rb"\.(zarr|n5)$", re.IGNORECASE)
"""A directory of an array store, whose chunks have numbers for names."""
_CHUNKS = b"c"
"""What Zarr 3 calls the directory of an array's chunks, whatever the array is called."""
_GROUP = re.compile(rb"\(\?P<\w+>")
_FLAGS = re.IGNORECASE | re.DOTALL
_REMEMBERED_PATHS = 4096
_REMEMBERED_LISTS = 8
_REMEMBERED_PATTERNS = 256
"""Recognising takes up to 20 us, and is asked for several times in a file's life."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint, by name; whatever is said to belong to it gives an equal one."""

    save_dir: bytes
    """Path of the directory that the checkpoints of one run lie in, relative to the mount point;
    b"" is the mount point.
    """
    name: bytes
    """Below `save_dir`; with `*` for what tells its files apart.

    Contains `/` where the pattern does.
    """
    step: int | None
    """By which checkpoints of one epoch are ordered; the epoch where the name has no other number,
    None where it has none.
    """
    epoch: int = 0
    """Comes before the step in the order; 0 where the name has none."""

    @property
    def path(self) -> bytes:
        """Relative to the mount point; of a directory or a file unless the name has a `*`."""
        return self.save_dir + b"/" + self.name if self.save_dir else self.name

    @property
    def order(self) -> tuple[int, int]:
        """Newer ones of a save_dir are larger; those that are equal are ordered by when they were
        closed.
        """
        return self.epoch, -1 if self.step is None else self.step


@dataclass(frozen=True, slots=True)
class _Shape:
    regex: re.Pattern[bytes]
    last: re.Pattern[bytes]
    """Of its last path component alone."""
    parts: int
    """Path components that it takes."""
    directory: bool
    bare: bool
    """Nothing but a number: the weakest."""


def is_state(name: bytes) -> bool:
    """Whether a file's name (or path) says that it is part of a checkpoint."""
    return _STATE.search(name) is not None


class Checkpoints:
    """Recognises checkpoints by a list of patterns."""

    def __init__(self, patterns: Iterable[str] = DEFAULT_PATTERNS) -> None:
        """Raises `ConfigError` for a pattern that makes no sense."""
        self._strong, self._bare, self._last = _understood(tuple(patterns))
        self._above = lru_cache(_REMEMBERED_PATHS)(self._directory)
        self._number_above = lru_cache(_REMEMBERED_PATHS)(self._bare_directory)
        self._remembered = lru_cache(_REMEMBERED_PATHS)(self._of)

    def of(self, path: bytes, *, directory: bool = False) -> Checkpoint | None:
        """The checkpoint that the path, relative to the mount point, is or lies in; `directory`:
        the path is a directory's.
        """
        return self._remembered(path, directory)

    def _of(self, path: bytes, directory: bool) -> Checkpoint | None:
        head, _slash, name = path.rpartition(b"/")
        above = self._above(head)
        if above is not None:
            return above
        if not self._last.fullmatch(
            name
        ):  # nearly every file: what is known of its directory answers
            return self._number_above(head)
        components = path.split(b"/")
        return self._strong.ending(components, directory=directory) or self._outermost_bare(
            components, directory=directory
        )

    def _directory(self, path: bytes) -> Checkpoint | None:
        return self._strong.outermost(path.split(b"/"), directory=True)

    def _bare_directory(self, path: bytes) -> Checkpoint | None:
        return self._outermost_bare(path.split(b"/"), directory=True)

    def _outermost_bare(self, components: list[bytes], *, directory: bool) -> Checkpoint | None:
        """A directory named by a number alone, unless it is a chunk of an array."""
        found = self._bare.outermost(components, directory=directory)
        if found is None:
            return None
        above = found.save_dir.split(b"/")
        if above[-1] == _CHUNKS or any(_ARRAY.search(name) for name in above):
            return None
        return found


class _Shapes:
    """Shapes of one strength."""

    def __init__(self, shapes: list[_Shape]) -> None:
        self._by_parts: dict[int, list[_Shape]] = {}
        for shape in shapes:
            self._by_parts.setdefault(shape.parts, []).append(shape)
        self._any = {
            parts: _any_of(shape.regex for shape in alike)
            for parts, alike in self._by_parts.items()
        }
        """One regular expression that says no quickly: most paths are of nothing like a
        checkpoint.
        """

    def outermost(self, components: list[bytes], *, directory: bool) -> Checkpoint | None:
        """The match that begins first; of several there, the longest, then the first one in the
        order of the patterns.
        """
        for start in range(len(components)):
            for parts in sorted(self._by_parts, reverse=True):
                end = start + parts
                found = self._match(
                    components, start, end, directory=directory or end < len(components)
                )
                if found is not None:
                    return found
        return None

    def ending(self, components: list[bytes], *, directory: bool) -> Checkpoint | None:
        """The match that takes the path to its end, where no directory above matches."""
        for parts in sorted(self._by_parts, reverse=True):
            found = self._match(
                components, len(components) - parts, len(components), directory=directory
            )
            if found is not None:
                return found
        return None

    def _match(
        self, components: list[bytes], start: int, end: int, *, directory: bool
    ) -> Checkpoint | None:
        names = components[start:end]
        joined = b"/".join(names)
        if start < 0 or end > len(components) or not self._any[end - start].fullmatch(joined):
            return None
        if any(_TEMPORARY.search(name) for name in names):
            return None
        for shape in self._by_parts[end - start]:
            match = shape.regex.fullmatch(joined) if directory or not shape.directory else None
            if match is not None:
                return _checkpoint(b"/".join(components[:start]), match)
        return None


@lru_cache(_REMEMBERED_LISTS)
def _understood(patterns: tuple[str, ...]) -> tuple[_Shapes, _Shapes, re.Pattern[bytes]]:
    """The strong ones, the bare ones, and what ends any of them: a daemon asks for the same ones
    four times as it starts, and each is a millisecond.
    """
    shapes = [_shape(pattern) for pattern in patterns]
    strong = _Shapes([shape for shape in shapes if not shape.bare])
    bare = _Shapes([shape for shape in shapes if shape.bare])
    return strong, bare, _any_of(shape.last for shape in shapes)


def _any_of(patterns: Iterable[re.Pattern[bytes]]) -> re.Pattern[bytes]:
    return re.compile(
        b"|".join(_GROUP.sub(b"(?:", pattern.pattern) for pattern in patterns), _FLAGS
    )


def _checkpoint(save_dir: bytes, match: re.Match[bytes]) -> Checkpoint:
    step = None
    epoch = None
    name = b""
    at = 0
    for group, text in match.groupdict().items():
        if text is not None and group.startswith("part"):
            name += match.string[at : match.start(group)] + b"*"
            at = match.end(group)
        elif group == "step":
            step = int(text)
        elif group == "epoch":
            epoch = int(text)
    return Checkpoint(
        save_dir, name + match.string[at:], epoch if step is None else step, epoch or 0
    )


@lru_cache(_REMEMBERED_PATTERNS)
def _shape(pattern: str) -> _Shape:
    directory = pattern.endswith("/")
    text = pattern.rstrip("/")
    regex = ""
    at = 0
    parts = 0
    if not text or text.startswith("/"):
        raise ConfigError(
            f"{pattern!r} is not a pattern for checkpoints: a pattern is relative and not empty"
        )
    for match in _PLACEHOLDER.finditer(text):
        regex += _glob(text[at : match.start()], pattern) + _placeholder(match[1], parts, pattern)
        parts += match[1] not in ("step", "epoch", "suffix")
        at = match.end()
    regex += _glob(text[at:], pattern)
    try:
        compiled = re.compile(regex.encode(errors="surrogateescape"), _FLAGS)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a pattern for checkpoints: {error}") from None
    last = _shape(text.rpartition("/")[2]).regex if "/" in text else compiled
    return _Shape(compiled, last, text.count("/") + 1, directory, bare=text == "{step}")


def _placeholder(name: str, number: int, pattern: str) -> str:
    if name in ("step", "epoch"):
        return f"(?P<{name}>[0-9]{{1,18}})"
    if name == "suffix":
        return rf"\.(?:{'|'.join(_SUFFIXES)})"
    if name == "part":
        return f"(?P<part{number}>[^/]+?)"
    if "|" in name:
        return f"(?P<part{number}>{'|'.join(re.escape(choice) for choice in name.split('|'))})"
    raise ConfigError(
        f"{pattern!r}: {{{name}}} is none of {{step}}, {{epoch}}, {{part}}, {{suffix}}, {{a|b}}"
    )


def _glob(text: str, pattern: str) -> str:
    if set(text) & set("{}"):
        raise ConfigError(f"{pattern!r}: unbalanced brace")
    regex = ""
    for match in _GLOB.finditer(text):
        kind = match.lastgroup
        regex += (
            match[0]
            if kind == "choice"
            else {"*": "[^/]*", "?": "[^/]"}.get(match[0], re.escape(match[0]))
        )
    return regex
