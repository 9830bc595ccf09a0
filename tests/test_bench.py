"""What the benchmarks' figures stand on."""

from __future__ import annotations

from pathlib import Path

from bench.native import CHUNK, Samples
from bench.record import lower_quartile


def written_bytes() -> int:
    """By this process, in all."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def test_memory_is_warmed_by_touching_it(tmp_path: Path) -> None:
    """Pages of a tmpfs that were allocated and not written are as cold as before."""
    size, before = CHUNK + 4096, written_bytes()
    Samples(huge=tmp_path).warm_memory(size)
    assert written_bytes() - before >= size
    assert list(tmp_path.iterdir()) == []


def test_a_quarter_of_the_samples_is_not_above_the_lower_quartile() -> None:
    assert lower_quartile([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]) == 3.0
    assert lower_quartile([5.0]) == 5.0
