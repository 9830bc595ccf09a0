"""mount(8)'s way in: options become settings, what cannot be honoured is refused."""

import pytest

from acpfs.cli.system_mount import parse_arguments, parse_options
from acpfs.config import load_settings
from acpfs.errors import ConfigError


def test_options_become_settings() -> None:
    values = parse_options(
        "rw,ram=64G,fsync=durable,_netdev,nofail,x-systemd.automount,max_dirty_age=5,verify-after-write,allow_other=no,relatime"
    )
    assert values == {
        "ram": "64G",
        "fsync": "durable",
        "max_dirty_age_s": "5",
        "verify_after_write": True,
        "allow_other": False,
    }
    settings = load_settings({**values, "backing": "/b", "mountpoint": "/m"})
    assert (settings.ram, settings.max_dirty_age_s, settings.allow_other) == (64 << 30, 5.0, False)


def test_patterns_are_separated_by_colons() -> None:
    values = parse_options("pointer_patterns=latest:*.index.json")
    assert load_settings({**values, "backing": "/b", "mountpoint": "/m"}).pointer_patterns == (
        "latest",
        "*.index.json",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rom=64G", "'rom'"),
        ("ro", "always writable"),
        ("noexec", "noexec"),
        ("backing=/x", "'backing'"),
        ("sync", "fsync=durable"),
    ],
)
def test_unknown_and_impossible_options_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_options(text)


def test_sloppy_passes_over_unknown_options() -> None:
    assert parse_options("rom=64G,ram=1G", sloppy=True) == {"ram": "1G"}


@pytest.mark.parametrize(
    "words",
    [
        ["/b", "/m", "-o", "a,b", "-n", "-v"],
        ["-nv", "/b", "-oa,b", "/m"],
        ["/b", "/m", "-o", "a", "-o", "b", "-t", "acpfs"],
    ],
)
def test_arguments_as_mount_gives_them(words: list[str]) -> None:
    backing, mountpoint, options, _flags = parse_arguments(words)
    assert (backing, mountpoint, options) == ("/b", "/m", "a,b")


@pytest.mark.parametrize(
    "words", [["/b"], ["/b", "/m", "/x"], ["/b", "/m", "-o"], ["/b", "/m", "--what"]]
)
def test_bad_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_arguments(words)
