"""Every deliberate bug turns a cell of the oracle red."""

import pytest
from mutants import MUTANTS, Mutant
from oracle import parse_cell

from d9d_dist.testing import RankError


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_caught(mutant: Mutant) -> None:
    assert _first_difference(mutant) is not None, f"{mutant.cell} does not notice it"


def _first_difference(mutant: Mutant) -> str | None:
    """What the oracle says. A bug that only crashes shows nothing about the oracle: it ends the test."""
    try:
        return next((str(found) for found in parse_cell(mutant.cell).differences(around=mutant.bug)), None)
    except RankError:
        raise
    except AssertionError as error:  # ranks that disagree on a loss or a norm are found even earlier
        return str(error)


def test_there_are_enough_of_them() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
