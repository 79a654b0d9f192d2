"""Generate the support matrix from the rows of the oracle while the documentation is built.

Two features are proven together if a row of the oracle has both, an error if the grid says that they are incompatible
(`test_oracle.py` checks the errors), and open otherwise: no check rejects them, and no row compares them.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "integration_tests"), str(ROOT / "examples")]

from oracle import GRIDS, cells  # noqa: E402
from test_moe_rows import ROWS as MOE_ROWS  # noqa: E402
from test_peft_rows import ROWS as PEFT_ROWS  # noqa: E402
from test_pipeline_rows import KINDS  # noqa: E402
from test_pipeline_rows import LAYOUTS as PIPELINE_LAYOUTS  # noqa: E402

from d9d_dist import ContextMethod  # noqa: E402
from d9d_loop.jobs.job_config import AdapterConfig  # noqa: E402

ADAPTERS = get_args(AdapterConfig.model_fields["kind"].annotation)

LAYOUTS = {
    "dp_replicate": "replicated data",
    "dp_shard": "sharded data (FSDP)",
    "tp": "tensor",
    "cp_shard": "context, weights sharded",
    "cp_replicate": "context, weights replicated",
    "ep": "expert",
    "pp": "pipeline",
}
OPTIONS = {
    **{f"method={name}": f"context by {name.replace('_', '-')}" for name in get_args(ContextMethod)},
    **{f"schedule={kind}": f"`{kind}`" for kind in KINDS},
    "microbatch": "gradient accumulation",
    "checkpointing=full": "full recomputation",
    "checkpointing=selective": "selective recomputation",
    "ragged": "ragged and padded rows",
    "packed": "packed documents",
    "head=tied": "tied embeddings",
    "window": "sliding window",
    "rope": "scaled rotary positions",
    "moe": "mixture of experts",
    **{kind: f"`{kind}`" for kind in ADAPTERS},
    "classifier": "classification head",
    "embedder": "embedding head",
    "heads": "several heads",
    "delta": "Gated DeltaNet",
    "latent": "latent attention",
    "sinks": "attention sinks",
}
AXES = {
    "data_parallel_replicate": "dp_replicate",
    "data_parallel_shard": "dp_shard",
    "tensor_parallel": "tp",
    "context_parallel_shard": "cp_shard",
}
FEATURES = {**LAYOUTS, **OPTIONS}
INTRODUCTION = """# Support matrix

Generated from the rows of [the oracle](testing.md#the-oracle). A row trains a model for several steps in a layout,
and compares losses, every gradient, the norm and every parameter with one process, in float64.

- **proven**: a row of the oracle has both features, and CI runs it, some rows only every night.
- **error**: the combination raises an error, before anything starts.
- *open*: no check refuses the combination, and no row compares it. [The oracle](testing.md#the-oracle) can compare your
  model in it.
- empty: one of the two does not occur with the other by its nature.

Layouts of more than two parallelisms are in rows too: see `integration_tests/oracle.py --list`. The rows run on
CPUs over gloo.
"""


def features(values: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return the features among the values of a row."""
    chosen = dict(values)
    found = {axis for axis in LAYOUTS if chosen.get(axis, "1") != "1"}
    if found & {"cp_shard", "cp_replicate"}:
        found.add(f"method={chosen.get('method', 'all_gather')}")
    if "pp" in found:
        found.add(f"schedule={chosen.get('schedule', '1f1b')}")
    if chosen.get("microbatch", "all") != "all":
        found.add("microbatch")
    checkpointing = chosen.get("checkpointing", "none")
    found.add("checkpointing=full" if checkpointing == "every_second" else f"checkpointing={checkpointing}")
    found.add({"ragged": "ragged", "padded": "ragged", "packed": "packed"}.get(chosen.get("rows", ""), ""))
    found.add("ragged" if chosen.get("mask") == "ragged" else "")
    found |= {"head=tied"} if chosen.get("head") == "tied" or chosen.get("model") == "tied" else set()
    found |= {name for name in ("window", "rope") if chosen.get(name, "none") not in ("none", "plain")}
    found.add(chosen.get("model", ""))
    return frozenset(found & FEATURES.keys())


def rows() -> Iterator[frozenset[str]]:
    """Yield the features of each row."""
    for grid in GRIDS:
        yield from (features(cell.values) for cell in cells(grid))
    for degrees in PIPELINE_LAYOUTS.values():
        if len(degrees) <= 1:  # layouts of more ranks have only half of the schedules
            values = [(AXES[name], str(degree)) for name, degree in degrees.items()]
            yield from (features([("pp", "2"), ("schedule", kind), ("method", "ring"), *values]) for kind in KINDS)
    for row in MOE_ROWS:
        yield features([*_layout(row.layout), ("checkpointing", row.checkpointing)]) | {"moe"}
    for method, layout in PEFT_ROWS:
        of_experts = {"experts": {"moe", "lora"}, "dora experts": {"moe", "dora"}}
        yield features(_layout(layout)) | of_experts.get(method, {method} & {*ADAPTERS})


def _layout(layout: str) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (part.partition("=") for part in layout.split(",") if part)]


def impossible_pairs() -> set[frozenset[str]]:
    """Return the pairs of features for which a grid has values, all of them incompatible."""
    possible: set[frozenset[str]] = set()
    seen: set[frozenset[str]] = set()
    for grid in GRIDS:
        every_value = [(key, value) for key, values in grid.factors.items() for value in values]
        for first, second in combinations(every_value, 2):
            if first[0] == second[0]:
                continue
            values = dict((first, second))
            pairs = {frozenset(pair) for pair in combinations(features(values.items()), 2)}
            seen |= pairs
            if grid.is_possible(values):
                possible |= pairs
    return seen - possible


def state(pair: frozenset[str], proven: set[frozenset[str]], impossible: set[frozenset[str]]) -> str:
    """Return the text of a pair's cell."""
    kinds = [name.partition("=")[0] for name in pair]
    models = {"classifier", "embedder", "heads", "delta", "latent", "sinks"}
    pipelines, contexts = ("schedule", "pp"), ("method", "cp_shard", "cp_replicate")
    if pair in proven:
        return "proven"
    if pair in impossible:
        return "error"
    if len(set(kinds)) < len(kinds) or len(pair & models) == len(pair) or pair <= {*ADAPTERS}:
        return ""
    if all(kind in pipelines for kind in kinds) or all(kind in contexts for kind in kinds):
        return ""
    return "*open*"


def page() -> str:
    """Return the page."""
    proven = {frozenset(pair) for row in rows() for pair in combinations(row, 2)}
    impossible = impossible_pairs() - proven
    names = list(LAYOUTS.values())
    lines = [INTRODUCTION, "\n## Layouts\n", _line(["", *names]), _line(["---"] * (len(names) + 1))]
    for name, title in LAYOUTS.items():
        others = ["" if name == each else state(frozenset({name, each}), proven, impossible) for each in LAYOUTS]
        lines.append(_line([f"**{title}**", *others]))
    lines += ["\n## Options in layouts\n", _line(["", *names]), _line(["---"] * (len(names) + 1))]
    for name, title in OPTIONS.items():
        lines.append(_line([f"**{title}**", *(state(frozenset({name, each}), proven, impossible) for each in LAYOUTS)]))
    options = {name: title for name, title in OPTIONS.items() if not name.startswith("method=")}
    lines += ["\n## Options together\n", "Pairs of options that a row has, for each option.\n"]
    for name, title in options.items():
        together = [other for each, other in options.items() if frozenset({name, each}) in proven and each != name]
        if together:
            lines.append(f"- **{title}**: {', '.join(together)}")
    return "\n".join(lines) + "\n"


def _line(cells_: list[str]) -> str:
    return f"| {' | '.join(cells_)} |"


def on_files(files: Files, config: Any) -> Files:
    """Add the page; mkdocs calls this hook before it reads pages."""
    files.append(File.generated(config, "support_matrix.md", content=page()))
    return files
