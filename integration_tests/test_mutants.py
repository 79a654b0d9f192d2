"""Every deliberate bug turns a cell of the oracle red."""

import pytest
from decoder_mutants import DECODER_MUTANTS
from mutants import MUTANTS, Mutant
from oracle import parse_cell

from d9d_dist.testing import RankError

ALL = [*MUTANTS, *DECODER_MUTANTS]


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_is_caught(mutant: Mutant) -> None:
    assert _first_difference(mutant) is not None, f"{mutant.cell} does not notice it"


def _first_difference(mutant: Mutant) -> str | None:
    """What the oracle says. A bug that only crashes shows nothing about the oracle: it ends the test."""
    found = parse_cell(mutant.cell).differences(num_steps=mutant.num_steps, around=mutant.bug)
    try:
        return next(map(str, found), None)
    except RankError:
        raise
    except AssertionError as error:  # ranks that disagree on a loss or a norm are found even earlier
        return str(error)


def test_there_are_enough_of_them() -> None:
    assert len({mutant.name for mutant in ALL}) == len(ALL) >= 60
