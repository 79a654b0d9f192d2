"""Pages of the site that are generated from code and records, as far as they need no build of the site."""

import sys
from pathlib import Path

import pytest
from pydantic import Field

from d9d_loop import Section

pytest.importorskip("mkdocs", reason="needs the dependency group docs; .ci/run runs it in the lane 'pages of the site'")
ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / ".ci"))
from benchmark_records import read_output, slower  # noqa: E402
from docs_benchmarks import change, page, table, targets  # noqa: E402
from docs_configuration import tabulate_fields  # noqa: E402
from docs_llms import first_sentence  # noqa: E402
from docs_reference import SOURCE, exported, pages  # noqa: E402
from docs_site import on_page_markdown  # noqa: E402


class _Rate(Section):
    rate: float = Field(default=0.5, description="How much.")


class _Small(Section):
    size: int


class _Grown(_Small):
    limit: int | None = Field(default=None, description="How many.")
    choice: _Rate


def test_the_table_of_a_configuration_omits_the_fields_of_another_class() -> None:
    assert tabulate_fields(_Grown, without=_Small).splitlines() == [
        "| Key | Type | Default | What it is for |",
        "|---|---|---|---|",
        "| `limit` | `int` or `null` | null | How many. |",
        "| `choice.rate` | `float` | 0.5 | How much. |",
    ]


def test_a_change_of_more_than_five_percent_is_flagged() -> None:
    assert [change(1.0, None), change(1.04, 1.0), change(1.06, 1.0), change(0.9, 1.0)] == [
        "",
        "+4.0%",
        "**+6.0%**",
        "**-10.0%**",
    ]


def test_a_record_is_compared_with_the_one_before_on_an_equal_machine() -> None:
    entry = {"date": "2026-01-01", "machine": "a", "torch": "2", "python": "3", "arguments": [], "note": ""}
    first, elsewhere, last = ({**entry, "figures": {"ratio": value}} for value in (1.0, 5.0, 1.1))
    elsewhere["machine"] = "b"
    assert table([first, elsewhere, last])[-1] == "| ratio | 1.1 | **+10.0%** |"
    assert table([elsewhere, last])[-1] == "| ratio | 1.1 |  |"
    assert slower([first, elsewhere, last]) == ["ratio: 1 -> 1.1"]
    assert slower([last, elsewhere, first]) == slower([elsewhere, last]) == []


def test_a_target_that_is_not_reached_says_what_bounds_it() -> None:
    records = {"a/b": [{"arguments": [], "figures": {"ratio": 1.2, "copy.s": 0.5}}]}
    row = {"what": "x", "benchmark": "a/b", "figure": "ratio", "target": 1.0, "bound": "a copy takes {copy.s} s"}
    assert targets([row, {**row, "target": 1.3}], records) == [
        "| x | 1 | 1.2 | a copy takes 0.5 s |",
        "| x | 1.3 | 1.2 | reached |",
    ]
    assert targets([{**row, "at_least": True}], records) == ["| x | at least 1 | 1.2 | reached |"]
    with pytest.raises(ValueError, match="without a bound"):
        targets([{**row, "bound": ""}], records)


def test_the_page_of_benchmarks_is_made_of_the_records() -> None:
    text = page()
    assert text.count("\n## Targets\n") == 1
    assert "/start_from_function.py`" in text.partition("## Without a record")[2]


def test_numbers_of_a_benchmark_are_read_by_name() -> None:
    assert read_output('{"name": "x", "ratio": 2, "peer": {"s": 1.5}}') == {"ratio": 2, "peer.s": 1.5}
    assert read_output('noise\n{"kind": "a b", "ms": 1}\n{"kind": "c", "ms": 2}\n') == {"a b: ms": 1, "c.ms": 2}


def test_each_public_name_of_d9d_loop_is_on_one_page() -> None:
    texts = pages()
    names = [name for name, module in exported(SOURCE).items() if module.startswith("d9d_loop")]
    assert len(names) > 50
    for name in names:
        listed = [
            topic for topic, text in texts.items() if f" {name}]" in text or f" {name}," in text or f"[{name}" in text
        ]
        inner = [topic for topic in texts if topic != "job" and name in exported(SOURCE / topic)]
        shadowed = [topic for topic, text in texts.items() if f"d9d_loop.{name}.{name}" in text]
        assert len({*listed, *inner, *shadowed}) == 1, (name, listed, inner, shadowed)


def test_the_first_sentence_of_a_page_has_no_links() -> None:
    assert first_sentence("# T\n\n![x](y)\n\nA [model](m.md) is\n**plain**. More.") == "A model is plain."


@pytest.mark.parametrize("fence", ["sh no-run", "bash exit=2", "python no-run", 'toml title="a.toml"'])
def test_blocks_with_marks_of_the_tests_are_rendered_as_code(fence: str) -> None:
    import markdown  # noqa: PLC0415 - a part of the docs group

    page = on_page_markdown(f"text\n\n```{fence}\nls\n```\n")
    rendered = markdown.markdown(page, extensions=["pymdownx.superfences", "pymdownx.highlight"])
    assert '<div class="highlight">' in rendered
    assert "no-run" not in rendered
