"""A key, and a certificate that it has signed itself.

The `openssl` program makes them, in a hundredth of a second: Python's ssl has no way to, and the
package `cryptography` would be a dependency of every process for these two calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from acpfs.errors import MachineError

KEY = "key.pem"
CERTIFICATE = "certificate.pem"
BEGINS = "20000101000000Z"
ENDS = "20991231235959Z"
"""Who trusts a certificate trusts that one, and for as long as it lies where it does; nodes' clocks
need not agree.
"""
_CONFIG = """[ca]
default_ca = own
[own]
database = {d}/index
new_certs_dir = {d}
serial = {d}/serial
default_md = sha256
policy = any
[any]
commonName = supplied
[req]
distinguished_name = name
prompt = no
[name]
CN = {name}
"""


def make_key(
    directory: Path, name: str, way_out: str, begins: str = BEGINS, ends: str = ENDS
) -> None:
    """Make a directory (0700) with a key and its certificate (0600), unless it is there, or
    somebody else makes it at the same time.

    `name`: in the certificate, for people. `way_out`: what else can be done where there is no
    `openssl`.

    Raises:
        MachineError: the program `openssl` is missing, or fails.
        OSError: the directory cannot be made.
    """
    if directory.exists():
        return
    above = directory.parent
    above.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=above))
    try:
        with tempfile.TemporaryDirectory(prefix="acpfs-tls-") as scratch:
            _generate(Path(scratch), name, way_out, begins, ends)
            for file in (KEY, CERTIFICATE):
                target = made / file
                target.touch(mode=0o600)
                target.write_bytes((Path(scratch) / file).read_bytes())
        try:
            made.rename(directory)
        except OSError:
            if not directory.exists():  # not because somebody else was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _generate(scratch: Path, name: str, way_out: str, begins: str, ends: str) -> None:
    (scratch / "config").write_text(_CONFIG.format(d=scratch, name=name), encoding="utf-8")
    (scratch / "index").touch()
    (scratch / "serial").write_text(os.urandom(8).hex().replace("0", "1") + "\n", encoding="ascii")
    config = ["-config", str(scratch / "config")]
    _openssl(
        way_out,
        "req",
        "-new",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        *config,
        *_files(scratch, "keyout", KEY, "out", "request"),
    )
    _openssl(
        way_out,
        *("ca", "-batch", "-notext", "-selfsign", "-startdate", begins, "-enddate", ends, *config),
        *_files(scratch, "keyfile", KEY, "in", "request", "out", CERTIFICATE),
    )


def _files(scratch: Path, *pairs: str) -> list[str]:
    return [
        part
        for option, name in zip(pairs[::2], pairs[1::2], strict=True)
        for part in (f"-{option}", str(scratch / name))
    ]


def _openssl(way_out: str, *arguments: str) -> None:
    try:
        done = subprocess.run(
            ["openssl", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except FileNotFoundError:
        raise MachineError(f"the program openssl is not installed; it makes {way_out}") from None
    if done.returncode:
        raise MachineError(
            f"openssl {arguments[0]}: "
            f"{done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
        )
