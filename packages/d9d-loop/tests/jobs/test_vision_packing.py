"""Packed conversations with images, compared with plain loops of `transformers` in float64, one sample at a time."""

import os
from collections.abc import Callable
from importlib import import_module
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from text_job_cases import write_lines
from vision_cases import (
    CHATS,
    EAGER,
    FAMILIES,
    assert_trained,
    chat,
    image,
    losses_of,
    plain_training,
    save_chats,
    save_images,
    save_model,
    text,
    vision_config,
    wide_norms,
)

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Trainer, hugging_face_model
from d9d_loop.data.image_chat import decode_image, image_size
from d9d_loop.jobs import TextJobConfig, image_chats, text_trainer, vision_packing
from d9d_loop.jobs.text_tasks import NextToken
from d9d_loop.jobs.vision_data import packed_image_chats
from d9d_loop.jobs.vision_packing import RowPacker
from d9d_metrics import read_metrics

MESHES: dict[str, dict[str, int]] = {
    "one": {},
    "replicas": {"data_parallel_replicate": 2},
    "pipeline": {"pipeline_parallel": 2},
    "fsdp x tensor": {"data_parallel_shard": 2, "tensor_parallel": 2},
    "context": {"context_parallel_shard": 2},
    "context x fsdp": {"context_parallel_shard": 2, "data_parallel_shard": 2},
}
EXPERTS: dict[str, dict[str, int]] = {
    "fsdp": {"data_parallel_shard": 2},
    "pipeline x fsdp": {"pipeline_parallel": 2, "data_parallel_shard": 2},
    "pipeline x tensor": {"pipeline_parallel": 2, "tensor_parallel": 2},
    "context x pipeline": {"context_parallel_shard": 2, "pipeline_parallel": 2},
}
"""Meshes whose experts are sharded over two ranks."""
LENGTHS = {"gemma3": 110}
"""Row lengths that give three or four rows of the chats: two steps."""


def _config(model: Path, file: Path, runs: Path, **more: Any) -> Any:
    data: dict[str, Any] = {"length": LENGTHS.get(model.name, 160), "packing": True, **more.pop("dataset", {})}
    options: dict[str, Any] = {"steps": None, "epochs": 1, "batch": {"global_size": 2, "microbatch_size": 1}, **more}
    return vision_config(model, file, runs, dataset={"files": [file], **data}, **options)


def _rows(config: Any) -> list[tuple[int, ...]]:
    return packed_image_chats(config).training(seed=config.seed).cursor().take(100)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("released")
    return {"root": root, "file": save_chats(root, CHATS), "plain": {}}


def _plain(released: dict[str, Any], family: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and parameters of a loop over the samples of the first two rows, and of the others."""
    if family not in released["plain"]:
        model = save_model(family, released["root"] / family)
        rows = _rows(_config(model, released["file"], released["root"] / "rows"))
        assert len(rows) in (3, 4)
        assert sorted(chain.from_iterable(rows)) == list(range(8))
        chats, first = [CHATS[index] for row in rows for index in row], sum(map(len, rows[:2]))
        released["plain"][family] = plain_training(model, released["file"], chats, sizes=(first, 8 - first))
    return released["plain"][family]


def _train(model: Path, file: Path, runs: Path, mesh: dict[str, int]) -> None:
    transformers: Any = import_module("transformers")

    options: dict[str, Any] = {"dtype": torch.float64, **(EAGER if "moe" in model.name else {})}
    config = _config(model, file, runs, mesh=mesh)
    built, task = (
        hugging_face_model(model, transformers.AutoModelForImageTextToText, **options),
        NextToken(counts_skipped=True, label_logits="gemma3" not in model.name),
    )
    with wide_norms():
        Trainer(config, model=built, data=packed_image_chats(config), task=task).train()


@pytest.mark.sample("one-qwen2_5_vl", "replicas-gemma3", "pipeline-qwen2_5_vl")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_and_parameters_equal_those_of_one_sample_at_a_time(
    mesh: str, family: str, released: dict[str, Any], tmp_path: Path
) -> None:
    """One row has no image, and in the last step one of two ranks may have no row."""
    losses, parameters = _plain(released, family)
    arguments = (released["root"] / family, released["file"], tmp_path, MESHES[mesh])
    if mesh == "one":
        _train(*arguments)
    else:
        run_ranks(_train, *arguments, world_size=prod(MESHES[mesh].values()))
    assert_trained(tmp_path / "vision", losses, parameters, family=family)


@pytest.mark.slow("pipeline x fsdp-qwen3_vl_moe")
@pytest.mark.sample("pipeline x fsdp-qwen3_vl_moe")
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "glm4v_moe"])
@pytest.mark.parametrize("mesh", EXPERTS)
def test_losses_and_parameters_of_sharded_experts_equal_those_of_one_sample_at_a_time(
    mesh: str, family: str, released: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("d9d_moe")
    losses, parameters = _plain(released, family)
    degrees = {**EXPERTS[mesh], "expert_parallel": 2}
    arguments = (released["root"] / family, released["file"], tmp_path, degrees)
    run_ranks(_train, *arguments, world_size=prod(EXPERTS[mesh].values()))
    assert_trained(tmp_path / "vision", losses, parameters, family=family)


def _of_another_sample(found: torch.Tensor) -> torch.Tensor:
    return found.roll(1, dims=1)


def _without_start(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    length = batch["position_ids"].shape[-1]
    batch["position_ids"][0] = torch.arange(length)
    return batch


def _with_turned_images(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    parts = batch["image_bytes"].split(batch["image_grid_thw"].prod(1).tolist())
    return {**batch, "image_bytes": torch.cat(parts[::-1]), "image_grid_thw": batch["image_grid_thw"].flip(0)}


@pytest.mark.sample("mask")
@pytest.mark.parametrize("mutant", ["positions", "mask", "features"])
def test_wrong_rows_would_be_found(
    mutant: str, released: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, _ = _plain(released, "qwen2_5_vl")
    if mutant == "positions":
        rope = vision_packing._rope_index
        monkeypatch.setattr(vision_packing, "_rope_index", lambda *args: _of_another_sample(rope(*args)))
    else:
        change = _without_start if mutant == "mask" else _with_turned_images
        pack: Callable[..., Any] = RowPacker.__call__
        monkeypatch.setattr(RowPacker, "__call__", lambda *args: change(pack(*args)))
    _train(released["root"] / "qwen2_5_vl", released["file"], tmp_path, {})
    assert losses_of(tmp_path / "vision") != pytest.approx(losses, rel=1e-6)


@pytest.mark.sample("gemma3")
@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_are_those_of_batches(family: str, released: dict[str, Any], tmp_path: Path) -> None:
    """Newlines at placeholders join with what replaces them. A file stores one image turned by 90 degrees."""
    pillow = import_module("PIL.Image")
    folder, paths = save_model(family, tmp_path / family), save_images(tmp_path / "images")
    turned = pillow.open(paths[2])
    turned.getexif()[0x0112] = 6
    turned.save(tmp_path / "images" / "turned.jpg", exif=turned.getexif())
    words = ["", "\n", "\n\n", "a\n", "<"]
    samples = [
        chat([text(before), image(number % len(paths)), text(after)], "yes\n")
        for number, (before, after) in enumerate(product(words, words))
    ]
    samples += [chat([{"type": "image", "image": "images/turned.jpg"}, text("?")], "b"), *CHATS]
    file = write_lines(tmp_path / "chats.jsonl", samples)
    single = image_chats(vision_config(folder, file, tmp_path, dataset={"files": [file], "length": 400}))
    batch = single.collate([single.samples[index] for index in range(len(samples))])
    expected = batch["attention_mask"].sum(1).tolist()
    lengths, *_ = packed_image_chats(_config(folder, file, tmp_path, dataset={"length": 400})).lengths
    assert lengths == expected


def test_a_stream_of_rows_resumes_at_every_position(released: dict[str, Any], tmp_path: Path) -> None:
    _plain(released, "qwen2_5_vl")
    config = _config(released["root"] / "qwen2_5_vl", released["file"], tmp_path, epochs=3, data={"shuffle": True})
    stream = packed_image_chats(config).training(seed=3)
    cursor, states, rows = stream.cursor(), list[Any](), list[Any]()
    while True:
        states.append(cursor.state_dict())
        if not (entries := cursor.take(1)):
            break
        rows += entries
    assert sorted(chain.from_iterable(rows)) == sorted(3 * list(range(8)))
    for number, state in enumerate(states):
        rest = packed_image_chats(config).training(seed=3).cursor(state)
        assert list(chain.from_iterable(rest.take(1) for _ in rows[number:])) == rows[number:]


def test_samples_that_do_not_fit_are_skipped_or_cut_as_in_batches(released: dict[str, Any], tmp_path: Path) -> None:
    _plain(released, "qwen2_5_vl")
    save_images(tmp_path / "images")
    samples = [
        chat([image(0), text("q")], "a"),  # fits
        chat([image(0), text("q")], "a" * 60),  # its answer is cut
        chat([text("q" * 30), image(0)], "a"),  # its image does not fit
        chat([image(0), text("q" * 60)], "a"),  # its label does not fit
        chat("q", "a"),
    ]
    file = write_lines(tmp_path / "chats.jsonl", samples)
    model, notes = released["root"] / "qwen2_5_vl", list[str]()
    config = _config(model, file, tmp_path, dataset={"length": 32})
    data = packed_image_chats(config, notes.append)
    assert notes == ["of 5 conversations, 2 are skipped, see dataset.too_long and dataset.broken_images."]
    stream = data.training(seed=0)
    rows = stream.cursor().take(5)
    batch = data.collate([stream.read(row) for row in rows])
    assert batch["input_ids"].shape == (2, 32)
    assert batch["num_skipped"] == 0
    assert "attention_mask" not in batch
    lines = write_lines(tmp_path / "none.jsonl", samples[2:4])
    with pytest.raises(UserError, match=r"all 2 training samples are skipped, .*dataset\.length = 32"):
        packed_image_chats(_config(model, lines, tmp_path, dataset={"length": 32}))
    held_out = {"length": 32, "evaluation_files": [lines]}
    with pytest.raises(UserError, match="all 2 held-out samples are skipped"):
        packed_image_chats(_config(model, file, tmp_path, dataset=held_out))
    refuse = _config(model, file, tmp_path, dataset={"length": 32, "too_long": "refuse"})
    with pytest.raises(UserError, match=r"chats\.jsonl, line 2: the sample has \d+ tokens; .*dataset\.length = 32"):
        packed_image_chats(refuse)


def test_a_broken_image_is_named_before_the_start_or_skipped(released: dict[str, Any], tmp_path: Path) -> None:
    _plain(released, "qwen2_5_vl")
    paths, model = save_images(tmp_path / "images"), released["root"] / "qwen2_5_vl"
    file = write_lines(tmp_path / "chats.jsonl", CHATS)
    whole = paths[4].read_bytes()
    paths[3].write_bytes(b"no image")  # of the fourth chat
    paths[4].write_bytes(whole[: len(whole) // 2])  # of the fourth and the fifth: its header is whole
    with pytest.raises(UserError, match=r"chats\.jsonl, line 4: the image .*3\.png cannot be decoded"):
        text_trainer(_config(model, file, tmp_path))
    notes: list[str] = []
    data = packed_image_chats(_config(model, file, tmp_path, dataset={"broken_images": "drop"}), notes.append)
    assert notes == ["of 8 conversations, 1 are skipped, see dataset.too_long and dataset.broken_images."]
    stream = data.training(seed=0)
    rows = stream.cursor().take(8)
    assert data.collate([stream.read(row) for row in rows])["num_skipped"] == 1


def test_lengths_are_measured_again_if_an_image_changes(released: dict[str, Any], tmp_path: Path) -> None:
    _plain(released, "qwen2_5_vl")
    paths = save_images(tmp_path / "images")
    file = write_lines(tmp_path / "chats.jsonl", [chat([image(0), text("?")], "b")])
    config = _config(released["root"] / "qwen2_5_vl", file, tmp_path)
    (before,) = packed_image_chats(config).lengths[0]
    paths[2].replace(paths[0])
    os.utime(paths[0], ns=(1, 1))
    (after,) = packed_image_chats(config).lengths[0]
    assert after > before


def test_other_lengths_are_other_data(released: dict[str, Any], tmp_path: Path) -> None:
    """A resume would read other rows, for example after a change of the processor's files."""
    _plain(released, "gemma3")
    config = _config(released["root"] / "gemma3", released["file"], tmp_path)
    data = packed_image_chats(config)
    identity = data.training(seed=0).identity()
    assert packed_image_chats(config).training(seed=0).identity() == identity
    data.lengths[0][2] -= 1
    assert data.training(seed=0).identity() != identity


def test_an_attention_that_does_not_separate_samples_is_an_error(released: dict[str, Any], tmp_path: Path) -> None:
    _plain(released, "gemma3")
    folder = released["root"] / "gemma3"
    values = _config(folder, released["file"], tmp_path).model_dump(exclude_unset=True)
    values["model"]["attn_implementation"] = "flash_attention_2"
    with pytest.raises(UserError, match=r"has the attention flash_attention_2, .*; expected sdpa or eager"):
        packed_image_chats(TextJobConfig.model_validate(values))


def test_a_row_without_images_gets_a_small_one_at_its_end(released: dict[str, Any], tmp_path: Path) -> None:
    _plain(released, "qwen2_5_vl")
    data = packed_image_chats(_config(released["root"] / "qwen2_5_vl", released["file"], tmp_path))
    stream = data.training(seed=0)
    batch = data.collate([stream.read((1, 5))])
    assert batch["input_ids"].shape[0] == len(batch["image_grid_thw"]) == 1
    first = (batch["input_ids"][0] == 262).nonzero()[0]
    assert first > 25 + 55
    assert (batch["labels"][0, first:] == -100).all()


def test_a_model_whose_samples_would_change_each_other_is_an_error(released: dict[str, Any], tmp_path: Path) -> None:
    transformers: Any = import_module("transformers")
    _plain(released, "qwen2_5_vl")
    (tmp_path / "model").mkdir()
    transformers.PaliGemmaConfig().save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"packing is set, but .*model is a paligemma, for .*expected gemma3"):
        RowPacker.of(_config(tmp_path / "model", released["file"], tmp_path))
    with pytest.raises(UserError, match=r"image_chats: got dataset\.packing = true; expected false"):
        image_chats(_config(released["root"] / "qwen2_5_vl", released["file"], tmp_path))


@pytest.mark.slow
def test_a_job_evaluates_packed_rows_in_workers(released: dict[str, Any], tmp_path: Path) -> None:
    _plain(released, "qwen2_5_vl")
    model, options = released["root"] / "qwen2_5_vl", {"dataset": {"evaluation_files": [released["file"]]}}
    text_trainer(_config(model, released["file"], tmp_path, data={"num_workers": 1}, **options)).train()
    single = vision_config(
        tmp_path / "vision" / "export",
        released["file"],
        tmp_path / "single",
        dataset={"files": [released["file"]], "length": 160, "evaluation_files": [released["file"]]},
        optimizer={"kind": "sgd", "learning_rate": 1e-30, "momentum": 0.0, "weight_decay": 0.0},
    )
    text_trainer(single).train()
    (found,), (expected,) = (
        [each["evaluation_loss"] for each in read_metrics(run / "metrics.jsonl") if "evaluation_loss" in each]
        for run in (tmp_path / "vision", tmp_path / "single" / "vision")
    )
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_size_of_an_image_is_that_of_its_pixels(tmp_path: Path) -> None:
    pillow = import_module("PIL.Image")
    for kind, orientation in product(("jpg", "png", "webp", "tiff"), (1, 3, 6)):
        found = pillow.new("RGB", (30, 20))
        found.getexif()[0x0112] = orientation
        found.save(tmp_path / f"image.{kind}", exif=found.getexif())
        assert image_size(f"image.{kind}", tmp_path) == decode_image(f"image.{kind}", tmp_path).size
