"""Vision-language models in layouts, compared with plain loops of `transformers` in float64."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vision_cases import (
    CHATS,
    EAGER,
    FAMILIES,
    _qwen3,
    assert_trained,
    chat,
    image,
    plain_inputs,
    plain_training,
    save_chats,
    save_model,
    text,
    vision_config,
    wide_norms,
)

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Trainer, hugging_face_model
from d9d_loop.jobs.text_tasks import POSITIONS, NextToken
from d9d_loop.jobs.vision_collator import ImageCollator
from d9d_loop.jobs.vision_data import image_chats
from d9d_loop.model._context_trace import trace_context
from d9d_loop.model._hugging_face_context import _Parts, _RowsForward
from d9d_metrics import read_metrics

MESHES: dict[str, dict[str, int]] = {
    "one": {},
    "stages": {},
    "replicas": {"data_parallel_replicate": 2},
    "fsdp": {"data_parallel_shard": 2},
    "tensor": {"tensor_parallel": 2},
    "hsdp": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    "pipeline": {"pipeline_parallel": 2},
    "pipeline x fsdp": {"pipeline_parallel": 2, "data_parallel_shard": 2},
    "pipeline x tensor": {"pipeline_parallel": 2, "tensor_parallel": 2},
    "fsdp x tensor": {"data_parallel_shard": 2, "tensor_parallel": 2},
    "context": {"context_parallel_shard": 2},
    "context replicas": {"context_parallel_replicate": 2},
    "context x fsdp": {"context_parallel_shard": 2, "data_parallel_shard": 2},
    "context x tensor": {"context_parallel_shard": 2, "tensor_parallel": 2},
    "context x pipeline": {"context_parallel_shard": 2, "pipeline_parallel": 2},
}
EXPERTS: dict[str, dict[str, int]] = {
    "fsdp": {"data_parallel_shard": 2},
    "replicas x fsdp": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    "tensor": {"tensor_parallel": 2},
    "context": {"context_parallel_shard": 2},
    "context x fsdp": {"context_parallel_shard": 2, "data_parallel_shard": 2},
    "pipeline x fsdp": {"pipeline_parallel": 2, "data_parallel_shard": 2},
    "pipeline x tensor": {"pipeline_parallel": 2, "tensor_parallel": 2},
    "context x pipeline": {"context_parallel_shard": 2, "pipeline_parallel": 2},
}
"""Meshes whose experts are sharded over two ranks."""


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("released")
    return {"root": root, "file": save_chats(root, CHATS), "plain": {}}


def _plain(released: dict[str, Any], family: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    if family not in released["plain"]:
        model = save_model(family, released["root"] / family)
        released["plain"][family] = plain_training(model, released["file"], CHATS)
    return released["plain"][family]


def _train(model: Path, file: Path, runs: Path, mesh: dict[str, int], more: Any = None) -> None:
    transformers: Any = import_module("transformers")

    options: dict[str, Any] = {"dtype": torch.float64}
    options |= EAGER if "moe" in model.name else {}
    config = vision_config(model, file, runs, mesh=mesh, **(more or {}))
    built, task = (
        hugging_face_model(model, transformers.AutoModelForImageTextToText, **options),
        NextToken(counts_skipped=True, label_logits="gemma3" not in model.name),
    )
    with wide_norms():
        Trainer(config, model=built, data=image_chats(config, print), task=task).train()


@pytest.mark.slow("context-qwen3_vl", "stages-gemma3")
@pytest.mark.sample(
    "one-idefics3",
    "one-llava_onevision",
    "fsdp-qwen2_5_vl",
    "stages-gemma3",
    "context-qwen3_vl",
    "context-gemma3",
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_and_parameters_equal_those_of_a_plain_loop(
    mesh: str, family: str, released: dict[str, Any], tmp_path: Path
) -> None:
    losses, parameters = _plain(released, family)
    degrees = MESHES[mesh]
    arguments = (released["root"] / family, released["file"], tmp_path, degrees)
    if (size := prod(degrees.values())) == 1:
        stages = {"pipeline": {"schedule": {"kind": "interleaved_1f1b", "stages_per_rank": 2}}}
        _train(*arguments, stages if mesh == "stages" else None)
    else:
        run_ranks(_train, *arguments, world_size=size)
    assert_trained(tmp_path / "vision", losses, parameters, family=family)


@pytest.mark.sample("fsdp-qwen3_vl_moe")
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "glm4v_moe"])
@pytest.mark.parametrize("mesh", EXPERTS)
def test_losses_and_parameters_of_sharded_experts_equal_those_of_a_plain_loop(
    mesh: str, family: str, released: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("d9d_moe")
    losses, parameters = _plain(released, family)
    degrees = {**EXPERTS[mesh], "expert_parallel": 2}
    arguments = (released["root"] / family, released["file"], tmp_path, degrees)
    run_ranks(_train, *arguments, world_size=prod(EXPERTS[mesh].values()))
    assert_trained(tmp_path / "vision", losses, parameters, family=family)


def _rotary(**more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
    return {"text_config": {"rope_parameters": rope, **more}}


@pytest.mark.sample("idefics3")
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_released_sizes_are_split(family: str) -> None:
    """Trace the forward on `meta`. The default configurations of `transformers` have the sizes of released models."""
    transformers: Any = import_module("transformers")
    changes = {"glm4v": _rotary(), "glm4v_moe": _rotary(head_dim=128)}.get(family, {})
    config = transformers.AutoConfig.for_model(family, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    found = trace_context(model)
    assert found.whole == {}
    assert len(found.attention) == len(found.splits) == config.get_text_config().num_hidden_layers


@pytest.fixture(scope="module")
def deep(released: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Model of four blocks: features of images are added behind the first three; and its plain loop."""
    folder = tmp_path_factory.mktemp("deep") / "qwen3_vl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "deep", partial(_qwen3, num_features=3, num_hidden_layers=4))
        save_model("deep", folder)
    return folder, plain_training(folder, released["file"], CHATS, sizes=(4,))


@pytest.mark.sample("interleaved_1f1b")
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("1f1b", {}),
        ("1f1b", {"data_parallel_shard": 2}),
        ("1f1b", {"tensor_parallel": 2}),
        ("1f1b", {"context_parallel_shard": 2}),
        ("interleaved_1f1b", {}),
        ("zb1p", {}),
        ("zbv", {}),
        ("dualpipev", {}),
    ],
    ids=["1f1b", "fsdp", "tensor", "context", "interleaved_1f1b", "zb1p", "zbv", "dualpipev"],
)
def test_features_of_images_enter_blocks_of_later_stages(
    kind: str, mesh: dict[str, int], deep: tuple[Path, Any], released: dict[str, Any], tmp_path: Path
) -> None:
    folder, plain = deep
    schedule = {"kind": kind, **({"stages_per_rank": 2} if kind.startswith("interleaved") else {})}
    degrees = {"pipeline_parallel": 2, **mesh}
    options = {"pipeline": {"schedule": schedule}, "steps": 1}
    arguments = (folder, released["file"], tmp_path, degrees, options)
    run_ranks(_train, *arguments, world_size=prod(degrees.values()))
    assert_trained(tmp_path / "vision", *plain)


def test_features_of_images_before_chosen_blocks_are_an_error_in_a_pipeline() -> None:
    _, model = FAMILIES["qwen3_vl"]()
    config = model.config
    config.deepstack_layer_map = [(0, 1)]
    built = hugging_face_model(config, type(model))
    with pytest.raises(UserError, match=r"layers\.1: features of images are added before blocks"):
        built.build(StageInfo(0, 2))


def test_pixels_of_the_size_of_a_part_are_no_tokens(released: dict[str, Any], tmp_path: Path) -> None:
    """A patch of the family has 96 values, and each of two ranks 96 tokens of the row.

    Both ranks read the skipped sample.
    """
    transformers: Any = import_module("transformers")
    _plain(released, family := "qwen2_5_vl")
    model = released["root"] / family
    processor, short = transformers.AutoProcessor.from_pretrained(model), chat([image(0), text("")], "a cat")
    num_added = 192 - plain_inputs(processor, short, released["root"])[0]["input_ids"].shape[1]
    assert num_added > 0
    chats = [chat([image(0), text(num_added * "x")], "a cat"), chat(500 * "x", "y")]
    file = save_chats(tmp_path, chats)
    losses, parameters = plain_training(model, file, chats[:1], sizes=(1,))
    data = {"files": [file], "length": 193, "too_long": "drop"}
    options = {"dataset": data, "batch": {"global_size": 2, "microbatch_size": 1}, "steps": 1}
    run_ranks(_train, model, file, tmp_path, {"context_parallel_shard": 2}, options, world_size=2)
    assert_trained(tmp_path / "vision", losses, parameters)
    records = read_metrics(tmp_path / "vision" / "metrics.jsonl")
    assert [each["skipped_samples"] for each in records if "skipped_samples" in each] == [1]


def test_images_of_other_families_are_an_error_on_context_parallel_ranks(
    released: dict[str, Any], tmp_path: Path
) -> None:
    transformers: Any = import_module("transformers")
    _plain(released, "qwen2_5_vl")
    transformers.PaliGemmaConfig().save_pretrained(tmp_path / "model")
    config = vision_config(tmp_path / "model", released["file"], tmp_path, mesh={"context_parallel_replicate": 2})
    with pytest.raises(UserError, match=r"mesh\.context_parallel_replicate is set, but .*model is a paligemma"):
        image_chats(config)
    kind: Any = import_module("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    model = kind.Qwen2_5_VLForConditionalGeneration(
        transformers.AutoConfig.from_pretrained(released["root"] / "qwen2_5_vl")
    )
    model.config.model_type = "another"
    forward: Any = _RowsForward(model, None, None)  # ty: ignore[invalid-argument-type]
    with pytest.raises(UserError, match="got image_grid_thw for Qwen2_5_VLForConditionalGeneration on several context"):
        forward(input_ids=torch.zeros(1, 4), image_grid_thw=torch.ones(1, 3))


def test_positions_of_logits_as_many_as_a_part_has_tokens_are_not_joined() -> None:
    _, model = FAMILIES["qwen2_5_vl"]()
    model.forward = lambda **inputs: inputs
    split: Any = SimpleNamespace(
        mesh=SimpleNamespace(size=lambda: 2), join=lambda value, dim, gradient: value.repeat(1, 2)
    )
    forward = _RowsForward(model, split, _Parts(split))
    found = forward(input_ids=torch.zeros(1, 4), logits_to_keep=torch.arange(4)[None])
    assert found["input_ids"].shape == (1, 8)
    assert found["logits_to_keep"].tolist() == [[0, 1, 2, 3]]


@contextmanager
def _mutant(name: str) -> Generator[None]:
    """Apply a bug of the tower, of its features, or of the batch on a rank."""
    kind: Any = import_module("transformers.models.qwen3_vl.modeling_qwen3_vl").Qwen3VLModel
    find, collate, split = kind.get_image_features, ImageCollator.__call__, _Parts.split_features

    def features(*args: Any, **options: Any) -> Any:
        found = find(*args, **options)
        parts, rank = found.pooler_output, torch.distributed.get_rank()
        changed = {
            "features in another order": parts[::-1],
            "a rank skips the tower": [each * (rank == 0) for each in parts],
            "a gradient is summed twice": [2 * each - each.detach() for each in parts],
            "a rank has no gradient": [each * (rank == 0) + each.detach() * (rank != 0) for each in parts],
        }
        found.pooler_output = changed.get(name, parts)
        return found

    def batches(*args: Any) -> Any:
        batch: Any = collate(*args)
        following = batch["input_ids"].roll(-1, 1)
        if name == "image tokens in the loss":
            return {**batch, "labels": following.where(batch["mm_token_type_ids"].roll(-1, 1) == 1, batch["labels"])}
        if name == "a label has no logits":
            return {**batch, POSITIONS: batch[POSITIONS][..., 1:]}
        return {**batch, "pixel_values": 2 * batch["pixel_values"] - 1} if name == "normalized twice" else batch

    def splits(*args: Any) -> Any:
        found = split(*args)
        if name == "features of another token enter later" and (deep := found[1].get("deepstack_visual_embeds")):
            found[1]["deepstack_visual_embeds"] = [each.roll(1, 0) for each in deep]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "get_image_features", features)
        patch.setattr(ImageCollator, "__call__", batches)
        patch.setattr(_Parts, "split_features", splits)
        if name == "positions of other tokens":
            rope = kind.get_rope_index
            patch.setattr(kind, "get_rope_index", lambda *args, **kw: (rope(*args, **kw)[0].roll(1, -1), None))
        yield


def _train_mutant(name: str, *arguments: Any) -> None:
    with _mutant(name):
        _train(*arguments)


@pytest.mark.slow("a gradient is summed twice")
@pytest.mark.sample("a gradient is summed twice")
@pytest.mark.parametrize(
    "name",
    [
        *("features in another order", "a rank skips the tower", "a gradient is summed twice"),
        *("a rank has no gradient", "image tokens in the loss", "normalized twice", "positions of other tokens"),
        *("features of another token enter later", "a label has no logits"),
    ],
)
def test_a_mutant_is_found(name: str, released: dict[str, Any], tmp_path: Path) -> None:
    plain, mesh = _plain(released, "qwen3_vl"), {"context_parallel_shard": 2}
    run_ranks(_train_mutant, name, released["root"] / "qwen3_vl", released["file"], tmp_path, mesh, world_size=2)
    with pytest.raises(AssertionError):
        assert_trained(tmp_path / "vision", *plain)
