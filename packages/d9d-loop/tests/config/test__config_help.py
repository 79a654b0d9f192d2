from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, PositiveInt

from d9d_dist import UserError
from d9d_loop import Section, TrainerConfig
from d9d_loop.config._config_help import describe_fields
from d9d_loop.config._config_keys import all_keys, keys_of, sections_of


@dataclass
class Shape:
    """A shape.

    Attributes:
        width: How wide it is, in units that
            need a second line.
    """

    width: int
    depth: int = 2
    heads: list[int] = field(default_factory=list)


class A(Section):
    kind: Literal["a", "x"] = "a"
    rate: float = Field(default=0.5, description="How much.")


class B(Section):
    kind: Literal["b"] = Field(default="b", description="Which.")
    rate: float = Field(default=0.1, description="How little.")
    many: tuple[PositiveInt, ...] = (1, 2)


class Job(Section):
    shape: Shape
    choice: Annotated[A | B, Field(discriminator="kind")] = A()
    folder: Path | None = Field(default=None, description="Where it is.")
    limit: PositiveInt | None = 3
    on: bool = True
    items: tuple[Annotated[A | B, Field(discriminator="kind")], ...] = (B(),)
    table: dict[str, int] = Field(default_factory=dict)


def test_the_overview_has_a_line_for_each_key_of_the_default_kinds() -> None:
    assert [" ".join(line.split()) for line in describe_fields(Job).splitlines()] == [
        "usage: [FILE] [--section.key VALUE ...]",
        "--help SECTION for all keys, kinds and descriptions",
        "",
        "folder Path | null = null Where it is",
        "limit int | null = 3",
        "on bool = true",
        'items [A | B, ...] = [{"kind": "b", "rat...',
        "table dict[str, int] = computed",
        "",
        "[shape]",
        "width int required How wide it is, in units that need a second line",
        "depth int = 2",
        "heads [int] = computed",
        "",
        "[choice]",
        "kind a | x | b = a",
        "rate float = 0.5 How much",
    ]


def test_unknown_sections_are_refused() -> None:
    with pytest.raises(UserError, match=r"--help choise: no such section; did you mean choice\?"):
        describe_fields(Job, section="choise")
    with pytest.raises(UserError, match=r"--help zzz: no such section; expected one of choice, folder, "):
        describe_fields(Job, section="zzz")


def test_help_of_a_section_lists_all_kinds_and_items() -> None:
    sections = ("shape", "choice", "folder", "limit", "on", "items", "table")
    lines = [line for section in sections for line in describe_fields(Job, section=section).splitlines()]
    assert lines == [
        "  --shape.width int (required)",
        "        How wide it is, in units that need a second line.",
        "  --shape.depth int (default 2)",
        "  --shape.heads [int] (default computed)",
        "  --choice.kind a | x | b (default a)",
        "        Which.",
        "  --choice.rate float (default 0.5 for a; 0.1 for b) [a, b]",
        "        How much.",
        "        How little.",
        "  --choice.many [int, ...] (default [1, 2]) [b]",
        "  --folder Path | null (default null)",
        "        Where it is.",
        "  --limit int | null (default 3)",
        "  --on bool (default true)",
        '  --items [A | B, ...] (default [{"kind": "b", "rate": 0.1, "many": [1, 2]}])',
        "  --items[].kind a | x | b (default a)",
        "        Which.",
        "  --items[].rate float (default 0.5 for a; 0.1 for b) [a, b]",
        "        How much.",
        "        How little.",
        "  --items[].many [int, ...] (default [1, 2]) [b]",
        "  --table dict[str, int] (default computed)",
    ]


def test_the_trainer_documents_every_key() -> None:
    pages = {key.name: describe_fields(TrainerConfig, section=key.name) for key in keys_of(TrainerConfig)}
    for key in all_keys(TrainerConfig):
        if not sections_of(key.annotation):
            text = pages[key.name.partition(".")[0]]
            assert f"  --{key.name} " in text
            assert key.description or key.name.endswith(".kind"), key.name
            assert key.description in text
