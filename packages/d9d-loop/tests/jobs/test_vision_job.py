"""Data, errors, parts and exports of the job `vision`, compared with processors and collators of other libraries."""

import base64
import json
import pickle
import re
import struct
import zlib
from collections.abc import Callable
from importlib import import_module
from io import StringIO
from pathlib import Path
from shutil import copytree
from typing import Any, final

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from text_job_cases import write_lines
from vision_cases import (
    CHATS,
    SIZES,
    TEMPLATE,
    chat,
    image,
    plain_inputs,
    save_chats,
    save_images,
    save_model,
    text,
    vision_config,
)

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_loop.cli_main import cli_main
from d9d_loop.data.chat_template import read_chat_template
from d9d_loop.data.contents import identity_of
from d9d_loop.data.image_chat import decode_image, has_media, image_size, read_image_chat, read_image_pair
from d9d_loop.data.image_processor import read_processor
from d9d_loop.data_error import DataError
from d9d_loop.jobs import NextToken, TextJobConfig, text_trainer, write_starter
from d9d_loop.jobs.text_data import chat_rows
from d9d_loop.jobs.text_model import check_fit
from d9d_loop.jobs.vision_collator import ImageCollator
from d9d_loop.jobs.vision_data import image_chats
from d9d_loop.result import chat as chat_command
from d9d_metrics import read_metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chats(tmp_path_factory.mktemp("chats"), CHATS)


def _batch(config: Any, indices: list[int], *, in_bytes: bool = True) -> dict[str, torch.Tensor]:
    data = image_chats(config, print, in_bytes=in_bytes)
    stream = data.training(seed=0)
    return data.collate([stream.read(index) for index in indices])


def _train(config: Any) -> Path:
    return text_trainer(config).train().run_dir


def _losses(run: Path, key: str = "loss") -> list[float]:
    return [each[key] for each in read_metrics(run / "metrics.jsonl") if key in each]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "idefics3", "llava_onevision"])
def test_a_batch_has_the_tokens_pixels_and_labels_of_each_chat_alone(family: str, file: Path, tmp_path: Path) -> None:
    transformers: Any = import_module("transformers")

    folder = save_model(family, tmp_path / "model")
    processor: Any = transformers.AutoProcessor.from_pretrained(folder)
    batch = _batch(vision_config(folder, file, tmp_path), list(range(4)))
    assert batch["num_skipped"] == 0
    alone = (plain_inputs(processor, each, file.parent)[0] for each in CHATS[:4])
    pixels = [inputs["pixel_values"] for inputs in alone if "pixel_values" in inputs]
    if family in {"gemma3", "qwen2_5_vl"}:  # others pad with empty tiles
        assert NextToken().inputs(batch)["pixel_values"].equal(torch.cat(pixels))
        assert _batch(vision_config(folder, file, tmp_path), [0, 1, 2, 3], in_bytes=False)["pixel_values"].equal(
            torch.cat(pixels)
        )
    assert ("image_bytes" in batch) == (family == "qwen2_5_vl")
    for row, sample in enumerate(CHATS[:4]):
        inputs, labels = plain_inputs(processor, sample, file.parent)
        length = inputs["input_ids"].shape[1]
        assert batch["attention_mask"][row].sum() == length
        assert batch["input_ids"][row, :length].equal(inputs["input_ids"][0])
        assert batch["labels"][row, : length - 1].equal(labels[0, 1:])
        assert (batch["labels"][row, length - 1 :] == -100).all()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_a_processor_that_reads_no_tensors_gets_images_of_pillow(
    family: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, kinds = vision_config(save_model(family, tmp_path / "model"), file, tmp_path), list[bool]()
    process = ImageCollator._process

    def noted(self: Any, rows: Any) -> Any:
        kinds.extend(isinstance(image, torch.Tensor) for row in rows if row.place for image in row.images)
        return process(self, rows)

    monkeypatch.setattr(ImageCollator, "_process", noted)
    expected = _batch(config, list(range(4)))
    assert all(kinds)
    kinds.clear()
    monkeypatch.setattr("d9d_loop.jobs.vision_collator.reads_tensors", lambda *_, **__: False)
    found = _batch(config, list(range(4)))
    assert not any(kinds)
    assert found.keys() == expected.keys()
    assert all(each.equal(expected[name]) for name, each in found.items())


def test_decoding_copies_no_whole_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pillow: Any = import_module("PIL.Image")
    (path,) = save_images(tmp_path)[:1]
    monkeypatch.setattr(pillow.Image, "copy", lambda _: pytest.fail("an image is copied"))
    assert decode_image(path.name, tmp_path).size == SIZES[0]


@pytest.mark.slow
def test_tokens_pixels_and_labels_equal_those_of_the_collator_of_trl(model: Path, tmp_path: Path) -> None:
    """The collator of TRL needs a template that marks answers; the job does not."""
    collators: Any = pytest.importorskip("trl.trainer.sft_trainer")
    transformers: Any = import_module("transformers")

    paths = save_images(tmp_path / "images")
    samples = [chat([image(0), text("what?")], "a cat", [text("more?")], "no\n\n"), chat("hi", "hello")]
    file = write_lines(tmp_path / "chats.jsonl", samples)
    parts = "{% for part in m.content %}{% if part.type == 'image' %}<start><image><stop>{% else %}{{ part.text }}"
    parts += "{% endif %}{% endfor %}<|end|>"
    marked = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    marked += parts + "{% endgeneration %}{% else %}" + parts + "{% endif %}{{ '\n' }}{% endfor %}"
    processor: Any = transformers.AutoProcessor.from_pretrained(model)
    collate = collators.DataCollatorForVisionLanguageModeling(processor, assistant_only_loss=True, chat_template=marked)
    samples[0]["messages"][0]["content"][0] = {"type": "image"}
    images = [[import_module("PIL.Image").open(paths[0])], []]
    expected = collate([{**sample, "images": each} for sample, each in zip(samples, images, strict=True)])
    batch = _batch(vision_config(model, file, tmp_path), [0, 1])
    found = {**batch, **NextToken().inputs(batch)}
    assert found["labels"][:, :-1].equal(expected["labels"][:, 1:])
    for name in ("input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw"):
        assert found[name].equal(expected[name])


def test_chats_without_images_have_the_tokens_and_labels_of_the_job_sft(model: Path, tmp_path: Path) -> None:
    samples = [chat([text("hi")], [text("hello")], [text("and?")], [text("\n\nbye")])]
    file = write_lines(tmp_path / "chats.jsonl", samples)
    batch = _batch(vision_config(model, file, tmp_path), [0])
    data = chat_rows(vision_config(model, file, tmp_path).model_copy(update={"job": "sft"}))
    sft = data.collate([data.training(seed=0).read(0)])
    length = sft["labels"].shape[1]
    assert batch["input_ids"][0, :length].equal(sft["input_ids"][0])
    assert batch["labels"][0, :length].equal(sft["labels"][0])


def test_a_batch_without_images_has_a_row_with_a_small_image_and_no_label(
    model: Path, file: Path, tmp_path: Path
) -> None:
    batch = _batch(vision_config(model, file, tmp_path), [1])
    assert batch["input_ids"].shape[0] == 2
    assert len(batch["image_grid_thw"]) == 1
    assert (batch["labels"][1] == -100).all()
    assert (batch["labels"][0] != -100).any()


def test_images_of_answers_are_no_labels(model: Path, tmp_path: Path) -> None:
    save_images(tmp_path / "images")
    file = write_lines(tmp_path / "chats.jsonl", [chat("draw", [text("here"), image(1), text("it is")])])
    batch = _batch(vision_config(model, file, tmp_path), [0])
    transformers: Any = import_module("transformers")

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    labels = batch["labels"][0][batch["labels"][0] != -100]
    assert tokenizer.decode(labels) == "here<start><stop>it is<|end|>"


@pytest.mark.parametrize("too_long", ["truncate", "drop", "refuse"])
def test_no_image_is_cut(too_long: str, model: Path, tmp_path: Path) -> None:
    save_images(tmp_path / "images")
    samples = [
        chat([image(0), text("q")], "a"),  # fits
        chat([image(0), text("q")], "a" * 60),  # its answer is cut
        chat([text("q" * 30), image(0)], "a"),  # its image does not fit
        chat([image(0), text("q" * 60)], "a"),  # its label does not fit
    ]
    file = write_lines(tmp_path / "chats.jsonl", samples)
    config = vision_config(model, file, tmp_path, dataset={"files": [file], "length": 32, "too_long": too_long})
    if too_long == "refuse":
        assert _batch(config, [0])["num_skipped"] == 0
        with pytest.raises(UserError, match=r"chats\.jsonl, line 2: the sample has \d+ tokens; .*dataset\.length = 32"):
            _batch(config, [0, 1])
        return
    num_kept = 2 if too_long == "truncate" else 1
    batch = _batch(config, [0, 1, 2, 3])
    assert batch["num_skipped"] == 4 - num_kept
    assert len(batch["input_ids"]) == len(batch["image_grid_thw"]) == num_kept
    assert batch["input_ids"].shape[1] <= 32
    if num_kept == 2:
        assert (batch["labels"][1] != -100).sum() == 32 - int(batch["attention_mask"][0].sum()) + 3
    none = _batch(config, [2, 3])
    assert none["num_skipped"] == 2
    assert (none["labels"] == -100).all()
    lines = write_lines(tmp_path / "none.jsonl", samples[2:])
    with pytest.raises(UserError, match=r"the first 2 samples are skipped, .*dataset\.length = 32"):
        image_chats(config.model_copy(update={"dataset": config.dataset.model_copy(update={"files": (lines,)})}), print)


def test_a_broken_image_is_named_or_its_sample_is_skipped_and_counted(model: Path, tmp_path: Path) -> None:
    paths = save_images(tmp_path / "images")
    file = write_lines(tmp_path / "chats.jsonl", CHATS)
    paths[4].write_bytes(paths[4].read_bytes()[:60])  # of the fourth and the fifth chat
    with pytest.raises(DataError, match=r"chats\.jsonl, line 4: the image .*4\.png cannot be decoded: .*broken_images"):
        _train(vision_config(model, file, tmp_path, rehearsal=False))
    data = {"files": [file], "length": 160, "broken_images": "drop"}
    paths[3].unlink()
    run = _train(vision_config(model, file, tmp_path / "drop", dataset=data))
    assert _losses(run, "skipped_samples") == [1, 1]
    kept = write_lines(tmp_path / "kept.jsonl", CHATS[:3])
    batch = {"global_size": 3, "microbatch_size": 1}
    alone = _train(vision_config(model, kept, tmp_path / "kept", steps=1, batch=batch))
    assert _losses(run)[0] == pytest.approx(_losses(alone)[0], rel=1e-6)


@pytest.mark.usefixtures("rehearses")
@pytest.mark.parametrize(("num_workers", "size"), [(0, 1), (1, 1), (0, 4)], ids=["step", "worker", "rehearsal"])
def test_a_broken_image_is_one_message_and_exit_code_2(
    num_workers: int, size: int, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = save_images(tmp_path / "images")
    file = write_lines(tmp_path / "chats.jsonl", CHATS)
    paths[4].write_bytes(paths[4].read_bytes()[:60])
    options = {
        "data": {"shuffle": False, "num_workers": num_workers},
        "batch": {"global_size": 4, "microbatch_size": size},
        "rehearsal": size == 4,
    }
    with pytest.raises(SystemExit) as stop, cli_main():
        _train(vision_config(model, file, tmp_path, **options))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    before = "" if size == 4 else r".*sample 3 .* could not be collated: UserError: "
    assert re.match(rf"d9d: {before}\S*chats\.jsonl, line 4: the image .*4\.png cannot be decoded: ", line)


def test_an_image_that_the_processor_does_not_convert_is_named_or_skipped(model: Path, tmp_path: Path) -> None:
    """Qwen's processor raises for an aspect ratio above 200, without the name of the image."""
    paths = save_images(tmp_path / "images")
    pillow = import_module("PIL.Image")
    pillow.new("RGB", (500, 1)).save(paths[1])
    file = write_lines(tmp_path / "chats.jsonl", CHATS)
    with pytest.raises(UserError, match=r"chats\.jsonl, line 3: the processor cannot convert the images: .*ratio"):
        _batch(vision_config(model, file, tmp_path), [0, 1, 2])
    data = {"files": [file], "length": 160, "broken_images": "drop"}
    found = _batch(vision_config(model, file, tmp_path, dataset=data), [0, 1, 2])
    expected = _batch(vision_config(model, file, tmp_path), [0, 1])
    assert found.pop("num_skipped") == 1
    assert all(found[name].equal(expected[name]) for name in found)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_over_white(mode: str, tmp_path: Path) -> None:
    numpy, pillow = import_module("numpy"), import_module("PIL.Image")
    values = numpy.random.default_rng(0).integers(0, 256, (8, 8, 4), dtype=numpy.uint8)
    values[:2, :, 3], values[2:4, :, 3] = 0, 255
    source = pillow.fromarray(values)
    if mode == "P":  # one transparent color
        source = source.convert("RGB").quantize(4)
        source.info["transparency"] = 1
        values = numpy.array(source.convert("RGBA"))
        assert set(values[..., 3].flatten()) == {0, 255}
    elif mode == "LA":
        source = source.convert("LA")
        values = numpy.array(source)[..., [0, 0, 0, 1]]
    source.save(tmp_path / "a.png")
    found = numpy.array(decode_image("a.png", tmp_path)).astype(float)
    opacity = values[..., 3:] / 255
    expected = 255 * (1 - opacity) + values[..., :3] * opacity
    assert abs(found - expected).max() <= 1  # rounding to integers
    assert (found == expected)[((opacity == 0) | (opacity == 1))[..., 0]].all()


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_values_of_16_bits_keep_their_upper_8(name: str, tmp_path: Path) -> None:
    numpy, pillow = import_module("numpy"), import_module("PIL.Image")
    values = numpy.random.default_rng(0).integers(0, 1 << 16, (8, 8), dtype=numpy.uint16)
    pillow.fromarray(values).save(tmp_path / name)
    assert (numpy.array(decode_image(name, tmp_path)) == (values >> 8)[..., None]).all()


def test_an_image_whose_values_pillow_would_change_is_an_error(tmp_path: Path) -> None:
    pillow = import_module("PIL.Image")
    source = pillow.new("F", (8, 8), 0.5)
    source.save(tmp_path / "a.tif")
    pillow.new("I;16", (8, 8), 300).save(tmp_path / "a.png", transparency=5)  # a color of 16 bits
    (tmp_path / "b.png").write_bytes(_png_of_16_bits((0x1234, 0x1234, 0x1234)))
    for each in (source, "a.tif", "a.png", "b.png"):
        with pytest.raises(UserError, match="cannot be decoded: its values have more than 8 bits in a form that"):
            image_size(each, tmp_path)


def _png_of_16_bits(transparent: tuple[int, int, int]) -> bytes:
    """Return a PNG of one pixel with colors of 16 bits, one of which is transparent; Pillow cannot write it."""
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0),
        b"tRNS": struct.pack(">3H", *transparent),
        b"IDAT": zlib.compress(b"\0" + struct.pack(">3H", 0x3400, 0x3400, 0x3400)),
        b"IEND": b"",
    }
    chunks = (
        struct.pack(">I", len(each)) + name + each + struct.pack(">I", zlib.crc32(name + each))
        for name, each in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_a_transparent_color_may_be_a_number(tmp_path: Path) -> None:
    source = import_module("PIL.Image").new("RGB", (8, 8))
    source.info["transparency"] = 3  # as a palette has it
    assert image_size(source, tmp_path) == (8, 8)


def test_flags_and_numbers_are_no_media() -> None:
    assert not has_media({**chat("a", "b"), "video": False, "audio": 3, "image": ""})
    assert has_media({**chat("a", "b"), "video": "a.mp4"})


def test_a_missing_image_is_named_before_the_start(model: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "chats.jsonl", [chat("a", "b"), chat([image(0), text("?")], "b")])
    with pytest.raises(UserError, match=r"chats\.jsonl, line 2: the image .*images/0\.png does not exist; .*relative"):
        text_trainer(vision_config(model, file, tmp_path))
    content = base64.b64encode(bytes(300)).decode()  # without "data:", a name that no system takes
    file = write_lines(tmp_path / "chats.jsonl", [chat([{"type": "image", "image": content}, text("?")], "b")])
    with pytest.raises(UserError, match=r"chats\.jsonl, line 1: the image .*AAAA does not exist; .*relative"):
        text_trainer(vision_config(model, file, tmp_path))


@pytest.mark.parametrize("source", ["parquet", "saved", "columns", "marks", "data", "openai", "llava", "list"])
def test_images_are_read_from_every_place(source: str, model: Path, tmp_path: Path) -> None:
    paths = save_images(tmp_path / "images")
    expected = _batch(
        vision_config(model, write_lines(tmp_path / "chats.jsonl", [chat([image(0), text("?")], "b")]), tmp_path), [0]
    )
    content = paths[0].read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    places = chat([{"type": "image"}, text("?")], "b")
    samples: dict[str, dict[str, Any]] = {
        "columns": {**places, "images": ["images/0.png"]},
        "marks": {**chat("<image>?", "b"), "image": "images/0.png"},
        "data": chat([{"type": "image", "image": url}, text("?")], "b"),
        "openai": chat([{"type": "image_url", "image_url": {"url": "images/0.png", "detail": "auto"}}, text("?")], "b"),
        "list": {**chat("<image>?", "b"), "image": ["images/0.png"], "image_path": "of another machine"},
        "llava": {
            "image": "images/0.png",
            "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "b"}],
        },
    }
    if source in samples:
        path = write_lines(tmp_path / "other.jsonl", [samples[source]])
    else:
        datasets: Any = pytest.importorskip("datasets")
        part = {"type": datasets.Value("string"), "text": datasets.Value("string"), "image": datasets.Image()}
        message = {"role": datasets.Value("string"), "content": [part]}
        parts = [{"type": "image", "image": {"bytes": content, "path": "0.png"}, "text": None}]
        parts += [{"type": "text", "text": "?", "image": None}]
        answer = [{"type": "text", "text": "b", "image": None}]
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        features = datasets.Features({"messages": [message]})
        table = datasets.Dataset.from_dict({"messages": [turns]}, features=features)
        if source == "saved":  # with a column of images instead
            rows = {"messages": [places["messages"]], "images": [[{"bytes": content, "path": None}]]}
            rows["messages"][0][1]["content"] = [text("b")]
            features = datasets.Features(
                {
                    "messages": [
                        {"role": datasets.Value("string"), "content": [{**part, "image": datasets.Value("null")}]}
                    ],
                    "images": datasets.List(datasets.Image()),
                }
            )
            table = datasets.Dataset.from_dict(rows, features=features)
        path = tmp_path / ("other.parquet" if source == "parquet" else "other")
        (table.to_parquet if source == "parquet" else table.save_to_disk)(str(path))
    found = _batch(vision_config(model, path, tmp_path), [0])
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({**chat("a", "b"), "images": "x.png"}, "images of the type str; expected a list. Use the key image"),
        ({**chat([{"type": "image"}], "b"), "images": ["a", "b"]}, "2 images in images or image, and 1 places"),
        (chat([{"type": "image"}], "b"), "0 images in images or image, and 1 places"),
        (
            chat([{"type": "video", "video": "x"}], "b"),
            "message 0 has a part of the type video; expected text or image",
        ),
        (chat([{"type": "image", "url": "https://a.invalid/x.png"}], "b"), "is a URL; expected a file"),
        (chat([{"type": "image", "image": "data:image/png;base64,???"}], "b"), "is not base64"),
        (chat([{"type": "image", "image": {"bytes": None, "path": None}}], "b"), "without bytes or path"),
        ({**chat("a<image>", "b"), "images": []}, "1 placeholders '<image>' for 0 images"),
        (
            {"messages": [{**turn, "images": ["a"]} for turn in chat("a", "b")["messages"]]},
            "the key images, which is not",
        ),
        (
            {"conversations": [{"from": "human", "value": "a", "image": "a"}, *chat("a", "b")["messages"]]},
            "key image, w",
        ),
        ({**chat("a", "b"), "image_paths": ["a"], "img": "b"}, "has the key image_paths, img, which is not read"),
        ({**chat("<video>a", "b"), "videos": ["a.mp4"]}, "has the key videos, which is not read; expected images in"),
        ({**chat("a", "b"), "image": "x", "images": ["y"]}, "the keys image and images; expected one"),
        ({**chat([{"type": "image"}], "b"), "images": [None]}, "has a null in images; expected a path"),
        ({**chat("a", "b"), "images": [["a.png"]]}, "an image has the type list; expected a path, a data URL or bytes"),
        (
            chat([{"type": "text", "value": "a"}], "b"),
            "message 0 has a part of the type text with the keys type, value",
        ),
        (chat([{"type": "text", "text": 5}], "b"), "expected a text in the key text"),
        (
            chat([{**image(0), "max_pixels": 9, "resized_width": 2}], "b"),
            "an image has max_pixels, resized_width, which",
        ),
        (
            chat([{"type": "image_url", "image_url": {"url": "a", "detail": "low"}}], "b"),
            "an image has detail, which is",
        ),
    ],
)
def test_a_bad_sample_is_named(sample: dict[str, Any], message: str, model: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "chats.jsonl", [chat("a", "b"), sample])
    with pytest.raises(UserError, match=rf"chats\.jsonl, line 2: .*{message}"):
        _batch(vision_config(model, file, tmp_path), [0, 1])


def test_another_processor_is_other_data(model: Path, file: Path, tmp_path: Path) -> None:
    copied = copytree(model, tmp_path / "copied")
    before = identity_of(image_chats(vision_config(copied, file, tmp_path)).samples)
    assert before == identity_of(image_chats(vision_config(model, file, tmp_path)).samples)
    name = next(name for name in ("processor_config.json", "preprocessor_config.json") if (copied / name).is_file())
    settings = json.loads((copied / name).read_text())
    images = settings.get("image_processor", settings)
    images["rescale_factor"] = images["rescale_factor"] / 2
    (copied / name).write_text(json.dumps(settings))
    assert identity_of(image_chats(vision_config(copied, file, tmp_path)).samples) != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dataset": {"files": ["x"], "text_pairs": "joined"}},
            "text_pairs is set, but job = vision; expected job = sft, dpo or reward",
        ),
        ({"job": "sft", "dataset": {"files": ["x"], "broken_images": "drop"}}, "broken_images is set, but job = sft"),
        (
            {"job": "dpo", "dataset": {"files": ["x"], "broken_images": "drop", "packing": True}},
            "broken_images is set, but job = dpo; expected vision, or dpo without packing",
        ),
    ],
)
def test_a_setting_without_meaning_is_an_error(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=message):
        vision_config(tmp_path, tmp_path / "x.jsonl", tmp_path, **changes)


def _mllama(tokenizer: Any) -> Any:
    transformers: Any = import_module("transformers")
    images = transformers.MllamaImageProcessor(size={"height": 16, "width": 16}, max_image_tiles=1)
    return transformers.MllamaProcessor(images, tokenizer)


def _pali_gemma(tokenizer: Any) -> Any:
    transformers: Any = import_module("transformers")
    images = transformers.SiglipImageProcessor(size={"height": 16, "width": 16})
    images.image_seq_length = 4
    return transformers.PaliGemmaProcessor(images, tokenizer)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (_mllama, ("<boi><|user|><image>.<|end|>\n", "<|user|><image>.<|end|>\n")),
        (_pali_gemma, ("<boi>.<|end|>\n\n", ".<|end|>\n")),
    ],
    ids=["start_of_the_text", "behind_the_images"],
)
def test_a_processor_that_adds_tokens_to_the_text_is_an_error(
    make: Callable[[Any], Any], found: tuple[str, str], model: Path, file: Path, tmp_path: Path
) -> None:
    """Both processors add a start token that the template does not write, so that spans of answers would move."""
    transformers: Any = import_module("transformers")
    folder = copytree(model, tmp_path / "model")
    (folder / "processor_config.json").unlink()
    processor = make(transformers.AutoTokenizer.from_pretrained(model, bos_token="<boi>"))  # noqa: S106
    processor.chat_template = TEMPLATE.replace("IMAGE", "<image>")
    processor.save_pretrained(folder)
    with pytest.raises(UserError, match=re.escape("outside of images: got {!r}, expected {!r}".format(*found))):
        image_chats(vision_config(folder, file, tmp_path))


@pytest.mark.parametrize("family", ["mllama", "idefics", "florence2"])
def test_a_model_that_reads_images_by_cross_attention_is_an_error(family: str, tmp_path: Path) -> None:
    transformers: Any = import_module("transformers")
    config = vision_config(tmp_path, tmp_path / "x.jsonl", tmp_path)
    with pytest.raises(UserError, match=f"is a {family}, which has cross attention or an encoder; expected a decoder "):
        check_fit(config, transformers.AutoConfig.for_model(family))


@pytest.mark.parametrize("name", ["processor_config.json", "chat_template.json"])
@pytest.mark.parametrize("has_jinja", [True, False])
def test_the_chat_template_is_that_of_the_processor(name: str, has_jinja: bool, model: Path, tmp_path: Path) -> None:
    transformers: Any = import_module("transformers")
    folder = copytree(model, tmp_path / "model")
    path = folder / name
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, "chat_template": "of the processor" + TEMPLATE}))
    if not has_jinja:
        (folder / "chat_template.jinja").unlink()
    expected = transformers.AutoProcessor.from_pretrained(folder).chat_template
    assert expected.startswith("of the processor")
    assert read_chat_template(folder, has_parts=True).source == expected
    auto = transformers.AutoTokenizer.from_pretrained(folder).chat_template
    assert not has_jinja or read_chat_template(folder).source == auto


def test_a_new_model_is_an_error(tmp_path: Path) -> None:
    values = vision_config(tmp_path, tmp_path / "x.jsonl", tmp_path).model_dump(exclude_unset=True)
    with pytest.raises(ValidationError, match=r"job = vision needs model\.folder"):
        TextJobConfig.model_validate({**values, "model": {"family": "qwen2_5_vl"}})


@final
class _Wrapped:
    """Dataset of a user that passes samples on."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


@pytest.mark.parametrize("change", ["pixels", "processor", "template", "nothing"])
def test_a_wrapper_of_samples_has_the_identity_of_their_images(change: str, model: Path, tmp_path: Path) -> None:
    folder, file = tmp_path / "model", save_chats(tmp_path / "data", CHATS)
    copytree(model, folder)
    before = identity_of(_Wrapped(image_chats(vision_config(folder, file, tmp_path)).samples))
    picture = file.parent / "images" / "0.png"
    match change:
        case "pixels":
            pillow: Any = import_module("PIL.Image")
            pillow.open(picture).rotate(180).save(picture)  # of the same size
        case "processor":
            path = folder / "processor_config.json"
            path.write_text(path.read_text().replace('"do_rescale": true', '"do_rescale": false'))
        case "template":
            path = folder / "chat_template.jinja"
            path.write_text(path.read_text().replace("<|end|>", "<|end|><|end|>"))
        case _:
            copytree(file.parent, tmp_path / "moved")
            file = tmp_path / "moved" / file.name
    after = identity_of(_Wrapped(image_chats(vision_config(folder, file, tmp_path)).samples))
    assert (after == before) == (change == "nothing")


def test_an_image_that_disappears_is_named_with_its_sample_once(model: Path, tmp_path: Path) -> None:
    file = save_chats(tmp_path, CHATS)
    samples = image_chats(vision_config(model, file, tmp_path)).samples
    (tmp_path / "images" / "0.png").unlink()
    with pytest.raises(UserError, match=r"^\S*chats\.jsonl, line 1: the image .*0\.png does not exist"):
        samples[0]


def test_a_sample_that_is_no_conversation_is_not_dropped_as_a_broken_image(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d9d_loop.jobs.vision_data._NUM_CHECKED", 1)
    file = save_chats(tmp_path, [*CHATS, chat([{"type": "audio"}], "a")])
    data = {"files": [file], "length": 160, "broken_images": "drop"}
    samples = image_chats(vision_config(model, file, tmp_path, dataset=data)).samples
    with pytest.raises(UserError, match=r"^\S*chats\.jsonl, line 9: message 0 has a part of the type audio"):
        samples[8]


def test_a_processor_that_needs_a_missing_package_names_only_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("smolvlm", tmp_path / "model")
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", None)
    with pytest.raises(UserError, match=r"cannot read its processor: Package `num2words` .*num2words`\.$"):
        read_processor(tmp_path / "model")


def test_a_folder_without_images_is_an_error(model: Path, file: Path, tmp_path: Path) -> None:
    transformers: Any = import_module("transformers")

    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    language = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    language.save_pretrained(tmp_path / "llama")
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "llama")
    with pytest.raises(
        UserError, match=r"llama: transformers cannot read its processor: .*Expected the files of an image processor"
    ):
        text_trainer(vision_config(tmp_path / "llama", file, tmp_path))
    transformers.AutoProcessor.from_pretrained(model).save_pretrained(tmp_path / "llama")
    with pytest.raises(UserError, match="is a llama, which takes no images; expected a decoder that AutoModelForImage"):
        text_trainer(vision_config(tmp_path / "llama", file, tmp_path))


def test_samples_can_be_collated_again(model: Path, file: Path, tmp_path: Path) -> None:
    data = image_chats(vision_config(model, file, tmp_path), print)
    stream = data.training(seed=0)
    samples = [stream.read(0), stream.read(2)]
    first, second = data.collate(samples), data.collate(samples)
    assert first["pixel_values"].equal(second["pixel_values"])
    assert first["input_ids"].equal(second["input_ids"])


def test_the_collator_can_be_sent_to_a_worker(model: Path, file: Path, tmp_path: Path) -> None:
    data = image_chats(vision_config(model, file, tmp_path), print)
    stream = data.training(seed=0)
    copy: Any = pickle.loads(pickle.dumps((stream, data.collate)))  # noqa: S301 - written here
    for one, other in zip(*([c[1]([c[0].read(2)]).items() for c in ((stream, data.collate), copy)]), strict=True):
        assert one[0] == other[0]
        assert one[1].equal(other[1])


@pytest.mark.slow
def test_a_job_in_workers_resumes_on_another_mesh_and_exports_its_processor(
    model: Path, file: Path, tmp_path: Path
) -> None:
    """The rest of the run is on two ranks, of which one has no image in the second step."""
    transformers: Any = import_module("transformers")

    whole = _train(vision_config(model, file, tmp_path / "whole"))
    options: dict[str, Any] = {"data": {"shuffle": False, "num_workers": 1}, "checkpoint": {"every": 1}}
    _train(vision_config(model, file, tmp_path, steps=1, **options))
    options["data"]["num_workers"] = 0
    rest = vision_config(model, file, tmp_path, mesh={"data_parallel_shard": 2}, **options)
    run_ranks(_train, rest, world_size=2)
    assert _losses(tmp_path / "vision") == pytest.approx(_losses(whole), rel=1e-5)
    export = tmp_path / "vision" / "export"
    messages = [{"role": "user", "content": [{**image(0), "image": str(file.parent / "images/0.png")}, text("?")]}]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    inputs, before = (
        transformers.AutoProcessor.from_pretrained(each).apply_chat_template(messages, **options)
        for each in (export, model)
    )
    assert inputs["pixel_values"].equal(before["pixel_values"])
    trained: Any = transformers.AutoModelForImageTextToText.from_pretrained(export)
    other: Any = transformers.AutoModelForImageTextToText.from_pretrained(whole / "export")
    torch.testing.assert_close(trained(**inputs).logits, other(**inputs).logits, rtol=1e-4, atol=1e-4)
    assert trained.generate(**inputs, max_new_tokens=2).shape[0] == 1


@pytest.mark.usefixtures("rehearses")
def test_parts_are_frozen_adapted_or_trained_in_full_and_have_learning_rates(
    model: Path, file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("d9d_peft")
    adapter = {"target": r"language_model.*_proj$", "full": r"visual\.merger", "rank": 2, "alpha": 4.0}
    optimizer = {"kind": "sgd", "learning_rate": 0.5, "momentum": 0.0, "weight_decay": 0.0}
    halved = {**optimizer, "groups": [{"pattern": r"visual\.merger", "learning_rate": 0.25}]}
    runs = {
        "adapted": {"adapter": adapter},
        "frozen": {"freeze": [r"visual\.blocks"]},
        "halved": {"freeze": [r"visual\.blocks"], "optimizer": halved, "rehearsal": False},
    }
    before = load_file(model / "model.safetensors")
    changes: dict[str, dict[str, torch.Tensor]] = {}
    for name, options in runs.items():
        run = _train(vision_config(model, file, tmp_path / name, steps=1, **options))
        after = load_file(run / "export" / "model.safetensors")
        found = {key: after[key].double() - value.double() for key, value in before.items()}
        changes[name] = {key: value for key, value in found.items() if value.any()}
    merger = {name for name in before if "visual.merger" in name}
    projections = {name for name in before if "visual" not in name and name.endswith("_proj.weight")}
    assert changes["adapted"].keys() == merger | projections
    assert changes["frozen"].keys() == {name for name in before if "visual.blocks" not in name}
    for name, change in changes["frozen"].items():
        expected = change / 2 if name in merger else change
        torch.testing.assert_close(changes["halved"][name], expected, rtol=1e-3, atol=1e-7)
    with pytest.raises(UserError, match=r"adapter\.full = 'nothing' matches no parameter"):
        _train(vision_config(model, file, tmp_path / "none", adapter={**adapter, "full": "nothing"}))


@pytest.mark.usefixtures("rehearses")
def test_prompts_and_held_out_chats(model: Path, file: Path, tmp_path: Path) -> None:
    data = {"files": [file], "length": 160, "held_out": 0.25}
    run = _train(vision_config(model, file, tmp_path, dataset=data, prompts=["hi"], steps=1))
    (loss,) = _losses(run, "evaluation_loss")
    assert 0 < loss < 20


@pytest.mark.slow("gemma3")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_d9d_chat_answers_about_an_image_as_generate_does(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, paths = save_model(family, tmp_path / "model"), save_images(tmp_path)
    options = ["--image", str(paths[0]), "--image", str(paths[1]), "--temperature", "0", "--max-new-tokens", "6"]
    monkeypatch.setattr("sys.stdin", StringIO("what?\nmore?\n"))
    chat_command.main([str(folder), *options])
    transformers: Any = import_module("transformers")
    processor: Any = transformers.AutoProcessor.from_pretrained(folder)
    trained: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    parts = [{"type": "image", "image": str(each)} for each in paths[:2]]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [*parts, text("what?")]}]
    answers = []
    for line in ("more?", ""):
        settings = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
        inputs = processor.apply_chat_template(messages, **settings, processor_kwargs={"add_special_tokens": False})
        ids = trained.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        shown = [processor.tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(7)]
        answers.append([each for each in shown if not each.endswith("\N{REPLACEMENT CHARACTER}")][-1])
        messages += [{"role": "assistant", "content": [text(answers[-1])]}, {"role": "user", "content": [text(line)]}]
    assert capsys.readouterr().out == "".join(f"{each}\n" for each in answers)
    with pytest.raises(UserError, match="--image needs a vision-language model"):
        chat_command.main([str(folder), "--plain", *options])


def test_an_image_of_d9d_chat_that_does_not_exist_is_an_error_before_the_model_is_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--image .*absent\.png: there is no such file; expected an image"):
        chat_command.main([str(tmp_path / "no model"), "--image", str(tmp_path / "absent.png")])


def test_a_message_with_a_mark_in_a_text_without_images_is_a_text() -> None:
    found = read_image_chat(chat("write <image>", "b"))
    assert found.images == []
    assert found.conversation.messages[0]["content"] == [text("write <image>")]


def test_a_mark_in_an_answer_is_a_text() -> None:
    found = read_image_chat({**chat("how to show it?", "use <image> here", "<image>?"), "image": "a.png"})
    place, (question, answer, other) = {"type": "image"}, (each["content"] for each in found.conversation.messages)
    assert (question, answer) == ([text("how to show it?")], [text("use <image> here")])
    assert other == [place, text("?")]
    sample = {"images": ["a.png"], "prompt": "w", "chosen": "yes", "rejected": "see <image>"}
    pair = read_image_pair(sample)
    messages = [[each["content"] for each in one.conversation.messages] for one in pair]
    assert messages == [[[place, text("w")], [text(answer)]] for answer in ("yes", "see <image>")]


@pytest.mark.parametrize("later", ["<image>", [{"type": "image"}]])
def test_answers_of_a_pair_with_different_places_of_images_in_their_prompts_are_an_error(later: Any) -> None:
    turns = chat("w", "see", later, "b")["messages"]
    sample = {"image": "a.png", "prompt": "w", "chosen": turns[1:], "rejected": "no"}
    with pytest.raises(UserError, match="a pair has images in the prompt of one answer, and after the prompt of the o"):
        read_image_pair(sample)


@pytest.mark.parametrize("more", [{}, {"images": ["a.png"]}])
def test_images_of_one_answer_in_a_key_are_an_error(more: dict[str, Any]) -> None:
    sample = {"prompt": "w", "chosen": "yes", "rejected": "no", "rejected_images": ["b.png"], **more}
    assert has_media(sample)  # so a job on texts raises, too
    with pytest.raises(UserError, match="a sample or a message has the key rejected_images, which is not read"):
        read_image_pair(sample)


def test_the_starter_names_its_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_starter("vision", tmp_path)
    with pytest.raises(SystemExit), cli_main():
        text_trainer(TextJobConfig.from_cli(str(path), arguments=[]))
    assert "model.folder = Qwen2.5-VL-3B does not exist" in capsys.readouterr().err
