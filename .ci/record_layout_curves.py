"""Train one model in four layouts and record its losses for the picture of the first page.

    uv run python .ci/record_layout_curves.py    # writes docs/assets/layout_curves.json

The model is the oracle's tied decoder, trained in float64 by the real Trainer over real collectives on CPUs.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "integration_tests"), str(ROOT / "examples")]
from oracle import parse_cell  # noqa: E402

from d9d_loop.testing import parse_layout, trace_layout  # noqa: E402

STEPS = 40
LAYOUTS = {
    "one process": "",
    "4 ranks: sharded data": "dp_shard=4",
    "4 ranks: tensor x context": "tp=2,cp_shard=2",
    "4 ranks: pipeline x replicated data": "pp=2,dp_replicate=2,schedule=1f1b,microbatch=1",
}


def main() -> None:
    experiment = replace(parse_cell("tied,tp=2").experiment, num_steps=STEPS)
    curves = {}
    for title, layout in LAYOUTS.items():
        trace = trace_layout(experiment, parse_layout(layout))
        curves[title] = [float(trace[f"step {step}"]["loss"]) for step in range(1, STEPS + 1)]
    (ROOT / "docs" / "assets" / "layout_curves.json").write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
