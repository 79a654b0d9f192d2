"""Every deliberate bug makes a cell of the oracle fail."""

import pytest
from decoder_mutants import DECODER_MUTANTS
from mutants import MUTANTS, Mutant
from oracle import parse_cell

from d9d_dist.testing import RankError

ALL = [*MUTANTS, *DECODER_MUTANTS]
CHECKS = (
    "no update was applied in the steps",
    "the loss weight of step 1 is 0 over all samples",
    "the first step created, replaced or deleted the parameters",
)
"""Errors by which a job notices a bug: gradients that are not finite, an unknown weight, parameters left unsharded."""


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
@pytest.mark.sample(*(mutant.name for mutant in ALL if not mutant.is_nightly))
def test_the_oracle_detects_each_mutant(mutant: Mutant) -> None:
    assert _first_difference(mutant) is not None, f"{mutant.cell} does not notice it"


def _first_difference(mutant: Mutant) -> str | None:
    """Return the oracle's first difference. A bug that only crashes fails the test, because it proves nothing."""
    found = parse_cell(mutant.cell).differences(num_steps=mutant.num_steps, around=mutant.bug)
    try:
        return next(map(str, found), None)
    except RankError as error:
        if any(check in str(error) for check in CHECKS):
            return str(error)
        raise
    except AssertionError as error:  # ranks that disagree on a loss or a norm are detected earlier
        return str(error)


def test_at_least_sixty_mutants_have_different_names() -> None:
    assert len({mutant.name for mutant in ALL}) == len(ALL) >= 60
