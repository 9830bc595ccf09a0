"""Wire layouts and the choice made at INIT, without a kernel."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from acpfs.transport.native import operations, protocol
from acpfs.transport.native.negotiate import (
    ALL_FEATURES,
    WITH_ACLS,
    Negotiated,
    ProtocolError,
    answer_init,
)
from acpfs.transport.native.protocol import (
    INIT_IN,
    INIT_IN_V7_31,
    INIT_OUT,
    MINOR_MAX,
    InitFlag,
    Layout,
)
from acpfs.transport.timeouts import RequestTimeouts

NEWEST = int(
    InitFlag.MAX_PAGES
    | InitFlag.INIT_EXT
    | InitFlag.PASSTHROUGH
    | InitFlag.HAS_RESEND
    | InitFlag.WRITEBACK_CACHE
    | InitFlag.ASYNC_DIO
)
LAYOUTS = {
    layout.name: layout
    for module in (protocol, operations)
    for layout in vars(module).values()
    if isinstance(layout, Layout)
}


def init_body(minor: int, flags: int) -> bytes:
    return INIT_IN.pack(7, minor, 1 << 20, flags & 0xFFFFFFFF, flags >> 32, *[0] * 11)


def test_a_layout_with_the_wrong_size_is_refused() -> None:
    with pytest.raises(AssertionError, match="has 8 bytes, the protocol says 12"):
        Layout("fuse_wrong", 12, "u32 a, u32 b")


def test_layouts_are_those_of_the_kernel_header(tmp_path: Path) -> None:
    header = Path("/usr/include/linux/fuse.h")
    if shutil.which("cc") is None or not header.exists():
        pytest.skip("needs a compiler and linux/fuse.h")
    newer = {"fuse_statx_in", "fuse_statx_out", "fuse_backing_map", "fuse_copy_file_range_out"}
    names = sorted(
        n
        for n in LAYOUTS
        if " " not in n and (n not in newer or f"struct {n} " in header.read_text())
    )
    lines = "".join(f'printf("{n} %zu\\n", sizeof(struct {n}));\n' for n in names)
    (tmp_path / "sizes.c").write_text(
        f"#include <stdio.h>\n#include <linux/fuse.h>\nint main(void) {{ {lines} return 0; }}\n"
    )
    subprocess.run(
        ["cc", "-o", str(tmp_path / "sizes"), str(tmp_path / "sizes.c")], check=True, timeout=60
    )
    told = subprocess.run(
        [tmp_path / "sizes"], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    assert {n: LAYOUTS[n].size for n in names} == dict(
        zip(told[::2], map(int, told[1::2]), strict=True)
    )


def test_init_takes_what_is_offered_and_wanted() -> None:
    answer = answer_init(init_body(45, NEWEST), ALL_FEATURES, 256)
    negotiated = answer.negotiated
    assert negotiated is not None
    assert negotiated.max_write_bytes == 1 << 20
    assert negotiated.has(InitFlag.PASSTHROUGH)
    assert negotiated.has(InitFlag.HAS_RESEND)
    assert not negotiated.has(InitFlag.WRITEBACK_CACHE)
    fields = dict(zip(INIT_OUT.fields, INIT_OUT.unpack(answer.body), strict=False))
    assert (fields["major"], fields["minor"], fields["max_pages"], fields["max_stack_depth"]) == (
        7,
        45,
        256,
        1,
    )
    assert fields["flags2"] == negotiated.flags >> 32


@pytest.mark.clause("S451", "S452")
@pytest.mark.parametrize("acls", [False, True])
def test_the_kernel_asks_for_acls_and_leaves_the_umask_where_there_are_acls(acls: bool) -> None:
    offered = NEWEST | int(InitFlag.POSIX_ACL | InitFlag.DONT_MASK)
    negotiated = answer_init(
        init_body(45, offered), ALL_FEATURES, 256, also=int(WITH_ACLS) if acls else 0
    ).negotiated
    assert negotiated is not None
    assert [negotiated.has(flag) for flag in (InitFlag.POSIX_ACL, InitFlag.DONT_MASK)] == [acls] * 2


@pytest.mark.parametrize(
    ("default_s", "max_s", "asked_s", "warned"),
    [
        (0, 0, 0, (False, False)),
        (60, 0, 65535, (False, True)),
        (0, 90, 0, (True, True)),
        (60, 90, 65535, (True, True)),
    ],
)
@pytest.mark.clause("S212")
def test_the_kernels_request_time_outs(
    tmp_path: Path, default_s: int, max_s: int, asked_s: int, warned: tuple[bool, bool]
) -> None:
    """The default gives way to a server that says what it wants; the other one can only be warned
    of.
    """
    assert RequestTimeouts.read(tmp_path) == RequestTimeouts(0, 0)  # before Linux 6.15
    (tmp_path / "default_request_timeout").write_text(f"{default_s}\n")
    (tmp_path / "max_request_timeout").write_text(f"{max_s}\n")
    timeouts = RequestTimeouts.read(tmp_path)
    assert tuple(bool(timeouts.warning(asks=asks)) for asks in (True, False)) == warned
    offered = NEWEST | InitFlag.REQUEST_TIMEOUT
    answer = answer_init(init_body(45, offered), ALL_FEATURES, 256, timeouts.to_ask_for_s)
    fields = dict(zip(INIT_OUT.fields, INIT_OUT.unpack(answer.body), strict=False))
    assert fields["request_timeout"] == asked_s
    assert bool((fields["flags2"] << 32) & InitFlag.REQUEST_TIMEOUT) == bool(asked_s)
    older = answer_init(init_body(42, NEWEST), ALL_FEATURES, 256, timeouts.to_ask_for_s)
    assert (
        dict(zip(INIT_OUT.fields, INIT_OUT.unpack(older.body), strict=False))["request_timeout"]
        == 0
    )


def test_init_with_the_oldest_kernel_assumes_nothing() -> None:
    answer = answer_init(INIT_IN_V7_31.pack(7, 31, 1 << 17, 0), ALL_FEATURES, 256)
    assert answer.negotiated == Negotiated(31, 0, 0, 32 * 4096)


def test_init_does_not_speak_newer_than_it_knows() -> None:
    answer = answer_init(init_body(99, NEWEST), ALL_FEATURES, 256)
    assert answer.negotiated is not None
    assert answer.negotiated.minor == MINOR_MAX


def test_init_asks_a_newer_major_version_to_come_down() -> None:
    answer = answer_init(INIT_IN.pack(8, 0, 0, 0, 0, *[0] * 11), ALL_FEATURES, 256)
    assert answer.negotiated is None
    assert INIT_OUT.unpack(answer.body)[0] == 7


def test_init_refuses_a_kernel_that_is_too_old() -> None:
    with pytest.raises(ProtocolError, match=r"7\.30"):
        answer_init(INIT_IN_V7_31.pack(7, 30, 0, 0), ALL_FEATURES, 256)


def test_init_ignores_high_bits_without_init_ext() -> None:
    answer = answer_init(init_body(45, NEWEST & ~int(InitFlag.INIT_EXT)), ALL_FEATURES, 256)
    assert answer.negotiated is not None
    assert not answer.negotiated.has(InitFlag.PASSTHROUGH)


def test_features_can_be_masked() -> None:
    answer = answer_init(init_body(45, NEWEST), ALL_FEATURES & ~int(InitFlag.PASSTHROUGH), 256)
    assert answer.negotiated is not None
    assert not answer.negotiated.has(InitFlag.PASSTHROUGH)
    assert INIT_OUT.unpack(answer.body)[INIT_OUT.fields.index("max_stack_depth")] == 0


def test_requests_grow_with_the_sysctl() -> None:
    answer = answer_init(init_body(45, NEWEST), ALL_FEATURES, 512)
    assert answer.negotiated is not None
    assert answer.negotiated.max_write_bytes == 2 << 20


def test_a_truncated_init_is_malformed() -> None:
    with pytest.raises(struct.error):
        answer_init(b"\7\0\0\0", ALL_FEATURES, 256)


def test_what_was_negotiated_survives_the_worker() -> None:
    negotiated = Negotiated(45, NEWEST, int(InitFlag.MAX_PAGES), 1 << 20)
    assert Negotiated.from_record(negotiated.to_record()) == negotiated
