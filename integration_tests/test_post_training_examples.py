"""Short forms of the examples of post-training."""

import math
import random
from operator import ne
from pathlib import Path
from typing import Any

import pytest
from dpo import with_typos
from jobs import TINY_MODEL, Ended, curve, curve_rounding, on_ranks, options

TWO_BY_TWO = {"mesh.pipeline_parallel": 2, "mesh.data_parallel_shard": 2}
SHARDED = {"mesh.data_parallel_shard": 2}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    length = {"text.length": 192, "model.max_position_embeddings": 256}
    (ended,) = on_ranks("pretrain", options(TINY_MODEL, length, {"run.folder": runs, "steps": 5}))
    return Path(ended.summary["export_dir"])


def _run(name: str, folder: Path, more: dict[str, Any], *, world_size: int = 1, double: bool = False) -> Ended:
    ended = on_ranks(name, options({"run.folder": folder}, more), world_size=world_size, double=double)
    assert ended[0].code == 0, ended[0].errors
    return ended[0]


def _sft(pretrained: Path, steps: int) -> dict[str, Any]:
    text = {key: value for key, value in TINY_MODEL.items() if not key.startswith("model.")}
    job = {"initial_weights": pretrained, "steps": steps, "logging.every": 1, "num_asked": 3}
    return {**text, "text.length": 192, "text.pattern": "sh*.py", "evaluation.every": steps // 2, **job}


@pytest.mark.slow
def test_sft_exports_adapters_and_a_merged_model_that_answers(tmp_path: Path, pretrained: Path) -> None:
    summary = _run("sft_chat", tmp_path, _sft(pretrained, 6)).summary
    losses = curve(tmp_path / "sft-chat", "loss")
    assert sum(losses[-2:]) < sum(losses[:2])
    assert {"model.safetensors", "config.json"} <= {path.name for path in Path(summary["export_dir"]).iterdir()}
    assert (Path(summary["adapters_dir"]) / "adapter_config.json").is_file()
    assert summary["question"] == "What is shutil.rmtree for?"
    assert summary["answer"]
    assert summary["exact_answers"] == 0.0  # after six steps of a tiny model


@pytest.mark.full
def test_sft_gives_the_same_curve_and_answer_on_several_ranks(tmp_path: Path, pretrained: Path) -> None:
    more = _sft(pretrained, 12)
    ranks = {**more, **TWO_BY_TWO, "batch.microbatch_size": 2}
    one = _run("sft_chat", tmp_path / "one", more, double=True).summary
    four = _run("sft_chat", tmp_path / "four", ranks, world_size=4, double=True).summary
    losses = curve(tmp_path / "one" / "sft-chat", "loss")
    assert curve(tmp_path / "four" / "sft-chat", "loss") == pytest.approx(losses, rel=1e-9)
    assert four["answer"] == one["answer"]


def _dpo(pretrained: Path, steps: int) -> dict[str, Any]:
    job = {"initial_weights": pretrained, "steps": steps, "batch_size": 4, "microbatch_size": 2, "held_out_rows": 2}
    return {**job, "evaluation_every": steps, "text.pattern": "s*.py", "optimizer.learning_rate": 1e-2}


@pytest.mark.slow
def test_dpo_starts_at_log_two_and_learns(tmp_path: Path, pretrained: Path) -> None:
    found = _run("dpo", tmp_path, _dpo(pretrained, 4)).summary
    assert found["losses"][0] == pytest.approx(math.log(2), rel=curve_rounding(1))  # the adapters do nothing yet
    assert found["losses"][-1] < found["losses"][0]
    assert found["held_out"][0] == {"step": 0, "margin": 0.0, "accuracy": 0.0}
    assert found["held_out"][-1]["margin"] > 0


@pytest.mark.full
def test_dpo_gives_the_same_curve_on_several_ranks(tmp_path: Path, pretrained: Path) -> None:
    more = _dpo(pretrained, 8)
    one = _run("dpo", tmp_path / "one", more, double=True).summary
    two = _run("dpo", tmp_path / "two", {**more, **SHARDED}, world_size=2, double=True).summary
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-9)
    assert two["held_out"][-1]["margin"] == pytest.approx(one["held_out"][-1]["margin"], rel=1e-9, abs=1e-9)


def test_typos_swap_neighboring_letters_of_two_words() -> None:
    sentence = "Return a shell-escaped version of the string."
    rejected = with_typos(sentence, random.Random(0))  # noqa: S311 - no secret
    assert rejected is not None
    assert rejected != sentence
    assert sorted(rejected) == sorted(sentence)
    assert sum(map(ne, rejected.split(" "), sentence.split(" "))) == 2
    assert with_typos("Is a set.", random.Random(0)) is None  # noqa: S311 - no secret


SHORT = {"imitation.steps": 5, "imitation.batch_size": 32, "num_prompts": 4, "num_answers": 4}


@pytest.mark.full
def test_grpo_gives_the_same_curve_on_several_ranks(tmp_path: Path) -> None:
    more = {**SHORT, "steps": 12, "imitation.steps": 40}
    one = _run("grpo", tmp_path / "one", more).summary
    four = _run("grpo", tmp_path / "four", {**more, **TWO_BY_TWO}, world_size=4).summary
    assert four["curve"] == one["curve"]
    assert any(one["curve"])


def test_grpo_runs_with_its_own_rollouts(tmp_path: Path) -> None:
    found = _run("grpo", tmp_path, {**SHORT, "steps": 3}).summary
    assert len(found["curve"]) == 3
