"""The errors on the page about layouts, and the constants of hardware files, are those of the planner's record."""

import csv
import importlib
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
SETTINGS = {
    "mbs": "microbatch",
    "vp": "stages",
    "recompute": "recomputation",
    "seq": "length",
    "tp": "degrees",
    "pp": "degrees",
    "ep": "experts",
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
        number, unstated, *errors = rows[source]
        found = RECORD["shipped"][group]
        assert int(number) == found["rows"], source
        names = dict.fromkeys(SETTINGS[name] for name in SETTINGS if name in found["unstated"])
        assert unstated == ", ".join(names), source
        assert errors == [_error(kind, group) for kind in ("folds", "models", "shipped")], source


def test_the_table_of_memory_has_the_errors_of_the_record() -> None:
    rows = _rows("Rows | Number")
    for source, group in MEMORY.items():
        found = RECORD["shipped"][group]
        assert rows[source][-2:] == [f"{found['memory_mape']:.1f} %", f"{found['memory_shortest']:.1f} %"], source


COLUMNS = (
    "source,system,model,params_b,hidden,layers,heads,vocab,gpus,gpu,precision,tp,pp,cp,ep,dp,vp,sharding,gbs,mbs,seq,"
    "recompute,tflops_gpu,step_s,mem_gib,note"
)


@pytest.mark.parametrize(
    "row",
    [
        ("Megatron-Bridge", "Megatron-Bridge 26.06 NeMo Container", "LLAMA3_70B", "DGX-H100"),
        ("Automodel", "NeMo AutoModel", "Llama3 70B", "H100"),
        ("glennklockwood", "Meta", "Llama-3 405B", "H100"),
        ("prime-rl", "prime-rl sft", "Qwen/Qwen3-4B-Instruct-2507", "NVIDIA H200"),
        ("torchtitan", "torchtitan", "Llama-3.1 8B", "H100"),
        ("KempnerForge", "KempnerForge", "Llama-3 7B", "H200"),
    ],
)
def test_a_row_of_an_unknown_model_is_not_read_as_another(
    row: tuple[str, str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, system, known, gpu = row
    monkeypatch.syspath_prepend(str(ROOT / "packages/d9d-loop/benchmarks"))
    rows = importlib.import_module("planning_rows")
    given = {"params_b": "8.03", "hidden": "4096", "gpus": "8", "tp": "1", "pp": "1", "dp": "8", "step_s": "1"}
    given |= {"source": source, "system": system, "gpu": gpu, "gbs": "8", "mem_gib": "9", "tflops_gpu": "400"}
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        table: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS.split(","), restval="")
        table.writeheader()
        table.writerows(given | {"model": name} for name in (known, known.replace("L", "M").replace("4B", "3B")))
    assert [each.row["model"] for each in rows.read(path)] == [known]
    assert len(list(rows.unread(path))) == 1


def test_a_row_of_unknown_sizes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "packages/d9d-loop/benchmarks"))
    rows = importlib.import_module("planning_rows")
    with pytest.raises(ValueError, match="invalid literal"):
        rows._gpt({"hidden": "", "layers": "48", "heads": "", "vocab": "", "seq": ""})


@pytest.mark.parametrize("name", sorted(RECORD["fit"]))
def test_hardware_files_have_the_fitted_constants_of_the_record_and_contain_its_intervals(name: str) -> None:
    """Constants have three digits. Intervals contain the half widths of the record, of folds with another seed."""
    hardware, expected = Hardware.load(name), RECORD["fit"][name]
    assert hardware.fitted_rows == expected["rows"]
    for constant, value in hardware.fitted.model_dump().items():
        assert value == pytest.approx(float(f"{expected[constant]:.3g}"), rel=1e-9), constant
    for interval, width in RECORD["intervals"][name].items():
        assert getattr(hardware, interval) >= width, interval
