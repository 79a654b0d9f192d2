from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from d9d_loop import Section, TrainerConfig
from d9d_loop.config._config_help import describe_fields, tabulate_fields
from d9d_loop.config._config_keys import all_keys, sections_of


@dataclass
class Shape:
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


class Small(Section):
    size: int


class Rate(Section):
    rate: float = Field(default=0.5, description="How much.")


class Grown(Small):
    limit: int | None = Field(default=None, description="How many.")
    choice: Rate


def test_every_key_has_one_entry() -> None:
    assert describe_fields(Job).splitlines() == [
        "usage: [FILE] [--section.key VALUE ...]",
        "",
        "  --shape.width int (required)",
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
    text = describe_fields(TrainerConfig)
    for key in all_keys(TrainerConfig):
        if not sections_of(key.annotation):
            assert f"\n  --{key.name} " in text
            assert key.description or key.name.endswith(".kind"), key.name
            assert key.description in text


def test_the_table_omits_known_fields() -> None:
    assert tabulate_fields(Grown, without=Small).splitlines() == [
        "| Key | Type | Default | What it is for |",
        "|---|---|---|---|",
        "| `limit` | `int \\| null` | null | How many. |",
        "| `choice.rate` | `float` | 0.5 | How much. |",
    ]
