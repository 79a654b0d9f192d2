"""Run the examples of post-training in full, check that they learn, and record their curves for the documentation.

    uv run python .ci/record_post_training.py [--folder runs] [--write]

`--write` writes docs/assets/post_training_curves.json. The model of pretrain.py must be in the folder, or is trained
first. pretrain.py and all examples together take about six minutes of processor time.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CURVES = ROOT / "docs" / "assets" / "post_training_curves.json"


def run(name: str, *arguments: str, ranks: int = 1) -> dict[str, Any]:
    """Run an example on local ranks, and return its summary with the processor seconds of its processes."""
    before = os.times()
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(ROOT / "examples" / f"{name}.py"), *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"{name}: {seconds:.0f} s of processor time", flush=True)
    _stamp, _, summary = output.splitlines()[-1].partition("{")
    return {**json.loads("{" + summary), "processor_seconds": round(seconds)}


def learned(folder: Path) -> dict[str, dict[str, Any]]:
    """Run SFT, DPO and GRPO, and return what the figure shows."""
    source = folder / "pretrain" / "export"
    if not source.is_dir():
        run("pretrain", "--run.folder", str(folder))
    for name in ("sft-chat", "dpo", "grpo", "grpo-ranks"):  # a finished run is not repeated
        shutil.rmtree(folder / name, ignore_errors=True)
    shared = ["--run.folder", str(folder), "--initial_weights", str(source)]
    sft, dpo, grpo = run("sft_chat", *shared), run("dpo", *shared), run("grpo", "--run.folder", str(folder))
    mesh = ["--mesh.pipeline_parallel", "2", "--mesh.data_parallel_shard", "2"]
    grpo["curve_of_four_ranks"] = run("grpo", "--run.folder", str(folder), "--run.name", "grpo-ranks", *mesh, ranks=4)[
        "curve"
    ]
    lines = (folder / "sft-chat" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    sft["loss"] = [[record["step"], record["loss"]] for record in records if "loss" in record]
    return {"sft": sft, "dpo": dpo, "grpo": grpo}


def check(curves: dict[str, dict[str, Any]]) -> None:
    """Raise an error if an example did not learn."""
    sft, dpo, grpo = (curves[name] for name in ("sft", "dpo", "grpo"))
    first, last = dpo["held_out"][0], dpo["held_out"][-1]
    accuracy = [sum(part) / len(part) for part in (grpo["curve"][:3], grpo["curve"][-10:])]
    expected = {
        "SFT answers a third of the held-out questions exactly": sft["exact_answers"] >= 1 / 3,
        "the margin of held-out pairs rises": last["margin"] > first["margin"] and last["accuracy"] > 0.7,
        "GRPO goes from below 20 % to above 80 %": accuracy[0] < 0.2 and accuracy[1] > 0.8,
        "GRPO has the same curve on 2 pipeline x 2 data ranks": grpo["curve"] == grpo["curve_of_four_ranks"],
        "GRPO takes less than 480 s": grpo["processor_seconds"] < 480,
    }
    failed = [text for text, is_so in expected.items() if not is_so]
    if failed:
        raise SystemExit(f"did not happen: {'; '.join(failed)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs", help="run folder with pretrain/export")
    parser.add_argument("--write", action="store_true", help=f"write {CURVES.relative_to(ROOT)}")
    options = parser.parse_args()
    curves = learned(options.folder)
    check(curves)
    kept = {
        "sft": ("loss", "exact_answers", "question", "answer", "processor_seconds"),
        "dpo": ("held_out", "processor_seconds"),
        "grpo": ("curve", "curve_of_four_ranks", "processor_seconds"),
    }
    chosen = {name: {key: curves[name][key] for key in keys} for name, keys in kept.items()}
    if options.write:
        CURVES.write_text(json.dumps(chosen, indent=1) + "\n", encoding="utf-8")
    else:
        print(json.dumps(chosen))


if __name__ == "__main__":
    main()
