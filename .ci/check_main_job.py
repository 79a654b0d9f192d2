"""Run the main job and the quickstart as a user would, on one process and under torchrun, and compare their curves."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
HYBRID = ("--mesh.data_parallel_replicate", "2", "--mesh.data_parallel_shard", "2")
CURVES = ("loss", "grad_norm")
TOLERANCE = 1e-5
STEPS = 20


def run(*command: str) -> list[str]:
    """Run a command from the root and return its output lines; if it fails, print all output and exit."""
    done = subprocess.run(["uv", "run", "--no-sync", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"failed with exit code {done.returncode}: {' '.join(command)}")
    return done.stdout.splitlines()


def torchrun(script: str, *arguments: str) -> list[str]:
    return run("torchrun", "--nproc-per-node", str(RANKS), script, *arguments)


def curve(run_dir: Path, name: str) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record[name] for record in map(json.loads, lines) if name in record]


def check_main_job(runs: Path) -> None:
    short = ("--steps", str(STEPS), "--logging.every", "1", "--evaluation.num_samples", "32", "--run.folder", str(runs))
    short += ("--text.tokens", str(runs / "tokens"))
    alone = run("python", "examples/pretrain.py", "--run.name", "alone", "--logging.stamps", "false", *short)
    torchrun("examples/pretrain.py", "--run.name", "ranks", *short, *HYBRID)
    summary = json.loads(alone[-1])
    expected = {"steps", "train_loss", "val_bits_per_byte", "weight_per_second", "run_dir", "export_dir"}
    assert expected <= summary.keys(), summary
    for name in CURVES:
        ours, theirs = curve(runs / "ranks", name), curve(runs / "alone", name)
        assert len(ours) == len(theirs) == STEPS, (name, len(ours), len(theirs))
        worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
        print(f"{name}: one process and {RANKS} ranks differ by at most {worst:.1e} over {STEPS} steps")
        assert worst <= TOLERANCE, (name, worst)


def check_quickstart(runs: Path) -> None:
    short = ("--steps", "50", "--run.folder", str(runs))
    run("python", "examples/quickstart.py", *short)
    torchrun("examples/quickstart.py", "--run.name", "sharded", "--mesh.data_parallel_shard", str(RANKS), *short)
    print("quickstart: runs alone and under torchrun")


def check_mistake(runs: Path) -> None:
    """Check that a typo ends the script with one message and exit code 2, and without files."""
    done = subprocess.run(
        ["uv", "run", "--no-sync", "python", "examples/pretrain.py", "--run.folder", str(runs / "typo"), "--step", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    expected = "d9d: step is not a configuration key; did you mean steps?\n"
    assert (done.returncode, done.stderr) == (2, expected), (done.returncode, done.stderr)
    assert not (runs / "typo").exists()
    print("a typo: exit code 2 and one message")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        check_mistake(Path(folder))
        check_quickstart(Path(folder))
        check_main_job(Path(folder))
