import pytest

from d9d_loop.rank_ends import RankEnds


@pytest.mark.parametrize(
    ("codes", "first", "expected"),
    [
        ({0: 125, 1: 2}, None, 2),
        ({0: -15, 1: 2}, None, 2),
        ({0: 1, 1: 2}, (1, 2), 2),
        ({1: -15, 0: -9}, (0, None), 137),
        ({0: -15, 1: 125}, (0, 2), 2),  # ended by the agent after its failure was known
        ({0: -9, 1: 125}, (0, 1), 1),  # killed by the agent, because it ended too slowly
        ({0: 7, 1: 125}, (0, 1), 7),  # a script that handles the exception
        ({0: 125, 1: 125}, (5, 2), 2),  # a rank of another node
        ({0: 125, 1: -15}, (5, None), 125),  # killed on another node
        ({0: 1, 1: 2}, (5, None), 1),  # the first that the agent saw
        ({0: -15}, None, 143),
        ({0: 0, 1: 3}, None, 3),
        ({0: 0, 1: 0}, None, 0),
        ({}, None, 1),
    ],
)
def test_the_exit_code_is_that_of_the_first_failure(
    codes: dict[int, int], first: tuple[int, int | None] | None, expected: int
) -> None:
    assert RankEnds(codes=codes, first=first).exit_code() == expected
