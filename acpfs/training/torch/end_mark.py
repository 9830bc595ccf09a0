"""Trained tensors as the last update has left them: what still is that, and becomes it again.

A checkpoint is of the end of a step. What a loop does to parameters behind its update (clipping
weights, an evaluation with averaged ones) is of no step, and is there in some ranks, or in some
parameters, when a fault comes. So tensors are compared with what they were at the mark; and where a
loop does such things, a copy is taken at the mark and brought back. What is neither is in no
checkpoint.

A tensor is told by where it lies, by torch's count of writes to it, and by its first and last
bytes: `parameter.data` has a count of its own. What leaves no such trace is looked for behind the
first updates, by digests. Main thread, or who stands in for it while that waits.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from acpfs.errors import AcpfsError
from acpfs.logger import get_logger
from acpfs.training.messages import Shard
from acpfs.training.torch.digest import digest_of

log = get_logger(__name__)
LOOKED_AT = 2
"""Updates behind which digests are compared: a loop that does something behind each is seen,
however it does it."""
KEPT_UPDATES = 16
"""A copy is taken at so many marks behind a change that was seen: an evaluation now and then costs
none in between."""
COST_MAX = 0.05
"""Of the time of an update: a state that is made anew may take so much unsaid."""
SAMPLE_BYTES = 16
SHOWN_MAX = 3
_PLAIN = (torch.Tensor, torch.nn.Parameter)
Live = Mapping[Shard, Mapping[str, Mapping[str, Any]]]
"""Shard → parameter's name → itself under "", and its optimizer state."""


class ChangedError(AcpfsError):
    """Something is not what it was at the end of the step, and nobody knows any more what that
    was.
    """


def local(value: Any) -> Any:
    """This rank's part, without a copy or a record of autograd."""
    # `to_local` is slow
    found = value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001
    return found.detach()


def trace(value: Any) -> object:
    """What differs where somebody has written to a tensor."""
    written = writes(value)
    if not isinstance(written, tuple):
        return written
    found = value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001  # as above
    place = written[0]
    size = found.numel() * found.element_size()
    if not size or found.device.type != "cpu" or not found.is_contiguous():
        return written
    ends = min(size, SAMPLE_BYTES)
    first = ctypes.string_at(place, ends)
    return *written, first, ctypes.string_at(place + size - ends, ends)


def writes(value: Any) -> object:
    """The same without a look at bytes, at half the price: where a tensor lies, and torch's count
    of writes.
    """
    if type(value) not in _PLAIN:  # `isinstance` of torch's own types is slow
        if not isinstance(value, torch.Tensor):
            return repr(value)
        if isinstance(value, DTensor):
            value = value._local_tensor  # noqa: SLF001  # as above
    try:
        version = value._version  # noqa: SLF001  # torch has no other word for it
    except RuntimeError:  # made in inference mode
        version = None
    return value.data_ptr(), version


class EndDigest:
    """The same of a state that is made anew whenever it is asked for: compared, and never brought
    back.
    """

    def __init__(
        self,
        digests: Callable[[], Mapping[Shard, str]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._digests = digests
        self._clock = clock
        self._noted: Mapping[Shard, str] = {}
        self._noted_at: float | None = None
        self._is_told = False

    def note(self) -> None:
        begun = self._clock()
        self._noted = self._digests()
        ended = self._clock()
        if self._noted_at is not None:
            self._say_cost(ended - begun, begun - self._noted_at)
        self._noted_at = ended

    def _say_cost(self, took_s: float, trained_s: float) -> None:
        """The copies are the script's own doing: nobody else can make them cheaper."""
        if self._is_told or took_s <= COST_MAX * trained_s:
            return
        self._is_told = True
        log.warning(
            "state= gives copies, or other things than tensors: to compare them takes this much of "
            "each update; give the tensors themselves, which costs next to nothing",
            seconds=round(took_s, 3),
            of=round(trained_s, 3),
        )

    def skipping(self) -> None:
        """A step that changes nothing changes no digest."""

    def skipped(self) -> None:
        """Nor has it."""

    def look(self) -> None:
        """What has changed since is a part of what the next update begins with."""

    def keep(self) -> None:
        """Nothing can be."""

    def torn(self) -> tuple[Shard, ...]:
        """Shards that are not what they were at the mark."""
        now = self._digests()
        torn = tuple(sorted(shard for shard in now if now[shard] != self._noted.get(shard)))
        if torn:
            log.error("the state has changed since the last update: it is in no checkpoint")
        return torn

    def bring(self) -> None:
        """Only looks.

        Raises:
            ChangedError: it is not what it was.
        """
        if torn := self.torn():
            raise ChangedError(f"{', '.join(torn)}: changed since the last update")


class EndMark:
    """Of one rank."""

    def __init__(
        self,
        live: Callable[[], Live],
        bytes_max: int,
        *,
        is_told: bool = False,
        is_done: Callable[[], object] | None = None,
    ) -> None:
        """`bytes_max`: of a copy. `is_told`: whether the loop has said what follows an update.

        `is_done`: returns when the last update is, on a device that is behind; None: it always is.
        """
        self._live = live
        self._is_done = is_done
        self._bytes_max = bytes_max
        self._is_told = is_told
        self._traces: dict[tuple[Shard, str, str], object] = {}
        self._changed_before: set[tuple[Shard, str, str]] = set()
        """When the step that is skipped began."""
        self._copies: dict[str, Any] = {}
        """Of all parameters of all shards, or of none."""
        self._digests: dict[Shard, str] = {}
        self._updates = -1
        self._kept_for = 0
        self._is_untraced = False
        """Whether parameters change and leave no trace: nothing is as it was unless there is a
        copy."""

    # -- while the loop runs

    def note(self) -> None:
        """An update has ended, and its mark does not say so yet; or protection begins."""
        self._updates += 1
        self._traces = self._traced()
        self._copies = {}
        if self._kept_for or self._is_untraced:
            self._kept_for = max(0, self._kept_for - 1)
            self._copy()
        self._digests = self._digested() if 0 < self._updates <= LOOKED_AT else {}

    def skipping(self) -> None:
        """A step begins that changes nothing, but counts as a write of everything: a fused
        optimizer's, which a loss scaler has told of an overflow.
        """
        now = self._traced()
        self._changed_before = {key for key, found in now.items() if self._traces.get(key) != found}

    def skipped(self) -> None:
        """It has ended: what was changed before it still is; a state that it has made is as it
        was.
        """
        changed = self._changed_before
        now = self._traced()
        self._traces |= {key: found for key, found in now.items() if key not in changed}

    def look(self) -> None:
        """Gradients of the next update are complete: what has changed since the last one?"""
        if self._updates < 1:  # what is loaded behind `protect` is no change
            return
        changed = {shard for shard, _, _ in self._differing(parameters_only=True)}
        if not changed and self._digests:
            digests = self._digested()
            if changed := {shard for shard in digests if digests[shard] != self._digests[shard]}:
                self._is_untraced = True
        self._digests = {}
        if changed:
            self._say(changed)
            self._kept_for = KEPT_UPDATES

    def keep(self) -> None:
        """Something begins that may change parameters: an evaluation, or what follows an update."""
        if not self._copies and not self._is_untraced and not self.changed():
            self._copy()

    # -- at a fault

    def changed(self) -> set[Shard]:
        """Shards in which something is not what it was, copies or not."""
        return {shard for shard, _, _ in self._differing()}

    def _differing(self, *, parameters_only: bool = False) -> set[tuple[Shard, str, str]]:
        """A parameter that was not trained at the mark is not compared: it had its value then."""
        if parameters_only:
            return {
                (shard, name, "")
                for shard, parameters in self._live().items()
                for name, values in parameters.items()
                if (found := self._traces.get((shard, name, ""))) is not None
                and found != self._trace(values[""])
            }
        now = self._traced()
        known = {key[:2] for key in self._traces}
        return {
            key
            for key in self._traces.keys() | now.keys()
            if key[:2] in known and self._traces.get(key) != now.get(key)
        }

    def torn(self) -> tuple[Shard, ...]:
        """Shards that cannot be what they were at the mark."""
        if self._is_untraced and not self._copies:
            return tuple(self._live())
        lost = {key for key in self._differing() if key[2] or not self._copies}
        if lost:
            log.error(
                "changed since the last update, which no copy was taken of: in no checkpoint",
                shards=sorted({shard for shard, _, _ in lost}),
                parameters=sorted({name for _, name, _ in lost})[:SHOWN_MAX],
            )
        return tuple(sorted({shard for shard, _, _ in lost}))

    def bring(self) -> None:
        """Parameters are what they were at the mark. May be repeated.

        Raises:
            ChangedError: not all of them can be.
        """
        torn = self.torn()
        if self._copies:
            with torch.no_grad():
                for _, name, key, value in self._each():
                    if not key and name in self._copies:
                        local(value).copy_(self._copies[name])
            # of parameters only: an optimizer's state that was changed still is
            self._traces |= {key: found for key, found in self._traced().items() if not key[2]}
        if torn:
            raise ChangedError(f"{', '.join(torn)}: changed since the last update")

    # -- of all tensors

    def _each(self) -> Iterator[tuple[Shard, str, str, Any]]:
        for shard, parameters in self._live().items():
            for name, values in parameters.items():
                for key, value in values.items():
                    yield shard, name, key, value

    def _traced(self) -> dict[tuple[Shard, str, str], object]:
        return {
            (shard, name, key): writes(value) if key else self._trace(value)
            for shard, name, key, value in self._each()
        }

    def _trace(self, value: Any) -> object:
        """Of a parameter. Bytes of a device are what it has done, not what it was told."""
        return trace(value) if self._is_done is None else writes(value)

    def _wait(self) -> None:
        if self._is_done is not None:
            self._is_done()

    def _digested(self) -> dict[Shard, str]:
        """Of parameters: an optimizer's state is its own."""
        self._wait()
        return {
            shard: digest_of({name: local(values[""]) for name, values in parameters.items()})
            for shard, parameters in self._live().items()
        }

    def _copy(self) -> None:
        parameters = {name: local(value) for _, name, key, value in self._each() if not key}
        size = sum(value.numel() * value.element_size() for value in parameters.values())
        if size > self._bytes_max:
            log.warning(
                "parameters are not copied at the end of an update: raise copies_bytes_max",
                bytes=size,
                most=self._bytes_max,
            )
            return
        self._wait()
        try:
            self._copies = {name: value.clone() for name, value in parameters.items()}
        except RuntimeError as error:  # no memory: training goes on without
            log.warning("parameters are not copied at the end of an update", why=str(error))

    def _say(self, changed: set[Shard]) -> None:
        if self._is_told:
            return
        self._is_told = True
        log.warning(
            "parameters are changed between an update and the next one: a checkpoint has them as "
            "the update left them. What each step does to them belongs into after_update=, an "
            "evaluation with others into long_operation()",
            shards=sorted(changed),
        )
