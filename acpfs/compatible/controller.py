"""The product's controller: acpfs's coordinator, in a process of its own that ends with the job.

Ranks and controller know each other by address and port, as in the product; the job is called by
its port, or by the cluster's task.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import tempfile
from pathlib import Path

from acpfs.compatible.places import ORIGIN
from acpfs.compatible.refusal import UnsupportedError
from acpfs.errors import AcpfsError, ConfigError, RefusedError
from acpfs.training.boot import JOBS, first_line
from acpfs.training.credentials import NAME as CREDENTIALS
from acpfs.training.credentials import Credentials
from acpfs.training.policy import Policy

DIRECTORY_VARIABLE = "ACPFS_MINDIO_DIRECTORY"
"""A directory that all nodes see, such as the save directory: for the job's certificate, its log
and its list of faults.
"""
TASK_VARIABLE = "MINDX_TASK_ID"
PORTS = range(1024, 65536)
_PROGRAM = (
    f"import runpy, sys; runpy.run_path({str(ORIGIN)!r}); sys.argv[0] = 'acpfs'; "
    "runpy.run_module({module!r}, run_name='__main__')"
)
MODULE = "acpfs.training.coordinator.__main__"


def start_controller(
    host: str, port: int, tls: bool, policy: Policy, *, replaces: bool = False
) -> None:
    """Start it; returns when it listens. `replaces`: ranks are replaced, and the job goes on.

    Raises:
        RefusedError: it does not start.
    """
    directory = shared_directory(tls) or Path(tempfile.mkdtemp(prefix="acpfs-mindio-"))
    job = job_name(port)
    words = [
        policy.coordinator_python or sys.executable,
        "-c",
        _PROGRAM.format(module=MODULE),
        str(directory),
    ]
    words += [
        "--job",
        job,
        "--node",
        node_name(),
        "--listen",
        f"{host}:{port}",
        "--advertise",
        host,
        "--first",
    ]
    words += [
        "--tls",
        "on" if tls else "off",
        "--on-stall",
        policy.on_stall,
        "--stall-after",
        str(policy.stall_after_s),
    ]
    words += ["--replace"] if replaces else []
    words += [
        "--witness",
        "off",
    ]  # a job that begins again has the same name, and finds the claims of the one before
    try:
        first_line(words, policy.protected_s)
    except (OSError, ValueError, AcpfsError) as error:
        raise RefusedError(f"the controller does not start at {host}:{port}: {error}") from error


def credentials_for(port: int, tls: bool) -> Credentials | None:
    """What a rank presents; None without TLS."""
    directory = shared_directory(tls)
    return (
        Credentials(directory / JOBS / job_name(port) / CREDENTIALS)
        if tls and directory is not None
        else None
    )


def shared_directory(tls: bool) -> Path | None:
    """Where nodes find the job's files, if it was said.

    Raises:
        ConfigError: TLS needs it.
    """
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named is None and tls:
        raise ConfigError(
            f"TLS needs {DIRECTORY_VARIABLE}: a directory that all nodes see, where the job's "
            "own certificate lies"
        )
    return Path(named) if named else None


def job_name(port: int) -> str:
    """What the job is called; the same for all of its processes."""
    return os.environ.get(TASK_VARIABLE) or f"mindio-{port}"


def node_name() -> str:
    """What this node is called."""
    return socket.gethostname()


def checked_address(host: str, port: int) -> tuple[str, int]:
    """An address that can be called, names resolved.

    Raises:
        ConfigError: it makes no sense.
    """
    if port not in PORTS:
        raise ConfigError(f"port {port}: {PORTS.start} to {PORTS.stop - 1}")
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"{host!r} is no address: {error}") from error
    if ipaddress.ip_address(address).is_unspecified:
        raise ConfigError("an all-zero address is not supported")
    return address, port


def no_own_certificates(tls_info: object) -> None:
    """The job makes its own.

    Raises:
        UnsupportedError: others are given.
    """
    if tls_info:
        raise UnsupportedError(
            f"tls_info: acpfs makes the job's certificate itself, below {DIRECTORY_VARIABLE}; "
            "leave it empty"
        )
