"""The product's own file format: read, rewritten, and refused where it is damaged."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from acpfs.cli.main import command
from acpfs.compatible.product_container import ALIGNMENT, ContainerError, convert, read_container
from acpfs.compatible.refusal import UnsupportedError
from tests.compatible.containers import container_of, plain_bytes

clause = pytest.mark.clause
RECORDS = {"data.pkl": b"pickled", "data/0": bytes(range(256)) * 5, "data/1": b""}


@clause("T100")
def test_records_are_rewritten_as_torch_has_them(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(container_of(RECORDS))
    done = CliRunner().invoke(command, ["convert", str(tmp_path / "old"), str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    with zipfile.ZipFile(tmp_path / "new") as archive:
        assert archive.testzip() is None
        assert {info.filename: archive.read(info) for info in archive.infolist()} == {
            **{f"archive/{name}": data for name, data in RECORDS.items()},
            "archive/version": b"3\n",
            "archive/byteorder": b"little",
        }
        for info in archive.infolist():
            name_length, extra_length = struct.unpack_from(
                "<HH", (tmp_path / "new").read_bytes(), info.header_offset + 26
            )
            assert (info.header_offset + 30 + name_length + extra_length) % ALIGNMENT == 0, (
                info.filename
            )
            assert info.compress_type == zipfile.ZIP_STORED


@clause("T100")
def test_plain_bytes_are_that(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(plain_bytes(b"as it was"))
    convert(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == b"as it was"


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/evil",)


@clause("T100")
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (container_of(RECORDS, {"data.pkl": _Evil()}), "plain data only"),
        (container_of(RECORDS, {"data.pkl": (0, 1 << 40)}), "beyond"),
        (container_of(RECORDS, {"data.pkl": (-1, 1)}), "cannot be read"),
        (container_of(RECORDS, {"other": (0, 1)}), "no checkpoint has"),
        (container_of(RECORDS, {"data.pkl": (0, 1), "../x": (0, 1)}), "no checkpoint has"),
        (container_of(RECORDS, [1]), "cannot be read"),
        (
            container_of(RECORDS)[:-23] + struct.pack("<QQ7s", 1 << 40, 9, b"mindio\0"),
            "in a file of",
        ),
        (container_of(RECORDS)[:-23] + struct.pack("<QQ7s", 2, 9, b"mindio\0"), "cannot be read"),
        (b"PK" + bytes(100), "not of the product's format"),
        (b"", "not of the product's format"),
    ],
)
def test_what_is_damaged_is_refused_with_a_sentence(data: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(data)
    (tmp_path / "new").write_bytes(b"before")
    done = CliRunner().invoke(command, ["convert", str(tmp_path / "old"), str(tmp_path / "new")])
    assert isinstance(done.exception, ContainerError)
    assert why in str(done.exception)
    assert (tmp_path / "new").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


@clause("T100")
def test_what_is_not_documented_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="with the product itself"):
        read_container(io.BytesIO(bytes(40) + b"000001accacp"))


@clause("T100")
def test_return_codes_of_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from acpfs.compatible import checkpoint_files

    old = tmp_path / "old"
    new = tmp_path / "new"
    old.write_bytes(container_of(RECORDS))
    assert checkpoint_files.convert(str(old), str(new)) == 0
    assert checkpoint_files.convert(str(old), str(old)) == -1
    assert checkpoint_files.convert(str(tmp_path / "none"), str(new)) == -1
    (tmp_path / "link").symlink_to(old)
    assert checkpoint_files.convert(str(tmp_path / "link"), str(new)) == -1
    assert new.read_bytes()[:2] == b"PK"
