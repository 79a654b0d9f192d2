import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_loop.optimizers.assignment import Selector, assign

NAMED = [
    (f"layers.{index}.{name}", torch.empty(shape, device="meta"))
    for index in range(3)
    for name, shape in (("norm", (2,)), ("up", (2, 3)), ("down", (3, 2)))
]


@given(
    st.lists(
        st.builds(
            Selector,
            st.sampled_from(["norm", r"\.1\.", "up|down", "", "layers", "absent"]),
            st.sampled_from(["any", "matrices", "vectors"]),
        ),
        max_size=4,
    )
)
def test_every_parameter_is_in_one_group(selectors: list[Selector]) -> None:
    groups = assign(NAMED, selectors, whole=False)
    assert len(groups) == len(selectors) + 1
    assert sorted(name for group in groups for name, _ in group) == sorted(name for name, _ in NAMED)
    for number, group in enumerate(groups):
        for name, parameter in group:
            first = [each.chooses(name, parameter) for each in selectors]
            assert (first.index(True) + 1 if True in first else 0) == number


def test_message_for_a_pattern_without_matches() -> None:
    message = (
        "the optimizer's group with pattern = 'nrom' of vectors matches no trainable parameter; expected at least one "
        "of layers.0.norm, layers.0.up, layers.0.down, layers.1.norm, layers.1.up, layers.1.down, layers.2.norm, "
        "layers.2.up and 1 more. Correct the pattern"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        assign(NAMED, [Selector("nrom", "vectors")])


def test_message_for_a_group_after_others_took_its_parameters() -> None:
    with pytest.raises(
        UserError, match=r"group with pattern = 'norm' gets no parameter, because earlier groups match all"
    ):
        assign(NAMED, [Selector("", "vectors"), Selector("norm", "any")])
