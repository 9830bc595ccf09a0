"""Settings of a protected rank: one record; each field has an environment variable, `ACPFS_TRAIN_`
and its name in capitals.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from acpfs.errors import ConfigError
from acpfs.training.drill import parsed
from acpfs.training.messages import checkpoint_name

PREFIX = "ACPFS_TRAIN_"
_YES_NO = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
COORDINATORS_MAX = 3


@dataclass(frozen=True, slots=True)
class Policy:
    """What can be set. Units are part of the names."""

    name: str = "step-{step}"
    """What a gasp is called: the name that the script's own loader looks for."""
    tracker: str = "latest"
    """File beside it that names the newest checkpoint; empty: none is written."""
    tracker_text: str = "{name}"
    """What that file says: `{name}`, or `{step}` alone for a loader that makes the name of it."""
    durability: str = "ram"
    """When a rank may end: `ram`, as soon as the gasp is published; `copied`, when another node has
    it in its RAM, or it is persisted (`copies = 1` of the mount); `persisted`, when it is on stable
    storage. The last two for `durable_s` at most.
    """
    durable_s: float = 600.0
    tls: bool = True
    """Between members and coordinators. Off is for a network that nobody else is on."""
    coordinator_python: str = ""
    """Interpreter for the coordinator where this one has no acpfs with its dependencies; empty:
    this one.
    """
    coordinators: int = COORDINATORS_MAX
    """Nodes that have one; the first commands, the others stand by."""
    on_stall: str = "report"
    """What ranks are that hang: `report` names them, with their stacks; `fault` counts them as
    lost.
    """
    stall_after_s: float = 60.0
    """So long nothing has to move for that; or ten steps, if that is longer."""
    beat_s: float = 2.0
    """A member says so often where it is."""
    protected_s: float = 60.0
    """So long `protect` waits until all ranks have registered."""
    interrupt_after_s: float = 0.1
    """After STOP, a main thread that has not come by itself gets `Interrupted`; one whose update is
    under way, at its end.
    """
    interrupt_every_s: float = 0.5
    """And again so often."""
    stuck_s: float = 2.0
    """After STOP, a main thread that has used no processor time for so long waits in C, and another
    thread does what is to be done.
    """
    command_s: float = 30.0
    """A main thread that is parked gives up where no coordinator says anything for so long."""
    files_s: float = 20.0
    """So long PUBLISH waits for files that another node wrote."""
    buffers_bytes_max: int = 64 << 20
    """Persistent buffers above this are not part of the host state; `protect` refuses a model that
    has more.
    """
    copies_bytes_max: int = 8 << 30
    """Of a rank's parameters, where a loop changes them behind an update: no larger copy is
    taken.
    """

    buddy_every: int = 0
    """So many updates from one copy of each rank's shards in another rank's memory to the next; 0:
    none are taken.
    """
    untried_device: bool = False
    """Whether a job with nccl or hccl is protected: doubles have shown that, and no device has."""
    abort_s: float = 5.0
    """Aborts of an accelerator's groups that take longer make this rank a lost one."""
    update_s: float = 30.0
    """So does an update that was launched, and is not done so long after a STOP."""
    probe_s: float = 10.0
    """And a device that does not answer for so long behind the aborts."""
    drill: str = ""
    """Who is to die where (`acpfs.training.drill`): for `acpfs-train drill`, which kills ranks on
    purpose.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not 0 < value < 86_400:
                raise ConfigError(
                    f"{field.name} = {value}: seconds, more than 0 and less than a day"
                )
        if not 1 <= self.coordinators <= COORDINATORS_MAX:
            raise ConfigError(f"coordinators = {self.coordinators}: 1 to {COORDINATORS_MAX}")
        if self.on_stall not in ("report", "fault"):
            raise ConfigError(f"on_stall = {self.on_stall!r}: report or fault")
        if self.buddy_every < 0:
            raise ConfigError(f"buddy_every = {self.buddy_every}: updates, 0 or more")
        parsed(self.drill)
        if self.durability not in ("ram", "copied", "persisted"):
            raise ConfigError(f"durability = {self.durability!r}: ram, copied or persisted")
        if "/" in self.tracker:
            raise ConfigError(f"tracker = {self.tracker!r}: a file name, without a directory")
        if self.tracker_text not in ("{name}", "{step}"):
            raise ConfigError(f"tracker_text = {self.tracker_text!r}: {{name}} or {{step}}")
        try:
            checkpoint_name(self.name, 0)
        except ValueError as error:
            raise ConfigError(f"name = {self.name!r}: {error}") from error

    @property
    def interpreter(self) -> str:
        """What coordinators run in."""
        return self.coordinator_python or sys.executable

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **given: object
    ) -> Policy:
        """What the environment says, and before it what is given.

        Raises:
            ConfigError: a value that makes no sense, or a variable that nobody knows.
        """
        known = {PREFIX + field.name.upper(): field for field in fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in (os.environ if environment is None else environment).items():
            if not variable.startswith(PREFIX):
                continue
            if variable not in known:
                raise ConfigError(
                    f"{variable}: there is no such setting; known are {', '.join(known)}"
                )
            values[known[variable].name] = _parsed(variable, text, known[variable].default)
        if unknown := given.keys() - {field.name for field in fields(cls)}:
            raise ConfigError(f"there is no setting {min(unknown)}")
        return replace(cls(), **(values | given))


def _parsed(variable: str, text: str, default: object) -> object:
    """A value of the default's type."""
    try:
        if isinstance(default, bool):
            return _YES_NO[text.lower()]
        return type(default)(text)  # type: ignore[call-arg]  # str, int and float take a text
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{variable} = {text!r}: not a {type(default).__name__}") from error
