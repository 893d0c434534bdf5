"""The search space, on random spaces: enumeration against brute force, neighbours, sampling, repair."""

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerneldyno.core import Constraint
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import canonical


def make(sizes: tuple[int, int, int], words: tuple[str, ...], limit: int, needs: str) -> Space:
    first, second, third = (tuple(2**power for power in range(size)) for size in sizes)
    return Space(
        [
            Param("tile", first, "elements of a tile"),
            Param("mode", words, "how it is done"),
            Param("depth", second, "stages", when=lambda mode: mode == needs),
            Param("width", third, "lanes", when=lambda depth: depth > 1),
        ],
        [
            Constraint(lambda tile, depth: tile * depth <= limit, f"tile x depth is at most {limit}"),
            Constraint(lambda width, tile: tile % width == 0, "width divides tile"),
        ],
    )


spaces = st.builds(
    make,
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)),
    st.sampled_from([("pipelined", "plain"), ("plain",), ("plain", "pipelined", "other")]),
    st.integers(1, 40),
    st.just("pipelined"),
)


def brute_force(space: Space) -> set[str]:
    """Every subset of assignments, kept where the space finds no fault in it."""
    found: set[str] = set()
    absent = object()
    for values in itertools.product(*((*param.values, absent) for param in space.params.values())):
        config: dict[str, Any] = {name: value for name, value in zip(space.params, values, strict=True) if value is not absent}
        if not space.problems(config):
            found.add(canonical(config))
    return found


@given(spaces)
def test_enumeration_is_what_brute_force_finds(space: Space) -> None:
    listed = [canonical(config) for config in space]
    assert len(listed) == len(set(listed)) == space.size
    assert set(listed) == brute_force(space)


@given(spaces, st.randoms())
def test_samples_and_neighbours_are_valid(space: Space, rng: random.Random) -> None:
    if not space.size:
        with pytest.raises(ValueError, match="the space is empty"):
            space.sample(rng)
        return
    config = space.sample(rng)
    assert config in space
    for other in space.neighbours(config):
        assert other in space
        assert canonical(other) != canonical(config)


@given(spaces)
def test_neighbourhood_is_symmetric_for_knobs_that_nothing_depends_on(space: Space) -> None:
    for config in space:
        for other in space.neighbours(config):
            if set(other) == set(config):
                assert canonical(config) in {canonical(back) for back in space.neighbours(other)}


@given(spaces)
def test_complete_keeps_a_valid_configuration(space: Space) -> None:
    for config in space:
        assert space.complete(config) == config
        assert space.complete({**config, "unknown": 1}) == config


def test_size_of_a_known_space() -> None:
    space = Space(
        [Param("a", (1, 2, 4), "x"), Param("b", ("u", "v"), "y"), Param("c", (1, 2, 3), "z", when=lambda b: b == "v")],
        [Constraint(lambda a, c: a * c <= 4, "a x c is at most 4")],
    )
    assert space.size == 9  # 3 with b=u; with b=v: a=1 has 3, a=2 has 2, a=4 has 1
    assert space.problems({"a": 4, "b": "v", "c": 3}) == ["a x c is at most 4"]
    assert space.problems({"a": 3, "b": "v"}) == ["a=3 is not one of 1, 2, 4", "c is missing"]
    assert space.problems({"a": 1, "b": "u", "c": 1, "d": 0}) == ["unknown parameter 'd'", "c does not exist in this configuration"]


def test_starts_are_completed_and_those_that_are_not_valid_passed_over() -> None:
    space = Space(
        [Param("a", (4, 1, 2), "x"), Param("b", ("u", "v"), "y"), Param("c", (2, 1), "z", when=lambda b: b == "v")],
        [Constraint(lambda a, c: a * c <= 4, "a x c is at most 4")],
        starts=[{"a": 2, "b": "v"}, {"b": "v"}, {"a": 3}, {}, {"a": 4, "b": "u"}],
    )
    assert space.starts == ({"a": 2, "b": "v", "c": 2}, {"a": 4, "b": "u"})
    with pytest.raises(ValueError, match="a start names"):
        Space([Param("a", (1,), "x")], starts=[{"z": 1}])


def test_true_and_one_are_different_values() -> None:
    space = Space([Param("switch", (False, True), "on or off")])
    assert {"switch": True} in space
    assert {"switch": 1} not in space
    assert "switch" not in space


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Param("a", (), "x"), "has no values"),
        (lambda: Param("a", (1, 1), "x"), "repeats a value"),
        (lambda: Space([Param("a", (1,), "x"), Param("a", (2,), "x")]), "names repeat"),
        (lambda: Space([Param("a", (1,), "x", when=lambda b: b), Param("b", (1,), "x")]), "not declared before"),
        (lambda: Space([Param("a", (1,), "x")], [Constraint(lambda z: z, "why")]), "reads"),
        (lambda: Space([Param("a", (1,), "x")], [Constraint(lambda: True, "why")]), "reads no parameter"),
    ],
)
def test_a_badly_written_space_is_refused(build: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()
