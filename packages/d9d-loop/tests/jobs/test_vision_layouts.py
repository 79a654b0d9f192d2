"""Vision-language models in layouts, compared with plain loops of `transformers` in float64."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_cases import (
    CHATS,
    EAGER,
    FAMILIES,
    assert_trained,
    losses_of,
    plain_training,
    save_chats,
    save_model,
    vision_config,
    wide_norms,
)

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Trainer, hugging_face_model
from d9d_loop.jobs.text_tasks import NextToken
from d9d_loop.jobs.vision_data import ImageChats, image_chats

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
}


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("released")
    return {"root": root, "file": save_chats(root, CHATS), "plain": {}}


def _plain(released: dict[str, Any], family: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    if family not in released["plain"]:
        model = save_model(family, released["root"] / family)
        released["plain"][family] = plain_training(model, released["file"], CHATS)
    return released["plain"][family]


def _train(model: Path, file: Path, runs: Path, mesh: dict[str, int], num_stages: int = 1) -> None:
    transformers: Any = import_module("transformers")

    options: dict[str, Any] = {"dtype": torch.float64}
    options |= EAGER if "moe" in model.name else {}
    stages = {"schedule": {"kind": "interleaved_1f1b", "stages_per_rank": num_stages}}
    config = vision_config(model, file, runs, mesh=mesh, **({"pipeline": stages} if num_stages > 1 else {}))
    built = hugging_face_model(model, transformers.AutoModelForImageTextToText, **options)
    with wide_norms():
        Trainer(config, model=built, data=image_chats(config, print), task=NextToken(counts_skipped=True)).train()


@pytest.mark.sample(
    "one-qwen2_5_vl", "one-gemma3", "one-idefics3", "one-llava_onevision", "fsdp-qwen2_5_vl", "stages-gemma3"
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_and_parameters_equal_those_of_a_plain_loop(
    mesh: str, family: str, released: dict[str, Any], tmp_path: Path
) -> None:
    losses, parameters = _plain(released, family)
    degrees = MESHES[mesh]
    size = 1
    for degree in degrees.values():
        size *= degree
    arguments = (released["root"] / family, released["file"], tmp_path, degrees)
    if size == 1:
        _train(*arguments, num_stages=2 if mesh == "stages" else 1)
    else:
        run_ranks(_train, *arguments, world_size=size)
    assert_trained(tmp_path / "vision", losses, parameters)


def test_features_of_images_that_enter_blocks_of_a_later_stage_are_an_error() -> None:
    _, model = FAMILIES["qwen3_vl"]()
    config = model.config
    config.vision_config.deepstack_visual_indexes = [0, 1]
    built = hugging_face_model(config, type(model))
    with pytest.raises(UserError, match=r"layers\.1: features of images are added behind the first 2 blocks"):
        built.build(StageInfo(0, 2))


def test_images_in_another_order_would_be_found(
    released: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, _ = _plain(released, "gemma3")
    read = ImageChats.__getitem__

    def reversed_images(chats: ImageChats, index: int) -> Any:
        rows: Any = read(chats, index)
        return [replace(row, images=row.images[::-1]) for row in rows]

    monkeypatch.setattr(ImageChats, "__getitem__", reversed_images)
    _train(released["root"] / "gemma3", released["file"], tmp_path, {})
    assert losses_of(tmp_path / "vision") != pytest.approx(losses, rel=1e-6)
