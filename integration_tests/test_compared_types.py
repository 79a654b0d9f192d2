"""The record of the compared decoders of `transformers`: no type differs, and the page has the table of the record."""

import pytest
from compared_types import outcome, page_table, read, table


def test_no_type_differs() -> None:
    found = {(axis, name): line for axis, types in read().items() for name, line in types.items()}
    assert not {
        key: line for key, line in found.items() if line.partition(":")[0] not in ("equal", "error", "not built")
    }


def test_most_types_are_equal_in_pipelines() -> None:
    assert list(read()["pipelines"].values()).count("equal") >= 150


def test_the_page_has_the_table_of_the_record() -> None:
    assert page_table() == table(read())


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("equal", "equal"),
        ("error: got a; expected b. Do c.", "error: got a"),
        ("refused: the model d.e has no f. Do c.", "error: the model d.e has no f"),
        ("not run: KeyError: 'a'\nmore", "not built: KeyError: 'a'"),
        ("gradient 1 a.b: error 1 of 2, bound 3", "different: gradient 1 a.b: error 1 of 2, bound 3"),
    ],
)
def test_an_outcome_is_the_kind_and_the_first_sentence_of_the_reason(found: str, expected: str) -> None:
    assert outcome(found) == expected


def test_types_with_equal_outcomes_share_a_row() -> None:
    record = {"pipelines": {"a": "equal", "b": "error: c|d", "e": "equal"}, "contexts": {"a": "equal", "e": "equal"}}
    assert table(record).splitlines()[2:] == [
        "| 3 types | 2 equal | 2 equal |",
        "| `a`, `e` | equal | equal |",
        "| `b` | error: c/d | not compared |",
    ]
