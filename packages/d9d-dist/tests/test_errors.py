import errno
from collections.abc import Iterable
from typing import Literal

import pytest

from d9d_dist import UserError
from d9d_dist.errors import check_choice, may_pass, refuse_listed, shorten


def test_sections_with_entries_are_listed() -> None:
    refuse_listed("nothing", {"one": [], "two": []})
    with pytest.raises(UserError, match=r"^they differ:\n  two:\n    a\n    b$"):
        refuse_listed("they differ", {"one": [], "two": ["a", "b"]})


@pytest.mark.parametrize(("number", "expected"), [(errno.ESTALE, True), (errno.EROFS, True), (errno.ENOENT, False)])
def test_errors_of_mounts_may_pass(number: int, *, expected: bool) -> None:
    assert may_pass(OSError(number, "text")) == expected


def test_a_value_outside_of_a_literal_type_is_an_error() -> None:
    check_choice("side", "left", Literal["left", "right"])
    with pytest.raises(UserError, match=r"^side = 'Left'; expected one of left, right\.$"):
        check_choice("side", "Left", Literal["left", "right"])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "none"),
        ("ab", "a, b"),
        (range(8), "0, 1, 2, 3, 4, 5, 6, 7"),
        ("abcdefghij", "a, b, c, d, e, f, g, h and 2 more"),
    ],
)
def test_names_are_shortened(names: Iterable[object], expected: str) -> None:
    assert shorten(names) == expected
    assert shorten("abc", 2) == "a, b and 1 more"
