"""Adopting without being asked, in every interleaving (`alone`)."""

from __future__ import annotations

import pytest

from tests.adopting.alone import POINTER, RENAME, STORE, UNLINK, WRONG, World, walk

clause = pytest.mark.clause


@clause("S611", "S613")
@pytest.mark.parametrize(
    ("world", "states"),
    [
        (World((UNLINK,), deaths=1), 49_742),
        (World((UNLINK,), holders=2, deaths=0), 65_963),
    ],
    ids=["one holder that dies", "two holders"],
)
def test_a_node_that_lives_all_the_same_undoes_nothing_and_somebody_goes_on(
    world: World, states: int
) -> None:
    found = walk(world)
    assert (found.wrong, found.path) == ("", ())
    assert found.states == states


@pytest.mark.long
@clause("S611", "S613")
@pytest.mark.parametrize(
    "world",
    [
        World((STORE, UNLINK), deaths=0),
        World((STORE, RENAME), deaths=0),
        World((UNLINK, POINTER), deaths=0),
        World((STORE, UNLINK)),
        World((STORE,), holders=2),
        World((UNLINK,), holders=2, deaths=0, moves=2),
        World((STORE,), holders=2, deaths=0),
        World((UNLINK,), holders=2),
        World((UNLINK,), deaths=2, moves=2),
    ],
    ids=lambda world: f"{world.ops} {world.holders} {world.deaths} {world.moves}",
)
def test_the_same_of_longer_logs(world: World) -> None:
    found = walk(world)
    assert (found.wrong, found.path) == ("", ())


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_variant_is_found(name: str) -> None:
    variant = WRONG[name]
    world = World(variant.ops, variant.holders, variant.deaths, variant.moves, frozenset({name}))
    assert walk(world).wrong
