"""Model FLOPs of the job `vision`, compared with torch's counter in a forward and backward pass of `transformers`."""

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from vision_cases import CHATS, EAGER, FAMILIES, save_chats, save_model, vision_config

from d9d_dist.testing import run_ranks
from d9d_loop.job.flop_formula import FlopFormula
from d9d_loop.job.flop_measurement import measure_flops
from d9d_loop.job.flop_meter import FlopMeter
from d9d_loop.jobs import text_trainer
from d9d_loop.jobs.text_tasks import NextToken
from d9d_loop.jobs.vision_data import image_chats
from d9d_loop.model.built_model import meta_copy
from d9d_loop.task import to_inputs
from d9d_metrics import read_metrics

REHEARSES = True  # see quick_jobs.py

TASK, OF_LABELS = NextToken(), NextToken(label_logits=True)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("released")
    save_chats(root, CHATS)
    return root


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the function that a measurement replaces, as its process would end."""
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", nn.functional.scaled_dot_product_attention)


def _is_of_language_model(name: str) -> bool:
    return "language_model" in name or "text_model" in name or "lm_head" in name


def _freeze(model: nn.Module, is_frozen: Callable[[str], bool]) -> None:
    for name, each in model.named_parameters():
        each.requires_grad_(not is_frozen(name))


def _all(model: nn.Module) -> None:
    """Train everything."""


def _language(model: nn.Module) -> None:
    _freeze(model, lambda name: not _is_of_language_model(name))


def _tower(model: nn.Module) -> None:
    _freeze(model, _is_of_language_model)


def _adapters(model: nn.Module) -> None:
    peft = pytest.importorskip("d9d_peft")
    peft.inject(peft.LoRA(r".*(language_model|text_model).*\.(q_proj|v_proj)", rank=2), model)


TRAINED = {"all": _all, "language": _language, "tower": _tower, "lora": _adapters}


def _model(released: Path, family: str, **options: Any) -> nn.Module:
    transformers: Any = import_module("transformers")
    folder = released / family
    if not folder.is_dir():
        save_model(family, folder)
    auto = transformers.AutoModelForImageTextToText
    return auto.from_pretrained(folder, attn_implementation="eager", **options).train()


def _counted(model: nn.Module, batch: dict[str, Any], task: NextToken = TASK) -> int:
    """Return the FLOPs of forward and backward by torch's counter: attention of all pairs of positions."""
    with FlopCounterMode(display=False) as counter:
        task.loss(model(**task.inputs(batch)), batch).total.backward()
    return counter.get_total_flops()


def _of_all_pairs(formula: FlopFormula, batch: dict[str, Any]) -> float:
    num_rows, length = batch["input_ids"].shape
    pairs = num_rows * length**2 * sum(each.per_pair for each in formula.attention)
    images = 0.0 if formula.images is None else float(formula.images.of(TASK.inputs(batch)))
    return num_rows * length * formula.per_row + pairs + images


@pytest.mark.slow("qwen3_vl_moe-lora", "mistral3-all", "gemma3-tower")
@pytest.mark.sample("qwen3_vl-language", "qwen3_vl_moe-lora", "gemma3-tower", "mistral3-all", "qwen2_5_vl-all")
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("family", FAMILIES)
def test_flops_equal_those_of_torch_for_other_images(family: str, trained: str, released: Path) -> None:
    # Loops over experts read the router's choices, and torch's counter does not count grouped products.
    model, for_meta = _model(released, family, **(EAGER if "moe" in family else {})), _model(released, family)
    TRAINED[trained](model)
    TRAINED[trained](for_meta)
    data = image_chats(vision_config(released / family, released / "chats.jsonl", released))
    # Mistral 3 computes all pairs of patches of all images, which a mask separates, and padding of their pixels.
    groups = ((0,), (4,), (1,), (5,)) if family == "mistral3" else ((0,), (6, 7), (3,), (1, 2), (5,))
    batches = [data.collate([data.samples[index] for index in group]) for group in groups]
    counted = [_counted(model, batch) for batch in batches]
    for measured in (batches[0], batches[-2]):
        formula, _ = measure_flops(meta_copy(for_meta), TASK, measured)
        assert formula.images is not None
        assert FlopFormula.from_json(formula.to_json()) == formula
        for batch, expected in zip(batches, counted, strict=True):
            assert _of_all_pairs(formula, batch) == pytest.approx(expected, rel=1e-12)
            meter = FlopMeter(formula, TASK)
            meter.add(to_inputs(TASK.inputs(batch)), batch)
            lengths = batch["attention_mask"].sum(1).tolist()
            assert float(meter.take()) == pytest.approx(
                formula.of_lengths(lengths) + float(formula.images.of(TASK.inputs(batch)))
            )
    if trained != "tower":  # samples without images
        texts = {name: batches[-1][name][:1] for name in ("input_ids", "attention_mask", "labels")}
        assert _of_all_pairs(formula, texts) == pytest.approx(_counted(model, texts), rel=1e-12)


@pytest.mark.slow("lora")
@pytest.mark.parametrize("trained", ["all", "tower", "lora"])
def test_flops_of_logits_at_labels_equal_those_of_torch(trained: str, released: Path) -> None:
    model, for_meta = _model(released, "qwen2_5_vl"), _model(released, "qwen2_5_vl")
    TRAINED[trained](model)
    TRAINED[trained](for_meta)
    data = image_chats(vision_config(released / "qwen2_5_vl", released / "chats.jsonl", released))
    batches = [data.collate([data.samples[index]]) for index in (0, 4, 3)]
    formula, _ = measure_flops(meta_copy(for_meta), OF_LABELS, batches[0])
    assert FlopFormula.from_json(formula.to_json()) == formula
    assert measure_flops(meta_copy(for_meta), TASK, batches[0])[0].per_label == 0.0
    counted = [_counted(model, batch, OF_LABELS) for batch in batches]
    assert counted[-1] < _counted(model, batches[-1])
    for batch, of_labels in zip(batches, counted, strict=True):
        num_labels = int((batch["labels"] != -100).sum())
        assert num_labels > 0
        num_logits = batch[
            "label_positions"
        ].numel()  # some are of positions without a label, which the job does not count
        assert num_labels <= num_logits < batch["labels"].numel()
        expected = _of_all_pairs(formula, batch) + num_logits * formula.per_label
        assert expected == pytest.approx(of_labels, rel=1e-12)
        meter = FlopMeter(formula, OF_LABELS)
        meter.add(to_inputs(OF_LABELS.inputs(batch)), batch)
        assert formula.images is not None
        images = float(formula.images.of(TASK.inputs(batch)))
        lengths = batch["attention_mask"].sum(1).tolist()
        assert float(meter.take()) == pytest.approx(
            formula.of_lengths(lengths) + images + num_labels * formula.per_label
        )


def test_images_that_were_not_measured_are_not_counted_as_nothing(released: Path) -> None:
    model = _model(released, "qwen2_5_vl")
    data = image_chats(vision_config(released / "qwen2_5_vl", released / "chats.jsonl", released))
    batch = data.collate([data.samples[0]])
    texts = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    texts["input_ids"] = texts["input_ids"].clamp(max=5)
    images = measure_flops(meta_copy(model), TASK, texts)[0].images
    assert images is not None
    assert images.of(texts) == 0.0
    pixels = TASK.inputs(batch)["pixel_values"]
    assert math.isnan(images.of({**batch, "pixel_values": pixels}))
    videos = {**texts, "pixel_values_videos": pixels, "video_grid_thw": batch["image_grid_thw"]}
    assert math.isnan(images.of(videos))
    with pytest.raises(NotImplementedError, match="videos"):
        measure_flops(meta_copy(model), TASK, videos)


@pytest.mark.slow("None-not a sum over the images-group1", "3-in one call-group0")
@pytest.mark.parametrize("group", [(0,), (1, 2)])
@pytest.mark.parametrize(("patch_size", "why"), [(None, "not a sum over the images"), (3, "in one call")])
def test_images_whose_flops_are_no_sum_are_not_counted(
    patch_size: int | None, why: str, group: tuple[int, ...], released: Path
) -> None:
    model = _model(released, "mistral3")
    data = image_chats(vision_config(released / "mistral3", released / "chats.jsonl", released))
    batch = data.collate([data.samples[index] for index in group])
    vision: Any = model.get_submodule("model.vision_tower").config
    vars(vision)["patch_size"] = patch_size  # not that of the layers
    with pytest.raises(NotImplementedError, match=why):
        measure_flops(meta_copy(model), TASK, batch)


def _reported(released: Path, runs: Path, mesh: dict[str, int]) -> list[float]:
    """Return the FLOP/s of the steps of a job, each of which takes two seconds."""
    folder = released / "qwen2_5_vl"
    batch = {"global_size": 2, "microbatch_size": 1}
    config = vision_config(folder, released / "chats.jsonl", runs, mesh=mesh, batch=batch)
    with mock.patch("d9d_loop.job.reports._Clock.lap", return_value=(torch.zeros(()), 2.0)):
        text_trainer(config).train()
    lines = read_metrics(runs / "vision" / "metrics.jsonl")
    return [line["flops_per_second"] for line in lines if "loss" in line]


@pytest.mark.slow("{}")
@pytest.mark.sample("{}", "{'context_parallel_shard': 2}")
@pytest.mark.parametrize(
    "mesh", [{}, {"data_parallel_shard": 2}, {"pipeline_parallel": 2}, {"context_parallel_shard": 2}], ids=str
)
def test_a_job_reports_the_flops_of_its_images(mesh: dict[str, int], released: Path, tmp_path: Path) -> None:
    model, arguments = _model(released, "qwen2_5_vl"), (released, tmp_path, mesh)
    found = run_ranks(_reported, *arguments, world_size=2)[0] if mesh else _reported(*arguments)
    data = image_chats(vision_config(released / "qwen2_5_vl", released / "chats.jsonl", released))
    batches = [data.collate([data.samples[index]]) for index in range(4)]
    formula, _ = measure_flops(meta_copy(model), OF_LABELS, batches[0])
    meter, expected = FlopMeter(formula, OF_LABELS), []
    for step in (batches[:2], batches[2:]):
        for batch in step:
            meter.add(to_inputs(OF_LABELS.inputs(batch)), batch)
        expected.append(float(meter.take()) / 2)
    assert found == pytest.approx(expected, rel=1e-12)
