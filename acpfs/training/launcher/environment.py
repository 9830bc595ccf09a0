"""The variables that a rank is started with: torchrun's, and ours. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from acpfs.training.launcher import fast_saves
from acpfs.training.launcher.options import Options
from acpfs.training.messages import Start


@dataclass(frozen=True)
class Seat:
    """Where in the job a rank stands."""

    rank: int
    local_rank: int
    generation: int = 0
    """How many replacements there had been in the job when this process was started, itself
    included.
    """


def job_name(options: Options, start: Start) -> str:
    """Of one attempt: what is in `.acpfs-job` is called so."""
    return f"{options.run_id}-{start.name}".replace("/", "_")


def variables(
    options: Options, start: Start, seat: Seat, error_file: str, outside: Mapping[str, str]
) -> dict[str, str]:
    """What is added to, or changed in, the launcher's own environment `outside`."""
    found = {
        "RANK": seat.rank,
        "LOCAL_RANK": seat.local_rank,
        "WORLD_SIZE": start.world,
        "LOCAL_WORLD_SIZE": options.per_node,
        "GROUP_RANK": start.group_rank,
        "GROUP_WORLD_SIZE": start.groups,
        "ROLE_NAME": options.role,
        "ROLE_RANK": seat.rank,
        "ROLE_WORLD_SIZE": start.world,
        "MASTER_ADDR": start.master_host,
        "MASTER_PORT": start.master_port,
        "TORCHELASTIC_RUN_ID": options.run_id,
        "TORCHELASTIC_RESTART_COUNT": start.attempt,
        "TORCHELASTIC_MAX_RESTARTS": options.restarts_max,
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "ACPFS_JOB": job_name(options, start),
        "ACPFS_GENERATION": seat.generation,
        "ACPFS_ON_FAULT": "replace" if options.replaces else "restart",
    }
    if options.has_fast_saves:
        found[fast_saves.VARIABLE] = 1
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if options.per_node > 1:
        defaults["OMP_NUM_THREADS"] = (
            "1"  # as torchrun: else each rank would have a thread per processor
        )
    return {name: str(value) for name, value in found.items()} | {
        n: v for n, v in defaults.items() if n not in outside
    }
