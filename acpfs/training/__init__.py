"""What concerns training beside the mount: how often to save, which losses copies cover, and
`protect`.

Imports nothing before it is used: planning needs no member, and nothing here needs torch but a rank
that trains.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acpfs.training.policy import Policy
    from acpfs.training.protection import Protection, protect
    from acpfs.training.resilience import resilient

__all__ = ["Policy", "Protection", "protect", "resilient"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from acpfs.training import policy, protection, resilience

    return getattr({"Policy": policy, "resilient": resilience}.get(name, protection), name)
