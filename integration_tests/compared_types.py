"""Record of the decoders of `transformers` that are compared with one process in float64, by axis of the mesh.

    python integration_tests/compared_types.py pipelines llama qwen3

compares some types, or all, and writes `compared_types.json` and the table in `docs/hugging_face_model.md`. With
`--all`, `test_zoo_pipelines.py` compares the types again; the results must be those of the record. A type is `equal`,
an `error` of the user before the start, or `not built`: its authors' code does not run on a small configuration in one
process.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zoo_jobs import context_differences, differences, plain_traces, stage_differences

from d9d_dist.testing import run_ranks

RECORD = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "hugging_face_model.md"
_START, _END = "<!-- compared types -->", "<!-- end of compared types -->"

Outcomes = dict[str, str]
"""By type: `equal`, or a kind (`error`, `not built`, `different`), `: ` and the reason."""


def pipelines(types: Sequence[str], folder: str) -> Outcomes:
    """Compare losses, gradients and trained values in 2 and 3 pipeline stages with a plain loop."""
    names = [f"decoders:{name}" for name in types]
    [failed] = run_ranks(plain_traces, names, folder, world_size=1, timeout=1200)
    built = [name for name in names if name not in failed]
    [found] = run_ranks(stage_differences, built, folder, world_size=1, timeout=1200)
    return _outcomes(names, {name: f"not built: {why}" for name, why in failed.items()} | found)


def contexts(types: Sequence[str], folder: str) -> Outcomes:
    """Compare losses and gradients of two context-parallel ranks with whole rows."""
    names = [f"contexts:{name}" for name in types]
    found, _ = run_ranks(context_differences, names, {"context_parallel_shard": 2}, world_size=2, timeout=1800)
    return _outcomes(names, found)


def tensors(types: Sequence[str], folder: str) -> Outcomes:
    """Compare losses, gradients and trained values of two tensor-parallel ranks with a plain loop."""
    names = [f"transformers:{name}" for name in types]
    [failed] = run_ranks(plain_traces, names, folder, world_size=1, timeout=1200)
    built = [name for name in names if name not in failed]
    found = run_ranks(tensor_differences, built, folder, world_size=2, timeout=1200)[0]
    return _outcomes(names, {name: f"not built: {why}" for name, why in failed.items()} | found)


def tensor_differences(names: Sequence[str], folder: str) -> dict[str, str]:
    """Return the first difference of each type on two tensor-parallel ranks, or that it has no plan. Collective."""
    from zoo import entry  # noqa: PLC0415  (ranks import the libraries)

    plans = [name for name in names if entry(name).has_tensor_plan]
    found = {name: "error: has no plan" for name in names if name not in plans}
    lines = differences(plans, [{"tensor_parallel": 2}], folder)
    return found | {name: each[0] for name, each in lines.items() if each}


AXES: Mapping[str, tuple[str, Callable[[Sequence[str], str], Outcomes]]] = {
    "pipelines": ("mesh.pipeline_parallel", pipelines),
    "contexts": ("mesh.context_parallel_shard", contexts),
    "tensors": ("mesh.tensor_parallel", tensors),
}
"""Column of the table and comparison of types, by axis."""


def _outcomes(names: Sequence[str], found: Mapping[str, str]) -> Outcomes:
    return {name.partition(":")[2]: outcome(found.get(name, "equal")) for name in names}


def outcome(found: str) -> str:
    """Return the outcome of what a comparison found: its kind and the first sentence of its reason."""
    if found == "equal":
        return found
    kind, _, reason = found.replace("not run: ", "not built: ").replace("refused: ", "error: ").partition(": ")
    if kind not in ("error", "not built"):
        kind, reason = "different", found
    first = reason.splitlines()[0].partition("; expected")[0].split(". ")[0]
    return f"{kind}: {first[:140]}"


def read() -> dict[str, Outcomes]:
    """Return the outcomes of the record by axis."""
    return json.loads(RECORD.read_text(encoding="utf-8"))["outcomes"]


def write(axis: str, outcomes: Outcomes) -> None:
    """Add outcomes to the record, and write the table of the page."""
    import transformers

    record = read() if RECORD.exists() else {}
    record[axis] = dict(sorted((record.get(axis, {}) | outcomes).items()))
    text = json.dumps({"transformers": transformers.__version__, "outcomes": dict(sorted(record.items()))}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(_START)
    PAGE.write_text(f"{before}{_START}\n\n{table(record)}\n\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


def page_table() -> str:
    """Return the table of the page."""
    return PAGE.read_text(encoding="utf-8").partition(_START)[2].partition(_END)[0].strip()


def table(record: Mapping[str, Outcomes]) -> str:
    """Return the table: a row for each combination of outcomes, first that of most types."""
    axes = [axis for axis in AXES if axis in record]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in sorted({name for axis in axes for name in record[axis]}):
        key = tuple(_cell(record[axis].get(name, "not compared")) for axis in axes)
        rows.setdefault(key, []).append(name)
    counts = [sum(outcome == "equal" for outcome in record[axis].values()) for axis in axes]
    lines = [
        "| Types | " + " | ".join(f"`{AXES[axis][0]}`" for axis in axes) + " |",
        "| --- " * (1 + len(axes)) + "|",
        f"| {len({name for axis in axes for name in record[axis]})} types | "
        + " | ".join(f"{count} equal" for count in counts)
        + " |",
    ]
    for key, names in sorted(rows.items(), key=lambda row: (-len(row[1]), row[1])):
        types = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {types} | " + " | ".join(key) + " |")
    return "\n".join(lines)


def _cell(found: str) -> str:
    return "not built" if found.startswith("not built") else found.replace("|", "/")


def main() -> None:
    """Compare types along one axis, and write the record and the table after each chunk."""
    from zoo_libraries import LANGUAGE_MODELS  # noqa: PLC0415  (takes seconds)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axis", choices=AXES)
    parser.add_argument("types", nargs="*", help="model types of transformers, by default all")
    options = parser.parse_args()
    types = options.types or LANGUAGE_MODELS
    for start in range(0, len(types), 8):
        with tempfile.TemporaryDirectory() as folder:
            found = AXES[options.axis][1](types[start : start + 8], folder)
        write(options.axis, found)
        for name, line in found.items():
            print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main()
