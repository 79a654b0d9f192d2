"""The quickstart script stays short and runs on any number of ranks."""

import ast
import runpy
from pathlib import Path

import pytest
from jobs import EXAMPLES, curve, curve_rounding

from d9d_dist.testing import run_ranks

SCRIPT = EXAMPLES / "quickstart.py"


def test_the_script_is_short() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    imported = [
        name.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("d9d")
        for name in node.names
    ]
    assert len(text.splitlines()) <= 45
    assert 0 < len(imported) <= 8


def _run(arguments: list[str]) -> None:
    import sys  # noqa: PLC0415

    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_loss_falls_and_sharding_changes_no_result(tmp_path: Path) -> None:
    common = ["--run.folder", str(tmp_path), "--steps", "60"]
    run_ranks(_run, [*common, "--run.name", "one"], world_size=1)
    run_ranks(_run, [*common, "--run.name", "two", "--mesh.data_parallel_shard", "2"], world_size=2)
    losses = curve(tmp_path / "one", "loss")
    assert losses[-1] < losses[0] / 2
    assert curve(tmp_path / "two", "loss") == pytest.approx(losses, rel=curve_rounding(60, num_operators=10))
