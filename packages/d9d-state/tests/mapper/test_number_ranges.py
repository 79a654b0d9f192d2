from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from d9d_state.mapper._number_ranges import folded_rows


def test_equal_ranges_fold_into_one_row() -> None:
    assert folded_rows([(0, 5, 0), (1, 5, 1), (2, 5, 2)]) == [(["{0..2}", "5", "{0..2}"], 3)]
    assert folded_rows([(0, 1), (1, 2), (5, 6)]) == [(["{0..1,5}", "{1..2,6}"], 3)]
    assert folded_rows([(7, 3)]) == [(["7", "3"], 1)]
    assert folded_rows([()]) == [([], 1)]


def test_different_ranges_fold_into_combinations() -> None:
    rows = [(first, second, first) for first in range(2) for second in range(3)]
    assert folded_rows(rows) == [(["{0..1}", "{0..2}", "{0..1}"], 6)]
    assert folded_rows([(0, 0), (0, 1), (1, 0)]) == [(["0", "{0..1}"], 2), (["1", "0"], 1)]


def test_combinations_of_equal_ranges_are_not_folded() -> None:
    rows = [(first, second) for first in range(2) for second in range(5, 7)]
    assert folded_rows(rows) == [(["0", "{5..6}"], 2), (["1", "{5..6}"], 2)]


@given(st.sets(st.tuples(*[st.integers(0, 3)] * 3), min_size=1))
def test_no_row_is_lost(rows: set[tuple[int, ...]]) -> None:
    said: list[tuple[int, ...]] = []
    for texts, count in folded_rows(sorted(rows)):
        meant = _meant([_unfolded(text) for text in texts])
        assert len(meant) == count
        said += meant
    assert sorted(said) == sorted(rows)


def _unfolded(text: str) -> list[int]:
    bounds = [run.split("..") for run in text.strip("{}").split(",")]
    return [value for bound in bounds for value in range(int(bound[0]), int(bound[-1]) + 1)]


def _meant(values: list[list[int]]) -> list[tuple[int, ...]]:
    lengths = sorted({len(each) for each in values})
    choices = (dict(zip(lengths, each, strict=True)) for each in product(*map(range, lengths)))
    return [tuple(each[choice[len(each)]] for each in values) for choice in choices]
