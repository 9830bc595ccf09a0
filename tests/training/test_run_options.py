"""torchrun's command line as `acpfs-run` reads it."""

from __future__ import annotations

import signal

import pytest

from acpfs.errors import ConfigError
from acpfs.training.launcher.options import parsed
from acpfs.training.launcher.streams import Std

clause = pytest.mark.clause


@clause("T65")
def test_options_in_either_spelling_and_the_program_s_own() -> None:
    words = "--nproc_per_node=4 --max-restarts 2 -t 3 --rdzv_id run1 train.py --log_dir here --x_y"
    options = parsed(words.split(), {})
    assert (options.per_node, options.restarts_max, options.run_id) == (4, 2, "run1")
    assert options.program == ("train.py", "--log_dir", "here", "--x_y")
    assert options.log_directory is None


@clause("T65")
def test_a_flag_takes_no_word() -> None:
    options = parsed(["--standalone", "-m", "pretrain", "--max_restarts", "1"], {})
    assert (options.is_module, options.restarts_max) == (True, 0)
    assert options.program == ("pretrain", "--max_restarts", "1")


@clause("T65")
def test_the_environment_has_defaults() -> None:
    environment = {"PET_NPROC_PER_NODE": "3", "PET_STANDALONE": "0", "PET_MAX_RESTARTS": "4"}
    options = parsed(["--max-restarts", "5", "a.py"], environment)
    assert (options.per_node, options.restarts_max) == (3, 5)


@clause("T65")
@pytest.mark.parametrize(
    ("words", "endpoint", "nodes"),
    [
        ("--nnodes 2 --node-rank 1 --master-addr n0 --master-port 1234", "n0:1234", (2, 2)),
        ("--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint n0", "n0:29400", (2, 4)),
        ("--nnodes 2 --standalone", "", (1, 1)),
        ("--master-addr n0 --master-port 1 --node-rank 0", "", (1, 1)),
    ],
)
def test_where_nodes_meet(words: str, endpoint: str, nodes: tuple[int, int]) -> None:
    options = parsed([*words.split(), "a.py"], {})
    assert (options.endpoint, (options.nodes_min, options.nodes_max)) == (endpoint, nodes)


@clause("T65")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--numa-binding node", "start this job with torchrun"),
        ("--virtual-local-rank", "start this job with torchrun"),
        ("--nproc-per-node many", "a number, auto, cpu or gpu"),
        ("--nnodes 3:2", "MIN:MAX"),
        ("--nnodes 2", "--rdzv-endpoint"),
        ("--nnodes 2 --master-addr n0", "which node"),
        ("--rdzv-backend etcd", "etcd"),
        ("-r 4", "0 to 3"),
        ("--signals-to-handle SIGNONE", "SIGNONE"),
        ("-m --no-python", "exclude"),
        ("--no-python --spares 1", "--no-python"),
        ("--spares 1 --spare-memory much", "--spare-memory much"),
    ],
)
def test_what_makes_no_sense_is_named(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parsed([*words.split(), "a.py"], {})


@clause("T161")
def test_a_spare_s_memory_is_a_size() -> None:
    assert parsed(["--spares", "1", "--spare-memory", "64M", "a.py"], {}).spare_bytes == 64 << 20
    assert parsed(["--spares", "1", "a.py"], {}).spare_bytes == 0


@clause("T65")
def test_streams_by_rank() -> None:
    streams = parsed("-r 0:3,1:1 -t 1:2 --local-ranks-filter 1 a.py".split(), {}).streams
    assert [streams.to_file(rank) for rank in range(3)] == [Std.ALL, Std.ALL, Std.ALL]
    assert [streams.also_shown(rank) for rank in range(3)] == [Std.NONE, Std.ERR, Std.NONE]
    assert parsed(["a.py"], {}).streams.to_file(0) is Std.NONE


def test_signals_by_name() -> None:
    assert parsed(["--signals-to-handle", "SIGUSR1,SIGTERM", "a.py"], {}).signals == (
        signal.SIGUSR1,
        signal.SIGTERM,
    )
