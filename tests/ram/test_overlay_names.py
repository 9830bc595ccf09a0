"""Which relative names of an overlay's directories may mean one in a mount."""

from __future__ import annotations

import pytest

from acpfs.ram.mounts import _layers, _may_lie_in

KNOWN = ("run1", "run1/low")


@pytest.mark.clause("S442")
@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("low", True),
        ("./low", True),
        ("run1/low", True),
        ("../low", True),
        ("x/../low", True),
        ("acp/run1/low", True),
        ("mnt/acp", True),
        ("acp", True),
        ("acp/other", False),
        ("other/low", False),
        ("l/ABCDEF", False),
        (".", False),
        ("..", False),
        ("mnt", False),
        ("/mnt/acp/run1/low", False),  # an absolute name says where it is
    ],
)
def test_a_relative_name_is_looked_for_in_the_mount(name: str, may: bool) -> None:
    def has_directory(end: str) -> bool:
        return any(f"/{known}".endswith(f"/{end}") for known in KNOWN)

    assert _may_lie_in(name, "/mnt/acp", has_directory) is may


@pytest.mark.clause("S442")
def test_layers_are_told_by_their_names() -> None:
    options = "rw,lowerdir=a:/b::/c,upperdir=d,workdir=e,redirect_dir=on,lowerdir+=f"
    assert _layers(options) == ["a", "/b", "/c", "d", "e", "f"]
