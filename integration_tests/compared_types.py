"""Record of the decoders of `transformers` that are compared with one process in float64, by axis of the mesh.

    python integration_tests/compared_types.py pipelines llama qwen3

compares some types, or all (`--new`: those without an outcome), and writes `compared_types.json` and the tables in
`docs/hugging_face_model.md`. With `--all`, `test_compared_types.py` compares the types again; the results must be those
of the record. A type is `equal`, an `error` of the user before the start, `not applicable`, or `not built`: its
authors' code does not run on a small configuration in one process. In layouts of other libraries (`PEERS`) it is
`equal`, `different`, or a `crash`.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from zoo_compositions import composition_outcomes
from zoo_jobs import context_differences, differences, plain_traces, stage_differences
from zoo_peers import distributed_config_outcomes

from d9d_dist.testing import run_ranks

RECORD = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "hugging_face_model.md"
_START, _END = "<!-- compared types -->", "<!-- end of compared types -->"

KINDS = ("error", "not applicable", "not built")

Outcomes = dict[str, str]
"""By type: `equal`, or a kind (of `KINDS`, or `different`), `: ` and the reason."""


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


def experts(types: Sequence[str], folder: str) -> Outcomes:
    """Compare losses and gradients of two ranks that share the experts with one rank."""
    names = [f"experts:{name}" for name in types]
    mesh = {"data_parallel_shard": 2, "expert_parallel": 2}
    found, _ = run_ranks(context_differences, names, mesh, world_size=2, timeout=1800)
    return {
        name: "not applicable: no experts" if "has no experts" in line else line
        for name, line in _outcomes(names, found).items()
    }


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


def compositions(types: Sequence[str], folder: str) -> Outcomes:
    """Compare losses, gradients and trained values in random compositions of the axes in which a type is equal."""
    record = read()
    supported = {name: [axis for axis in AXES if record.get(axis, {}).get(name) == "equal"] for name in types}
    return {name: outcome(line) for name, line in composition_outcomes(supported, folder).items()}


AXES: Mapping[str, tuple[str, Callable[[Sequence[str], str], Outcomes]]] = {
    "pipelines": ("mesh.pipeline_parallel", pipelines),
    "contexts": ("mesh.context_parallel_shard", contexts),
    "experts": ("mesh.expert_parallel", experts),
    "tensors": ("mesh.tensor_parallel", tensors),
    "compositions": ("three compositions", compositions),
}
"""Column of the table and comparison of types, by axis."""


def _peer(**sizes: int) -> tuple[str, Callable[[Sequence[str], str], Outcomes]]:
    title = ", ".join(f"{key}={size}" for key, size in sizes.items())
    return f"DistributedConfig({title})", partial(_in_layout, sizes)


def _in_layout(sizes: Mapping[str, int], types: Sequence[str], folder: str) -> Outcomes:
    return {name: outcome(line) for name, line in distributed_config_outcomes(types, folder, sizes).items()}


PEERS: Mapping[str, tuple[str, Callable[[Sequence[str], str], Outcomes]]] = {
    "transformers pipelines": _peer(pp_size=2),
    "transformers tensors": _peer(tp_size=2),
    "transformers shards": _peer(fsdp_size=2),
}
"""As `AXES`, in layouts of other libraries."""


def _outcomes(names: Sequence[str], found: Mapping[str, str]) -> Outcomes:
    return {name.partition(":")[2]: outcome(found.get(name, "equal")) for name in names}


def outcome(found: str) -> str:
    """Return the outcome of what a comparison found: its kind and the first sentence of its reason."""
    if found == "equal":
        return found
    kind, _, reason = found.replace("not run: ", "not built: ").replace("refused: ", "error: ").partition(": ")
    if kind not in (*KINDS, "crash"):
        kind, reason = "different", found
    first = reason.splitlines()[0].partition("; expected")[0].split(". ")[0]
    return f"{kind}: {first[:140]}"


def read() -> dict[str, Outcomes]:
    """Return the outcomes of the record by axis."""
    return json.loads(RECORD.read_text(encoding="utf-8"))["outcomes"]


def write(axis: str, outcomes: Outcomes) -> None:
    """Add outcomes to the record, and write the tables of the page."""
    import transformers

    record = read() if RECORD.exists() else {}
    record[axis] = dict(sorted((record.get(axis, {}) | outcomes).items()))
    text = json.dumps({"transformers": transformers.__version__, "outcomes": dict(sorted(record.items()))}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(_START)
    PAGE.write_text(f"{before}{_START}\n\n{tables(record)}\n\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


def page_tables() -> str:
    """Return the tables of the page."""
    return PAGE.read_text(encoding="utf-8").partition(_START)[2].partition(_END)[0].strip()


def tables(record: Mapping[str, Outcomes]) -> str:
    """Return a table with a row for each combination of kinds, first that of most types, and one of the reasons."""
    columns = {axis: f"`{title}`" for axis, (title, _) in {**AXES, **PEERS}.items() if axis in record}
    rows: dict[tuple[str, ...], list[str]] = {}
    reasons: dict[tuple[int, str], list[str]] = {}
    for name in sorted({name for axis in columns for name in record[axis]}):
        found = [record[axis].get(name, "not compared").partition(": ") for axis in columns]
        rows.setdefault(tuple(kind for kind, _, _ in found), []).append(f"`{name}`")
        for index, (kind, _, reason) in enumerate(found):
            if kind not in ("equal", "not applicable", "not compared"):
                reasons.setdefault((index, f"{kind}: {reason}".replace("|", "/")), []).append(f"`{name}`")
    counts = [f"{list(record[axis].values()).count('equal')} equal" for axis in columns]
    ordered = sorted(rows.items(), key=lambda row: (-len(row[1]), row[1]))
    return "\n".join(
        [
            *_lines(["Types", *columns.values()], [[f"{sum(map(len, rows.values()))} types", *counts]]),
            *(_line([", ".join(names), *kinds]) for kinds, names in ordered),
            "",
            *_lines(["Setting", "Outcome", "Types"], []),
            *(
                _line([list(columns.values())[index], why, ", ".join(names)])
                for (index, why), names in sorted(reasons.items())
            ),
        ]
    )


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Compare types along one axis, and write the record and the tables after each chunk."""
    from zoo_libraries import LANGUAGE_MODELS  # noqa: PLC0415  (takes seconds)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axis", choices=[*AXES, *PEERS])
    parser.add_argument("types", nargs="*", help="model types of transformers, by default all")
    parser.add_argument("--new", action="store_true", help="compare only types without an outcome")
    options = parser.parse_args()
    known = read().get(options.axis, {}) if options.new else {}
    types = [name for name in options.types or LANGUAGE_MODELS if name not in known]
    for start in range(0, len(types), 8):
        with tempfile.TemporaryDirectory() as folder:
            found = {**AXES, **PEERS}[options.axis][1](types[start : start + 8], folder)
        write(options.axis, found)
        for name, line in found.items():
            print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main()
