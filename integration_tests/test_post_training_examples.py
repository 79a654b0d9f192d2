"""Short forms of the examples of post-training."""

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import TINY_MODEL, Ended, curve, on_ranks, options

TWO_BY_TWO = {"mesh.pipeline_parallel": 2, "mesh.data_parallel_shard": 2}
SHARDED = {"mesh.data_parallel_shard": 2}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    length = {"text.length": 192, "model.max_position_embeddings": 256}
    (ended,) = on_ranks("pretrain", options(TINY_MODEL, length, {"run.folder": runs, "steps": 5}))
    return Path(ended.summary["export_dir"])


def _run(name: str, folder: Path, more: dict[str, Any], *, world_size: int = 1) -> Ended:
    ended = on_ranks(name, options({"run.folder": folder}, more), world_size=world_size)
    assert ended[0].code == 0, ended[0].errors
    return ended[0]


@pytest.mark.full
def test_sft_learns_answers_and_exports_a_model(tmp_path: Path, pretrained: Path) -> None:
    text = {key: value for key, value in TINY_MODEL.items() if not key.startswith("model.")}
    job = {"initial_weights": pretrained, "steps": 12, "logging.every": 1, "evaluation.every": 6}
    more = {**text, "text.length": 192, "text.pattern": "[c-e]*.py", **job}
    summary = _run("sft_chat", tmp_path / "one", more).summary
    losses = curve(tmp_path / "one" / "sft-chat", "loss")
    assert sum(losses[-3:]) < sum(losses[:3])
    assert {"model.safetensors", "config.json"} <= {path.name for path in Path(summary["export_dir"]).iterdir()}
    assert (Path(summary["adapters_dir"]) / "adapter_config.json").is_file()
    _run("sft_chat", tmp_path / "four", {**more, **TWO_BY_TWO, "batch.microbatch_size": 2}, world_size=4)
    assert curve(tmp_path / "four" / "sft-chat", "loss") == pytest.approx(losses, rel=1e-4)


@pytest.mark.full
def test_dpo_starts_at_log_two_and_learns(tmp_path: Path, pretrained: Path) -> None:
    more = {
        "initial_weights": pretrained, "steps": 8, "batch_size": 4, "microbatch_size": 2, "text.pattern": "[c-e]*.py",
        "optimizer.learning_rate": 1e-2,
    }  # fmt: skip
    losses = _run("dpo", tmp_path / "one", more).summary["losses"]
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)  # the adapters do nothing yet
    assert losses[-1] < losses[0]
    sharded = _run("dpo", tmp_path / "two", {**more, **SHARDED}, world_size=2).summary["losses"]
    assert sharded == pytest.approx(losses, rel=1e-3)


@pytest.mark.full
def test_grpo_gives_the_same_curve_on_several_ranks(tmp_path: Path) -> None:
    more = {"steps": 3, "imitation.steps": 5, "imitation.batch_size": 32, "num_prompts": 4, "num_answers": 4}
    curve_of_one = json.loads(_run("grpo", tmp_path / "one", more).output.splitlines()[-1])["curve"]
    four = _run("grpo", tmp_path / "four", {**more, **TWO_BY_TWO}, world_size=4)
    assert four.summary["curve"] == curve_of_one
