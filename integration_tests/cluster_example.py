"""Copy of the examples with a small model, for the job files of clusters, and the losses of its runs."""

import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = 300
_SMALLER = {
    "steps": STEPS,
    "length": 32,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "every": 1,
    "num_samples": 64,
    "warmup_steps": 3,
}
_HEALTH = "\n[resilience.health]\nmemory_mib = 1\nmessage_mib = 1\nmatrix_size = 32\n"


def copy_examples(folder: Path) -> None:
    """Copy the examples to a folder, and make the model of `pretrain.toml` small. Only the last step is saved."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    path = folder / "examples" / "pretrain.toml"
    text = path.read_text(encoding="utf-8")
    for name, value in _SMALLER.items():
        text = re.sub(rf"^{name} = \d+", f"{name} = {value}", text, flags=re.MULTILINE)
    text = re.sub(r"(\[(?:evaluation|checkpoint)\]\nevery = )1\n", rf"\g<1>{10 * STEPS}\n", text)
    path.write_text(text + _HEALTH, encoding="utf-8")


def read_losses(folder: Path, run: str) -> dict[int, float]:
    """Return the loss of each step of a run."""
    path = folder / "runs" / run / "metrics.jsonl"
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else []
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
