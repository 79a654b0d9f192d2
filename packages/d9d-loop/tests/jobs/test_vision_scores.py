"""Scores and results of `Inference` of vision-language models, compared with plain forwards in float64."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from text_job_cases import write_lines
from vision_cases import CHATS, chat, image, plain_inputs, save_chats, save_images, save_model, text, vision_config

from d9d_dist.testing import run_ranks
from d9d_loop import Engine, EngineConfig, Inference, InferenceConfig, hugging_face_model
from d9d_loop.jobs import LabelScores, NextToken, image_chats

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "fsdp": {"data_parallel_shard": 2},
    "tensor": {"tensor_parallel": 2},
    "context": {"context_parallel_shard": 2},
}
GROUPS = [[0, 1, 2], [1], [5, 7], [3, 6]]
"""Samples of each batch. The second and the third batch have no image."""


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("released")
    file, model = save_chats(root, CHATS), save_model("qwen2_5_vl", root / "model")
    return {"model": model, "file": file, "plain": _plain(model, file)}


def _plain(model: Path, file: Path) -> list[dict[str, torch.Tensor]]:
    """Return the log-probabilities of the labels of each chat, and the entropies at them."""
    transformers: Any = import_module("transformers")
    processor = transformers.AutoProcessor.from_pretrained(model)
    found: Any = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float64).eval()
    values = []
    for each in CHATS:
        inputs, labels = plain_inputs(processor, each, file.parent)
        with torch.no_grad():
            log_probs = found(**inputs, use_cache=False).logits[0, :-1].log_softmax(-1)
        is_label = labels[0, 1:] != -100
        chosen = log_probs.gather(-1, labels[0, 1:].clamp(min=0)[:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        values.append({"log_probs": chosen[is_label], "entropy": entropy[is_label]})
    return values


def _model(folder: Path) -> Any:
    transformers: Any = import_module("transformers")
    return hugging_face_model(folder, transformers.AutoModelForImageTextToText, dtype=torch.float64)


def _score(model: Path, file: Path, runs: Path, mesh: dict[str, int]) -> list[dict[str, list[list[float]]]]:
    """Return the scores at the labels of each row of all batches, after a comparison of the shapes."""
    data = image_chats(vision_config(model, file, runs))
    batches = [data.collate([data.samples[index] for index in group]) for group in GROUPS]
    config = EngineConfig.model_validate({"mesh": mesh, "run": {"folder": runs}})
    found = []
    with Engine.open(config, model=_model(model), task=NextToken()) as engine:
        dp_size, own = (engine.ctx.size("batch", "dp"), engine.ctx.coordinate("batch", "dp"))
        mine = batches[own::dp_size]
        for batch, scores in zip(mine, engine.score(mine), strict=True):
            num_rows = len(batch["kept"])
            labels = batch["labels"][:num_rows]
            assert all(each.shape == labels.shape for each in scores.values())
            assert all(not each[labels == -100].any() for each in scores.values())
            rows = {
                name: [row[label != -100].tolist() for row, label in zip(each, labels, strict=True)]
                for name, each in scores.items()
            }
            found.append(rows)
    return found


@pytest.mark.slow("fsdp")
@pytest.mark.sample("one", "fsdp")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_of_an_engine_equal_those_of_a_plain_forward(
    layout: str, released: dict[str, Any], tmp_path: Path
) -> None:
    mesh = LAYOUTS[layout]
    arguments = (released["model"], released["file"], tmp_path, mesh)
    ranks = [_score(*arguments)] if layout == "one" else run_ranks(_score, *arguments, world_size=2)
    num_data = mesh.get("data_parallel_shard", 1)
    for number, group in enumerate(GROUPS):
        for rank in ranks[number % num_data :: num_data]:
            rows = rank[number // num_data]
            for name in ("log_probs", "entropy"):
                for row, index in zip(rows[name], group, strict=True):
                    assert row == pytest.approx(released["plain"][index][name].tolist(), rel=1e-9)


def _infer(model: Path, file: Path, runs: Path, mesh: dict[str, int]) -> str:
    data = image_chats(vision_config(model, file, runs))
    values = {"mesh": mesh, "run": {"folder": runs, "name": "scores"}, "batch_size": 2, "part_size": 4}
    config = InferenceConfig.model_validate(values)
    inference = Inference(config, model=_model(model), data=data.samples, collate=data.collate, task=LabelScores())
    return str(inference.run().file)


@pytest.mark.sample("one", "context")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inference_writes_the_log_probabilities_of_each_sample(
    layout: str, released: dict[str, Any], tmp_path: Path
) -> None:
    arguments = (released["model"], released["file"], tmp_path, LAYOUTS[layout])
    file = _infer(*arguments) if layout == "one" else run_ranks(_infer, *arguments, world_size=2)[0]
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    assert len(lines) == len(CHATS)
    for line, plain in zip(lines, released["plain"], strict=True):
        assert line == pytest.approx(plain["log_probs"].tolist(), rel=1e-9)


def test_inference_writes_null_for_a_skipped_sample(released: dict[str, Any], tmp_path: Path) -> None:
    save_images(tmp_path / "images")
    samples = [CHATS[0], chat([text("q" * 200), image(0)], "a"), CHATS[1]]
    file = write_lines(tmp_path / "chats.jsonl", samples)
    found = _infer(released["model"], file, tmp_path, {})
    lines = [json.loads(line) for line in Path(found).read_text().splitlines()]
    assert lines[1] is None
    for line, number in ((lines[0], 0), (lines[2], 1)):
        assert line == pytest.approx(released["plain"][number]["log_probs"].tolist(), rel=1e-9)
