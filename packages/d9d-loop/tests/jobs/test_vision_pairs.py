"""Jobs `dpo` on pairs with images, compared with plain loops of `transformers` in float64, and with TRL."""

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from text_job_cases import write_lines
from torch.nn import functional as F
from vision_cases import assert_trained, image, plain_inputs, save_images, save_model, text, vision_config, wide_norms

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Trainer, hugging_face_model
from d9d_loop.jobs import TextJobConfig, image_chats, text_trainer
from d9d_loop.jobs.text_tasks import Prefer
from d9d_loop.jobs.vision_data import for_images
from d9d_loop.losses import PreferenceLoss
from d9d_metrics import read_metrics

pytestmark = pytest.mark.usefixtures("trl_without_wandb")

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "replicas": {"data_parallel_replicate": 2},
    "fsdp": {"data_parallel_shard": 2},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
    "context": {"context_parallel_shard": 2},
}


def _pair(prompt: list[Any], chosen: str, rejected: str, **more: Any) -> dict[str, Any]:
    """Return a sample as TRL reads it: `prompt` has the contents of the turns of the user and the assistant."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": each} for n, each in enumerate(prompt)]
    answers = {
        key: [{"role": "assistant", "content": [text(each)]}]
        for key, each in (("chosen", chosen), ("rejected", rejected))
    }
    return {"prompt": turns, **answers, **more}


PLACE = {"type": "image"}
PAIRS = [
    _pair([[PLACE, text("what?")]], "a cat", "a dog, or no dog", images=["images/0.png"]),
    _pair([[text("no image")]], "none", "never", images=[]),
    _pair([[PLACE, PLACE, text("both?")]], "two of them", "one", images=["images/1.png", "images/2.png"]),
    _pair([[PLACE, text("a")], [text("b")], [text("and?")]], "yes\n\n", "no", images=["images/3.png"]),
    _pair([[text("only text")]], "an answer that is longer than the others", "short", images=[]),
    _pair([[text("hello")]], "hello", "bye", images=[]),
    _pair([[text("left "), PLACE, text(" right")]], "the left one", "the right one", images=["images/4.png"]),
    _pair([[PLACE, text("ok?")]], "fine", "bad", images=["images/1.png"]),
]
"""Eight pairs. The first of the second four, and the second, have no image."""


def _config(model: Path, file: Path, runs: Path, **more: Any) -> TextJobConfig:
    return vision_config(model, file, runs, **{"job": "dpo", **more})


def _rows(pair: dict[str, Any], processor: Any, folder: Path) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Return the inputs and the labels, which are not shifted, of both answers, by `transformers` alone."""
    found = []
    for key in ("chosen", "rejected"):
        rest = iter(pair.get("images", []))
        turns = [
            {**turn, "content": [{**part, "image": next(rest)} if part == PLACE else part for part in turn["content"]]}
            for turn in [*pair["prompt"], *pair[key]]
        ]
        inputs, labels = plain_inputs(processor, {"messages": turns}, folder)
        start = processor.tokenizer.convert_tokens_to_ids("<|assistant|>")
        last = max(n for n, token in enumerate(inputs["input_ids"][0].tolist()) if token == start)
        found.append((inputs, labels.where(torch.arange(labels.shape[1]) > last, -100)))
    return found


def _score(model: Any, inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
    logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
    return -F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")


@wide_norms()
def _plain(model: Path, folder: Path) -> dict[str, Any]:
    """Return the losses, margins and parameters of two steps of four pairs."""
    transformers: Any = import_module("transformers")
    processor = transformers.AutoProcessor.from_pretrained(model)
    policy: Any = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float64).train()
    reference = copy.deepcopy(policy).eval()
    found: dict[str, Any] = {"loss": [], "reward_margin": []}
    for step in range(2):
        losses, margins = [], []
        for pair in PAIRS[4 * step : 4 * step + 4]:
            rows = _rows(pair, processor, folder)
            with torch.no_grad():
                chosen, rejected = (_score(reference, *row) for row in rows)
            margin = 0.1 * (_score(policy, *rows[0]) - chosen - (_score(policy, *rows[1]) - rejected))
            loss = -F.logsigmoid(margin)
            loss.backward()
            losses.append(loss.item())
            margins.append(margin.item())
        with torch.no_grad():
            for each in policy.parameters():
                if each.grad is not None:
                    each.sub_(each.grad, alpha=0.5 / 4)
                each.grad = None
        found["loss"].append(sum(losses) / 4)
        found["reward_margin"].append(sum(margins) / 4)
    return {**found, "parameters": {name: each.detach() for name, each in policy.state_dict().items()}}


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("released")
    save_images(root / "images")
    return {"root": root, "file": write_lines(root / "pairs.jsonl", PAIRS), "plain": {}}


def _released(released: dict[str, Any], family: str) -> tuple[Path, dict[str, Any]]:
    if family not in released["plain"]:
        model = save_model(family, released["root"] / family)
        released["plain"][family] = _plain(model, released["root"])
    return released["root"] / family, released["plain"][family]


def _train(config: TextJobConfig) -> None:
    transformers: Any = import_module("transformers")
    model = hugging_face_model(config.model.folder, transformers.AutoModelForImageTextToText, dtype=torch.float64)
    data = image_chats(for_images(config), print, pairs=True)
    task = Prefer(PreferenceLoss(), has_reference=True, counts_skipped=True, label_logits=True)
    with wide_norms():
        Trainer(config, model=model, data=data, task=task, reference="initial").train()


def _values(run: Path, key: str) -> list[float]:
    return [each[key] for each in read_metrics(run / "metrics.jsonl") if key in each]


@pytest.mark.slow("fsdp-qwen2_5_vl")
@pytest.mark.sample("one-qwen2_5_vl", "fsdp-qwen2_5_vl")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "idefics3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_margins_and_parameters_equal_those_of_a_plain_loop(
    layout: str, family: str, released: dict[str, Any], tmp_path: Path
) -> None:
    model, plain = _released(released, family)
    config = _config(model, released["file"], tmp_path, mesh=LAYOUTS[layout])
    if layout == "one":
        _train(config)
    else:
        run_ranks(_train, config, world_size=2)
    run = tmp_path / "vision"
    assert _values(run, "reward_margin") == pytest.approx(plain["reward_margin"], rel=1e-7, abs=1e-12)
    assert_trained(run, plain["loss"], plain["parameters"])


def test_a_job_dpo_trains_on_pairs_with_images(released: dict[str, Any], tmp_path: Path) -> None:
    model, plain = _released(released, "qwen2_5_vl")
    run = text_trainer(_config(model, released["file"], tmp_path)).train().run_dir
    assert _values(run, "loss") == pytest.approx(plain["loss"], rel=1e-4)
    transformers: Any = import_module("transformers")
    auto: Any = transformers.AutoModelForImageTextToText
    before, after = (auto.from_pretrained(each).state_dict() for each in (model, run / "export"))
    for name, each in before.items():
        change = (plain["parameters"][name] - each).float()
        torch.testing.assert_close(after[name] - each, change, rtol=2e-2, atol=2e-6)
    assert (run / "export" / "preprocessor_config.json").is_file() or (
        run / "export" / "processor_config.json"
    ).is_file()


@pytest.mark.parametrize("source", ["parts", "first", "single", "whole", "parquet", "saved"])
def test_pairs_are_read_from_every_shape(source: str, released: dict[str, Any], tmp_path: Path) -> None:
    model, _ = _released(released, "qwen2_5_vl")
    paths = save_images(tmp_path / "images")
    base = _pair([[PLACE, text("what?")]], "a cat", "a dog", images=["images/0.png"])
    files = {"expected": write_lines(tmp_path / "expected.jsonl", [base])}
    without = {key: each for key, each in base.items() if key != "images"}
    turn = {"role": "user", "content": [image(0), text("what?")]}
    samples = {
        "parts": {**without, "prompt": [turn]},
        "first": {"prompt": "what?", "chosen": "a cat", "rejected": "a dog", "images": ["images/0.png"]},
        "single": {**without, "image": "images/0.png"},
        "whole": {"images": base["images"], **{key: [*base["prompt"], *base[key]] for key in ("chosen", "rejected")}},
    }
    if source in samples:
        files[source] = write_lines(tmp_path / "other.jsonl", [samples[source]])
    else:
        datasets: Any = pytest.importorskip("datasets")
        features = {"images": datasets.List(datasets.Image())}
        part = {"type": datasets.Value("string"), "text": datasets.Value("string")}
        features |= {
            key: [{"role": datasets.Value("string"), "content": [part]}] for key in ("prompt", "chosen", "rejected")
        }
        row = copy.deepcopy(base)
        row["prompt"][0]["content"][0]["text"] = None
        row["images"] = [{"bytes": paths[0].read_bytes(), "path": None}]
        table = datasets.Dataset.from_list([row], features=datasets.Features(features))
        files[source] = tmp_path / ("other.parquet" if source == "parquet" else "other")
        (table.to_parquet if source == "parquet" else table.save_to_disk)(str(files[source]))
    batches = []
    for file in files.values():
        data = image_chats(for_images(_config(model, file, tmp_path)), pairs=True)
        batches.append(data.collate([data.samples[0]]))
    assert batches[0].keys() == batches[1].keys()
    assert all(batches[0][name].equal(batches[1][name]) for name in batches[0])


def test_a_missing_image_of_a_rejected_answer_is_named_before_the_start(
    released: dict[str, Any], tmp_path: Path
) -> None:
    model, _ = _released(released, "qwen2_5_vl")
    save_images(tmp_path / "images")
    other = _pair([[text("which?")]], "this", "that")
    for key, path in (("chosen", "images/0.png"), ("rejected", "images/absent.png")):
        other[key][0]["content"].insert(0, {"type": "image", "image": path})
    file = write_lines(tmp_path / "pairs.jsonl", [PAIRS[0], other])
    with pytest.raises(UserError, match=r"line 2: the image .*absent\.png does not exist"):
        image_chats(for_images(_config(model, file, tmp_path)), pairs=True)


def test_a_pair_is_skipped_as_a_whole(released: dict[str, Any], tmp_path: Path) -> None:
    model, _ = _released(released, "qwen2_5_vl")
    paths = save_images(tmp_path / "images")
    samples = [PAIRS[0], _pair([[PLACE, text("q")]], "a", "b" * 300, images=["images/0.png"]), PAIRS[2], PAIRS[7]]
    paths[2].unlink()
    file = write_lines(tmp_path / "pairs.jsonl", samples)
    options = {"files": [file], "length": 160, "too_long": "drop", "broken_images": "drop"}
    data = image_chats(for_images(_config(model, file, tmp_path, dataset=options)), pairs=True)
    batch = data.collate([data.samples[index] for index in range(4)])
    assert batch["kept"].tolist() == [0, 3]
    assert batch["num_skipped"] == 2
    assert len(batch["image_grid_thw"]) == 4
    alone = data.collate([data.samples[0]])
    length = alone["input_ids"].shape[-1]
    assert batch["input_ids"][0, :, :length].equal(alone["input_ids"][0])


@pytest.mark.parametrize("kind", ["sft", "sft videos", "sft message", "reward", "dpo"])
def test_images_that_the_model_would_not_see_are_an_error(kind: str, released: dict[str, Any], tmp_path: Path) -> None:
    (job, *_), (model, _) = kind.split(), _released(released, "qwen2_5_vl")
    sample, texts = PAIRS[0], [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    if job == "sft":
        sample = {"messages": texts, "images" if kind == "sft" else "videos": ["x.png"]}
    if kind == "sft message":
        sample = {"messages": [{**texts[0], "images": ["x.png"]}, texts[1]]}
    file = write_lines(tmp_path / "x.jsonl", [sample])
    data = {"files": [file], "length": 64, "packing": job == "dpo"}
    config = _config(model, file, tmp_path, job=job, dataset=data)
    with pytest.raises(UserError, match=rf"x\.jsonl, line 1: a sample has images, .*job = {job} trains .*job = vision"):
        text_trainer(config)


def test_a_layout_that_images_do_not_support_is_an_error(released: dict[str, Any], tmp_path: Path) -> None:
    model, _ = _released(released, "qwen2_5_vl")
    data = {"files": [released["file"]], "length": 64, "text_pairs": "joined"}
    config = _config(model, released["file"], tmp_path, dataset=data)
    with pytest.raises(UserError, match="text_pairs is set, but job = vision; expected job = sft, dpo or reward"):
        text_trainer(config)


@pytest.mark.slow
def test_tokens_masks_and_losses_equal_those_of_trl(released: dict[str, Any], tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers: Any = import_module("transformers")
    model, _ = _released(released, "qwen2_5_vl")
    processor: Any = transformers.AutoProcessor.from_pretrained(model)
    policy: Any = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    pillow = import_module("PIL.Image")
    rows = [{**pair, "images": [pillow.open(released["root"] / each) for each in pair["images"]]} for pair in PAIRS]
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=1e9,
        logging_steps=1,
        report_to=[],
        beta=0.1,
        max_length=160,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = trl.DPOTrainer(
        policy, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=processor
    )
    collated = trainer.data_collator([copy.copy(row) for row in rows[:4]])
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)  # in the order of the file
    trainer.train()
    expected = [each["loss"] for each in trainer.state.log_history if "loss" in each]

    data_options = {"files": [released["file"]], "length": 160, "labels": "all"}
    batch = {"global_size": 4, "microbatch_size": 4}
    config = _config(model, released["file"], tmp_path, dataset=data_options, batch=batch)
    data = image_chats(for_images(config), pairs=True)
    found = data.collate([data.samples[index] for index in range(4)])
    for number in range(4):
        for side in range(2):
            row = number + 4 * side  # TRL has all chosen answers first
            length = int(collated["attention_mask"][row].sum())
            assert found["attention_mask"][number, side].sum() == length
            assert found["input_ids"][number, side, :length].equal(collated["input_ids"][row, :length])
            is_label = found["labels"][number, side, : length - 1] != -100
            assert is_label.equal(collated["completion_mask"][row, 1:length].bool())
    run = text_trainer(config).train().run_dir
    assert _values(run, "loss") == pytest.approx(expected, rel=1e-3)
