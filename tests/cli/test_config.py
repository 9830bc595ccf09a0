"""Settings: every nonsense is named, the command line wins over the file."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acpfs.config import (
    FIELDS,
    FsyncMode,
    descriptions,
    field_named,
    load_settings,
    option_name,
    parse_size,
    validated,
)
from acpfs.errors import ConfigError

BASE = {"backing": "/b", "mountpoint": "/m"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64G", 64 << 30),
        ("512MiB", 512 << 20),
        ("1.5k", 1536),
        ("7", 7),
        (7, 7),
        ("2 TB", 2 << 40),
        ("0", 0),
    ],
)
def test_sizes_have_factors_of_1024(text: object, size: int) -> None:
    assert parse_size(text) == size


@given(st.text(max_size=12))
def test_parse_size_gives_a_size_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_size(text) >= 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rom": "64G"}, "unknown key 'rom'"),
        ({"ram": "lots"}, "'lots' is not a size"),
        ({"ram": "120%"}, "between 0% and 90%"),
        ({"ram": "0%"}, "between 0% and 90%"),
        ({"ram": 0}, "ram"),
        ({"ram": -5}, "ram"),
        ({"streams": 0}, "streams = 0"),
        ({"streams": "many"}, "streams = 'many'"),
        ({"fsync": "never"}, "fsync = 'never'"),
        ({"node_id": "a/b"}, "node_id = 'a/b'"),
        ({"attr_timeout_s": -1}, "attr_timeout_s = -1"),
        ({"log_level": "loud"}, "log_level = 'loud'"),
        ({"retry_delay_min_s": 90}, "retry_delay_min_s is larger"),
        ({"bandwidth": "-3"}, "'-3' is not a size"),
        ({"bandwidth": -3}, "bandwidth"),
        ({"metrics_port": 70000}, "metrics_port = 70000"),
        ({"metrics_address": "somewhere"}, "metrics_address = 'somewhere': must be an address"),
        ({"backing": None}, "backing"),
        ({"guard_time_s": "inf"}, "guard_time_s = 'inf'"),
        ({"streams": 8.5}, "streams = 8.5: must be a whole number"),
        ({"streams": True}, "streams = True"),
        ({"streams": 257}, "streams = 257: must be <= 256"),
        ({"node_id": 5}, "node_id = 5: must be text"),
        ({"prefault": "101%"}, "between 0% and 100%"),
        ({"new_volume": "perhaps"}, "new_volume = 'perhaps'"),
        ({"new_volume": []}, "new_volume = []"),
        ({"pointer_patterns": [1]}, "pointer_patterns = [1]: must be a list of patterns"),
        ({"pointer_patterns": 1}, "pointer_patterns = 1"),
        ({"checkpoint_patterns": "{nonsense}"}, "checkpoint_patterns"),
        ({"expect_volume": "remembered!"}, "expect_volume = 'remembered!'"),
        (
            {"fsync": "never", "streams": 0},
            "fsync = 'never': must be one of ordered, copied, durable; streams = 0",
        ),
        ({"spill_mode": "mirror"}, "spill_mode = mirror needs a directory: spill"),
        (
            {"locks": "refuse", "transport": "libfuse"},
            "locks = refuse needs the native transport",
        ),
        ({"locks": "backing"}, "locks = 'backing': must be one of local, refuse"),
    ],
)
def test_a_nonsense_value_is_named(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({**BASE, **values})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"streams": "5"}, 5),
        ({"streams": 5.0}, 5),
        ({"stagger_s": "1.5"}, 1.5),
        ({"new_volume": "true"}, True),
        ({"spill": "/s"}, Path("/s")),
        ({"spill": None}, None),
        ({"node_id": None}, None),
        ({"fsync": "durable"}, FsyncMode.DURABLE),
        ({"fsync": FsyncMode.DURABLE}, FsyncMode.DURABLE),
        ({"pointer_patterns": "a:b"}, ("a", "b")),
        ({"numa": "bind:0-1,3"}, "bind:0-1,3"),
    ],
)
def test_values_are_what_people_and_json_write(given: dict[str, object], value: object) -> None:
    settings = load_settings({**BASE, **given})
    (name,) = given
    found = getattr(settings, name)
    assert (found, type(found)) == (value, type(value))
    assert (
        getattr(validated(json.loads(json.dumps(settings.as_json(given_only=True)))), name) == value
    )


def test_what_was_given_is_told_from_defaults() -> None:
    settings = load_settings({**BASE, "allow_other": True})
    assert settings.given == {*BASE, "allow_other"}
    settings.streams = 3
    copy = settings.changed(ram="1G")
    assert (copy.streams, copy.ram) == (3, 1 << 30)
    assert copy.given == {*BASE, "allow_other", "streams", "ram"}
    assert copy.as_json().keys() == FIELDS.keys()


def test_an_assignment_is_checked() -> None:
    settings = load_settings(BASE)
    with pytest.raises(ValueError, match="must be <= 256"):
        settings.streams = 1000
    assert (settings.streams, "streams" in settings.given) == (8, False)


def test_missing_backing_is_named() -> None:
    with pytest.raises(ConfigError, match="backing is missing"):
        load_settings({"mountpoint": "/m"})


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('ram = "1G"\nstreams = 3\npointer_patterns = ["latest"]\n')
    settings = load_settings({**BASE, "streams": "5"}, file)
    assert settings.ram == 1 << 30
    assert settings.streams == 5
    assert settings.pointer_patterns == ("latest",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"ram = ", "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        (b'speed = "1"', "unknown key 'speed'"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load_settings(BASE, file)
    assert str(file) in str(caught.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*none\.toml"):
        load_settings(BASE, tmp_path / "none.toml")


def test_option_names_and_fields_are_one_to_one() -> None:
    names = [option_name(field) for field in FIELDS]
    assert len(set(names)) == len(names)
    assert all(field_named(option_name(field)) == field == field_named(field) for field in FIELDS)
    assert field_named("nonsense") is None


def test_every_setting_is_described() -> None:
    assert list(descriptions()) == list(FIELDS)
    assert all(descriptions().values())
