import pytest

from d9d_dist import UserError
from d9d_dist.errors import refuse_listed


def test_sections_with_entries_are_listed() -> None:
    refuse_listed("nothing", {"one": [], "two": []})
    with pytest.raises(UserError, match=r"^they differ:\n  two:\n    a\n    b$"):
        refuse_listed("they differ", {"one": [], "two": ["a", "b"]})
