from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import Field

from d9d_loop import Section
from d9d_loop.config._config_keys import all_keys, arms_of, keys_of, locate, sections_of


class A(Section):
    kind: Literal["a"] = "a"
    size: int = 1


class B(Section):
    kind: Literal["b"] = "b"
    b: float = 1.0


@dataclass
class C:
    name: str
    nested: A | None = None


Choice = Annotated[A | B, Field(discriminator="kind")]


class Top(Section):
    choice: Choice = A()
    each: tuple[Choice, ...] = ()
    by_name: dict[str, C] = Field(default_factory=dict)
    c: C | None = None
    text: int | str = 1


def test_all_keys_returns_every_key_except_keys_inside_lists() -> None:
    assert [key.name for key in all_keys(Top)] == [
        *("choice", "choice.kind", "choice.size", "choice.kind", "choice.b", "each", "by_name"),
        *("c", "c.name", "c.nested", "c.nested.kind", "c.nested.size", "text"),
    ]


def test_required_keys_are_marked() -> None:
    assert {key.name: key.default for key in keys_of(C)} == {"name": None, "nested": "null"}
    assert {key.name: key.default for key in keys_of(B)} == {"kind": "b", "b": "1.0"}


def test_union_members_are_listed() -> None:
    assert arms_of(Choice | None) == [A, B, type(None)]
    assert arms_of(list[A]) == [list[A]]
    assert sections_of(Choice | int) == [A, B]
    assert sections_of(list[A]) == []


@pytest.mark.parametrize(
    ("location", "keys", "siblings"),
    [
        (("choice", "a", "size"), ("choice", "size"), ["kind", "size"]),
        (("choice", "b", "b"), ("choice", "b"), ["kind", "b"]),
        (("choice", "A", "size"), ("choice", "size"), ["kind", "size"]),
        (("each", 1, "b", "x"), ("each", 1, "x"), ["kind", "b"]),
        (("by_name", "a", "nested", "size"), ("by_name", "a", "nested", "size"), ["kind", "size"]),
        (("c", "nam"), ("c", "nam"), ["name", "nested"]),
        (("text", "str"), ("text",), ["choice", "each", "by_name", "c", "text"]),
        ((), (), []),
    ],
)
def test_locate_finds_the_key_of_a_pydantic_location(
    location: tuple[str | int, ...], keys: tuple[str | int, ...], siblings: list[str]
) -> None:
    place = locate(Top, location)
    assert place.keys == keys
    assert [key.name for key in place.siblings] == siblings


def test_nested_sections_are_listed() -> None:
    assert [key.name for key in locate(Top, ("c",)).below] == ["name", "nested"]
    assert [key.name for key in locate(Top, ("choice", "b")).below] == ["kind", "b"]
    assert locate(Top, ("choice", "b", "b")).below == ()
