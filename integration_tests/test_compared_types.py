"""The record of the compared decoders of `transformers`: no type differs, and the page has the tables of the record.

`--all` compares all types again.
"""

from pathlib import Path

import pytest
from compared_types import AXES, KINDS, outcome, page_tables, read, tables

_CHUNK = 8


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """List the types only where they are compared, because the imports of `transformers` take seconds."""
    if "decoders" not in metafunc.fixturenames:
        return
    types: tuple[str, ...] = ()
    if metafunc.config.option.all:
        from zoo_libraries import LANGUAGE_MODELS  # noqa: PLC0415

        types = LANGUAGE_MODELS
    chunks = [types[start : start + _CHUNK] for start in range(0, max(len(types), 1), _CHUNK)]
    cases = [pytest.param(names, id="".join(names[:1]), marks=pytest.mark.full) for names in chunks]
    metafunc.parametrize("decoders", cases)


@pytest.mark.parametrize("axis", AXES)
def test_the_outcomes_are_those_of_the_record(axis: str, decoders: tuple[str, ...], tmp_path: Path) -> None:
    record = read().get(axis, {})
    assert AXES[axis][1](decoders, str(tmp_path)) == {name: record.get(name, "equal") for name in decoders}


def test_no_type_differs() -> None:
    found = {(axis, name): line for axis in AXES for name, line in read().get(axis, {}).items()}
    assert not {key: line for key, line in found.items() if line.partition(":")[0] not in ("equal", *KINDS)}


@pytest.mark.parametrize(("axis", "least"), [("pipelines", 150), ("contexts", 120)])
def test_most_types_are_equal(axis: str, least: int) -> None:
    assert list(read()[axis].values()).count("equal") >= least


def test_the_page_has_the_tables_of_the_record() -> None:
    assert page_tables() == tables(read())


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


def test_types_with_equal_kinds_share_a_row_and_have_their_reasons() -> None:
    record = {
        "pipelines": {"a": "equal", "b": "error: c|d", "e": "equal", "f": "error: g"},
        "contexts": {"a": "equal", "b": "not built: h", "e": "equal"},
    }
    assert tables(record).splitlines()[2:] == [
        "| 4 types | 2 equal | 2 equal |",
        "| `a`, `e` | equal | equal |",
        "| `b` | error | not built |",
        "| `f` | error | not compared |",
        "",
        "| Setting | Outcome | Types |",
        "| --- | --- | --- |",
        "| `mesh.pipeline_parallel` | error: c/d | `b` |",
        "| `mesh.pipeline_parallel` | error: g | `f` |",
        "| `mesh.context_parallel_shard` | not built: h | `b` |",
    ]
