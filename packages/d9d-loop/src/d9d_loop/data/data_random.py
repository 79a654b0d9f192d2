"""Random streams for reading samples, seeded by sample position: equal in every layout, microbatch and worker."""

import json
import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from d9d_dist import UserError
from d9d_loop.isolation import isolated_random, seed_generators

_SAMPLE = "data at"


def position_random(seed: int, *, position: int) -> AbstractContextManager[None]:
    """Seed `random`, torch's CPU generator and, if imported, NumPy from a sample position; restore them on exit.

    `position` is the sample's position in the global order. Pipeline-, tensor- and context-parallel ranks read the
    same samples, so they must draw the same numbers.
    """
    return isolated_random(seed, _SAMPLE, position)


def seed_data_random(seed: int, *, position: int) -> None:
    """Seed like `position_random` without restoring the states."""
    seed_generators(seed, _SAMPLE, position)


def seed_collate_random(seed: int, *, position: int) -> None:
    """Seed the generators for collating the samples from `position` on, independently of the samples."""
    seed_generators(seed, "collate at", position)


def check_draws_nothing(read: Callable[[], object]) -> None:
    """Check that `read`, which reads a batch, draws no random numbers, else raise `UserError`.

    If the random states changed, `read` is called again, because another thread, such as a tracker's, may have drawn.
    """
    drawn = _drawn_by(read) and _drawn_by(read)
    if drawn:
        raise UserError(
            f"reading a batch drew random numbers from {' and '.join(drawn)}; expected none, because the data provider "
            "has draws = False. Set draws = True, so that random numbers are seeded by the position of the sample."
        )


def _drawn_by(read: Callable[[], object]) -> list[str]:
    before = _states()
    read()
    after = _states()
    return [name for name, state in before.items() if _text(state) != _text(after[name])]


def _text(state: Any) -> str:
    return json.dumps(state, default=lambda array: array.tolist())


def _states() -> dict[str, Any]:
    states = {"Python": random.getstate(), "torch": torch.default_generator.get_state()}
    numpy = sys.modules.get("numpy")
    return states if numpy is None else {"NumPy": numpy.random.get_state(), **states}
