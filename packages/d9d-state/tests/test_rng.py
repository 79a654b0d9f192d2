import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from d9d_dist import UserError
from d9d_state import rng_state, set_rng_state
from d9d_state.json_value import dump_json, parse_json

np = pytest.importorskip("numpy")


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    before = rng_state()
    yield
    set_rng_state(before)


def _draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))]  # noqa: S311


def test_every_generator_resumes_its_sequence() -> None:
    random.gauss(0, 1)  # caches the second value of a pair, which is also state
    saved = dump_json(rng_state())
    expected = [_draw() for _ in range(3)]
    set_rng_state(parse_json(saved))
    assert [_draw() for _ in range(3)] == expected
    assert dump_json(rng_state()) != saved


def test_missing_generator_is_not_changed() -> None:
    state: Any = rng_state()
    del state["numpy"]
    before = np.random.get_state(legacy=False)
    set_rng_state(state)
    after = np.random.get_state(legacy=False)
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert before["state"]["pos"] == after["state"]["pos"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: None,
        lambda state: {},
        lambda state: {**state, "torch": "no hex"},
        lambda state: {**state, "torch": 3},
        lambda state: {**state, "torch": "00"},
        lambda state: {**state, "python": []},
        lambda state: {**state, "python": {**state["python"], "words": [1]}},
        lambda state: {**state, "python": {**state["python"], "words": 1}},
        lambda state: {**state, "python": {**state["python"], "version": 2000}},
        lambda state: {**state, "python": {**state["python"], "gauss": "1"}},
        lambda state: {**state, "python": {**state["python"], "words": [*state["python"]["words"], "1"]}},
        lambda state: {**state, "numpy": {**state["numpy"], "words": [1]}},
        lambda state: {**state, "numpy": {**state["numpy"], "words": [1 << 32] * 624}},
        lambda state: {**state, "numpy": {**state["numpy"], "position": 1_000_000}},
        lambda state: {**state, "numpy": {**state["numpy"], "position": -1}},
        lambda state: {**state, "numpy": {**state["numpy"], "kind": "PCG64"}},
        lambda state: {**state, "numpy": {**state["numpy"], "cached": "1"}},
        lambda state: {**state, "numpy": {**state["numpy"], "has_gauss": []}},
    ],
)
def test_invalid_random_state_changes_nothing(damage: Any) -> None:
    before = rng_state()
    with pytest.raises(UserError, match="got an invalid random state"):
        set_rng_state(damage(before))
    assert rng_state() == before
