import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist import StageInfo


@given(count=st.integers(1, 12), extra=st.integers(0, 40), before=st.integers(0, 3), after=st.integers(0, 3))
def test_stages_cover_all_layers_in_order_and_evenly(count: int, extra: int, before: int, after: int) -> None:
    num_layers = count + extra
    parts = [
        StageInfo(index, count).layers(num_layers, virtual_before=before, virtual_after=after) for index in range(count)
    ]
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    work = [len(part) for part in parts]
    if count > max(before, after, 1):  # then the virtual layers fit into the first and last stage
        middle = work[1:-1]
        assert not middle or max(middle) - min(middle) <= max(before, after, 1)


def test_virtual_layers_reduce_the_first_and_last_stage() -> None:
    parts = [StageInfo(index, 4).layers(14, virtual_before=1, virtual_after=1) for index in range(4)]
    assert [len(part) for part in parts] == [3, 4, 4, 3]


def test_first_and_last_stages() -> None:
    assert StageInfo().is_first
    assert StageInfo().is_last
    assert StageInfo(0, 2).is_first
    assert not StageInfo(0, 2).is_last


def test_a_stage_index_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stage index = 2; expected 0 <= index < count = 2"):
        StageInfo(2, 2)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 layers \(\+ 0 virtual\) are too few for 4 pipeline stages; use at most 3"):
        StageInfo(0, 4).layers(3)
