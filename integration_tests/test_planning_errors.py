"""The errors on the page about layouts, and the constants of hardware files, are those of the planner's record."""

import json
from pathlib import Path

import pytest

from d9d_loop.planning import Hardware

ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "packages/d9d-loop/benchmarks/planning_error.json").read_text())
PAGE = (ROOT / "docs/choosing_a_layout.md").read_text()
SOURCES = {
    "vTrain, one node of A100": "vTrain single-node",
    "vTrain, 64 to 512 A100": "vTrain multi-node",
    "Megatron-LM SC21, A100": "SC21",
    "Korthikanti, A100": "Korthikanti",
    "MT-NLG, A100 (fitted to no row)": "MT-NLG",
    "llm-foundry, A100 80 GB": "llm-foundry a100-80-dgx",
    "llm-foundry, A100 40 GB": "llm-foundry a100-40-dgx",
    "llm-foundry, H100": "llm-foundry h100-dgx",
    "Megatron-Core, H100": "Megatron H100",
    "Megatron-Bridge, H100": "Megatron-Bridge h100-dgx",
    "AutoModel, H100": "AutoModel",
    "Llama 3 405B, H100": "Meta",
    "torchtitan, H100 limited to 500 W": "torchtitan",
    "KempnerForge, H200": "KempnerForge",
    "Megatron-Bridge, B200": "Megatron-Bridge b200-dgx",
    "Megatron-Bridge, B300": "Megatron-Bridge b300-dgx",
    "Megatron-Bridge, GB200": "Megatron-Bridge gb200-nvl72",
    "Megatron-Bridge, GB300": "Megatron-Bridge gb300-nvl72",
    "prime-rl, H100 (fitted to no row)": "prime-rl h100-dgx",
    "prime-rl, H200 (fitted to no row)": "prime-rl h200-dgx",
    "prime-rl, B200 (fitted to no row)": "prime-rl b200-dgx",
}
MEMORY = {"KempnerForge": "KempnerForge", "torchtitan": "torchtitan", "Korthikanti": "Korthikanti"}


def _rows(first: str) -> dict[str, list[str]]:
    """Return the cells of the table of the page whose first column has this title, by their first cell."""
    table = PAGE.partition(f"| {first} |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {each[0]: each[1:] for each in cells}


def _error(kind: str, group: str) -> str:
    found = RECORD[kind].get(group)
    return f"{found['mape']:.1f} ({found['median']:.1f})" if found else ""


def test_the_table_has_the_errors_of_the_record() -> None:
    rows = _rows("Source")
    assert list(rows) == list(SOURCES)
    for source, group in SOURCES.items():
        number, _, *errors = rows[source]
        assert int(number) == RECORD["shipped"][group]["rows"], source
        assert errors == [_error(kind, group) for kind in ("folds", "models", "shipped")], source


def test_the_table_of_memory_has_the_errors_of_the_record() -> None:
    rows = _rows("Rows | Number")
    for source, group in MEMORY.items():
        found = RECORD["shipped"][group]
        assert rows[source][-2:] == [f"{found['memory_mape']:.1f} %", f"{found['memory_shortest']:.1f} %"], source


@pytest.mark.parametrize("name", sorted(RECORD["fit"]))
def test_hardware_files_have_the_fitted_constants_of_the_record_and_contain_its_intervals(name: str) -> None:
    """Constants have three digits. Intervals contain the half widths of the record, of folds with another seed."""
    hardware, expected = Hardware.load(name), RECORD["fit"][name]
    assert hardware.fitted_rows == expected["rows"]
    for constant, value in hardware.fitted.model_dump().items():
        assert value == pytest.approx(float(f"{expected[constant]:.3g}"), rel=1e-9), constant
    for interval, width in RECORD["intervals"][name].items():
        assert getattr(hardware, interval) >= width, interval
