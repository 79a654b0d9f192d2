"""Small folders of vision-language models of `transformers` with their processors, and files of chats with images."""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from d9d_loop.jobs import TextJobConfig
from d9d_metrics import read_metrics

if any(find_spec(name) is None for name in ("numpy", "PIL", "torchvision", "transformers")):
    pytest.skip("images need numpy, pillow, torchvision and transformers", allow_module_level=True)

SPECIAL = (
    *("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<image>", "<video>", "<start>", "<stop>", "<boi>", "<eoi>"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT: dict[str, Any] = {
    "vocab_size": 280,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
QWEN_TOKENS = {"vision_bos_token": "<start>", "vision_eos_token": "<stop>"}
TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "patch_size": 4}
SIGLIP = {**TOWER, "num_hidden_layers": 2, "image_size": 16, "vision_use_head": False}
PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 32]]
SIZES = ((20, 33), (40, 16), (64, 16), (24, 24), (33, 20))
"""Width and height of the images."""


def _tokenizer(**named: str) -> Any:
    transformers: Any = import_module("transformers")

    letters = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    # Merges of newlines: the text around a placeholder joins with what replaces the placeholder.
    backend = Tokenizer(models.BPE(vocab={**letters, "ĊĊ": 256, "ĊĊĊ": 257}, merges=[("Ċ", "Ċ"), ("ĊĊ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=named, **special)


def _ids(tokenizer: Any, names: dict[str, str]) -> dict[str, Any]:
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def _text(tokenizer: Any) -> dict[str, Any]:
    return {
        **TEXT,
        **_ids(tokenizer, {"eos_token_id": "<|end|>", "pad_token_id": "<|pad|>"}),
        "vocab_size": len(tokenizer),
    }


def _qwen() -> tuple[Any, Any]:
    transformers: Any = import_module("transformers")
    tokenizer = _tokenizer(image_token="<image>", video_token="<video>")  # noqa: S106
    patches = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    images = transformers.Qwen2VLImageProcessor(**patches, size={"shortest_edge": 64, "longest_edge": 1024})
    template = TEMPLATE.replace("IMAGE", "<start><image><stop>")
    videos = transformers.Qwen2VLVideoProcessor(**patches)
    processor = transformers.Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=template)
    rope = {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 1e4}
    tower: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "depth": 2,
        "out_hidden_size": 16,
    }
    tower |= {"patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_text(tokenizer), "rope_parameters": rope},
        vision_config=tower,
        **_ids(tokenizer, {"image_token_id": "<image>", "video_token_id": "<video>"}),
        **_ids(tokenizer, {"vision_start_token_id": "<start>", "vision_end_token_id": "<stop>"}),
    )
    return processor, transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3(num_features: int = 1, **more: Any) -> tuple[Any, Any]:
    transformers: Any = import_module("transformers")
    tokenizer = _tokenizer(image_token="<image>", video_token="<video>", **QWEN_TOKENS)  # noqa: S106
    patches = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    images = transformers.Qwen2VLImageProcessor(**patches, size={"shortest_edge": 64, "longest_edge": 1024})
    template = TEMPLATE.replace("IMAGE", "<start><image><stop>")
    videos = transformers.Qwen3VLVideoProcessor(**patches)
    processor = transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=template)
    name = "Qwen3VLMoe" if "num_experts" in more else "Qwen3VL"
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    tower: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "depth": 1 + num_features}
    tower |= {"out_hidden_size": 16, "patch_size": 4, "spatial_merge_size": 2}
    tower["deepstack_visual_indexes"] = list(range(num_features))
    config = getattr(transformers, f"{name}Config")(
        text_config={**_text(tokenizer), "rope_parameters": rope, **more},
        vision_config={**tower, "num_position_embeddings": 16},
        **_ids(tokenizer, {"image_token_id": "<image>", "video_token_id": "<video>"}),
        **_ids(tokenizer, {"vision_start_token_id": "<start>", "vision_end_token_id": "<stop>"}),
    )
    return processor, getattr(transformers, f"{name}ForConditionalGeneration")(config)


def _gemma() -> tuple[Any, Any]:
    transformers: Any = import_module("transformers")

    tokenizer = _tokenizer(image_token="<image>", boi_token="<boi>", eoi_token="<eoi>")  # noqa: S106
    images = transformers.Gemma3ImageProcessor(size={"height": 16, "width": 16})
    template = TEMPLATE.replace("IMAGE", "<boi>")
    processor = transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)
    config = transformers.Gemma3Config(
        text_config={**_text(tokenizer), "query_pre_attn_scalar": 4, "sliding_window": 16},
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
        **_ids(tokenizer, {"image_token_index": "<image>", "boi_token_index": "<boi>", "eoi_token_index": "<eoi>"}),
    )
    return processor, transformers.Gemma3ForConditionalGeneration(config)


def _idefics(name: str = "Idefics3") -> tuple[Any, Any]:
    transformers: Any = import_module("transformers")

    tokenizer = _tokenizer(image_token="<image>")  # noqa: S106
    edges = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    images, more = getattr(transformers, f"{name}ImageProcessor")(**edges), list[Any]()
    if name == "SmolVLM":
        pytest.importorskip("num2words")
        more.append(transformers.SmolVLMVideoProcessor(fps=1, num_frames=8))
    template = TEMPLATE.replace("IMAGE", "<image>")
    kind = getattr(transformers, f"{name}Processor")
    processor = kind(images, tokenizer, *more, chat_template=template, image_seq_len=4)
    text = _text(tokenizer)
    config = getattr(transformers, f"{name}Config")(
        text_config={**text, "model_type": "llama"},
        vision_config={key: value for key, value in SIGLIP.items() if key != "vision_use_head"},
        scale_factor=2,
        pad_token_id=text["pad_token_id"],
        **_ids(tokenizer, {"image_token_id": "<image>"}),
    )
    return processor, getattr(transformers, f"{name}ForConditionalGeneration")(config)


def _llava() -> tuple[Any, Any]:
    transformers: Any = import_module("transformers")

    tokenizer = _tokenizer(image_token="<image>", video_token="<video>")  # noqa: S106
    images = transformers.LlavaOnevisionImageProcessor(size={"height": 16, "width": 16}, image_grid_pinpoints=PINPOINTS)
    processor = transformers.LlavaOnevisionProcessor(
        images,
        tokenizer,
        transformers.LlavaOnevisionVideoProcessor(),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )
    config = transformers.LlavaOnevisionConfig(
        text_config={**_text(tokenizer), "model_type": "qwen2"},
        vision_config={**SIGLIP, "model_type": "siglip_vision_model"},
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-1,
        **_ids(tokenizer, {"image_token_id": "<image>", "video_token_id": "<video>"}),
    )
    return processor, transformers.LlavaOnevisionForConditionalGeneration(config)


def _mistral3() -> tuple[Any, Any]:
    transformers: Any = import_module("transformers")

    tokenizer = _tokenizer(image_token="<image>")  # noqa: S106
    images = transformers.PixtralImageProcessor(size={"longest_edge": 32}, patch_size=4)
    places = {"image_token": "<image>", "image_break_token": "<start>", "image_end_token": "<stop>"}
    template = TEMPLATE.replace("IMAGE", "<image>")
    options: dict[str, Any] = {"patch_size": 4, "spatial_merge_size": 2, **places}
    processor = transformers.PixtralProcessor(images, tokenizer, chat_template=template, **options)
    config = transformers.Mistral3Config(
        text_config={**_text(tokenizer), "model_type": "mistral"},
        vision_config={**TOWER, "model_type": "pixtral", "num_hidden_layers": 2, "image_size": 32, "head_dim": 8},
        **_ids(tokenizer, {"image_token_index": "<image>"}),
    )
    return processor, transformers.Mistral3ForConditionalGeneration(config)


def _internvl() -> tuple[Any, Any]:
    transformers: Any = import_module("transformers")

    places = {"start_image_token": "<start>", "end_image_token": "<stop>", "context_image_token": "<image>"}
    tokenizer = _tokenizer(**places, video_token="<video>")  # noqa: S106
    images = transformers.GotOcr2ImageProcessor(size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=3)
    processor = transformers.InternVLProcessor(
        images,
        tokenizer,
        transformers.InternVLVideoProcessor(),
        image_seq_length=4,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )
    config = transformers.InternVLConfig(
        text_config={**_text(tokenizer), "model_type": "qwen2"},
        vision_config={**TOWER, "num_hidden_layers": 2, "image_size": [16, 16], "patch_size": [4, 4]},
        image_seq_length=4,
        **_ids(tokenizer, {"image_token_id": "<image>"}),
    )
    return processor, transformers.InternVLForConditionalGeneration(config)


def _glm(**experts: Any) -> tuple[Any, Any]:
    transformers: Any = import_module("transformers")

    tokenizer = _tokenizer(image_token="<image>", video_token="<video>")  # noqa: S106
    patches = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    images = transformers.Glm4vImageProcessor(**patches, size={"shortest_edge": 64, "longest_edge": 2048})
    videos = transformers.Glm4vVideoProcessor(**patches)
    template = TEMPLATE.replace("IMAGE", "<start><image><stop>")
    processor = transformers.Glm4vProcessor(images, tokenizer, videos, chat_template=template)
    tower = {**TOWER, "num_heads": 2, "depth": 2, "out_hidden_size": 16, "image_size": 16, "spatial_merge_size": 2}
    tower.pop("num_attention_heads")
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    name = "Glm4vMoe" if experts else "Glm4v"
    config = getattr(transformers, f"{name}Config")(
        text_config={**_text(tokenizer), "rope_parameters": rope, **experts},
        vision_config=tower,
        **_ids(tokenizer, {"image_token_id": "<image>", "video_token_id": "<video>"}),
        **_ids(tokenizer, {"image_start_token_id": "<start>", "image_end_token_id": "<stop>"}),
    )
    return processor, getattr(transformers, f"{name}ForConditionalGeneration")(config)


GLM_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "first_k_dense_replace": 1}


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": partial(_qwen3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12),
    "gemma3": _gemma,
    "idefics3": _idefics,
    "smolvlm": partial(_idefics, "SmolVLM"),
    "llava_onevision": _llava,
    "mistral3": _mistral3,
    "internvl": _internvl,
    "glm4v": _glm,
    "glm4v_moe": partial(_glm, **GLM_EXPERTS),
}


ROUNDED = ("glm4v", "glm4v_moe")
"""Families that compute positions of images, norms and routers in float32, and round gradients to it."""

EAGER = {"experts_implementation": "eager"}
"""Entry of models with experts: the grouped products of torch do not take float64."""


def save_model(family: str, folder: Path) -> Path:
    """Save a model of a family with its processor. No parameter is 0 or 1."""
    torch.manual_seed(0)
    processor, model = FAMILIES[family]()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.1 * torch.randn_like(each))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def save_images(folder: Path) -> list[Path]:
    """Save images of different sizes, whose pixels are random."""
    numpy, pillow = import_module("numpy"), import_module("PIL.Image")
    paths = []
    for number, (width, height) in enumerate(SIZES):
        pixels = numpy.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
        folder.mkdir(exist_ok=True, parents=True)
        paths.append(folder / f"{number}.png")
        pillow.fromarray(pixels).save(paths[-1])
    return paths


def image(number: int) -> dict[str, str]:
    """Return a part with an image, as a file of samples has it."""
    return {"type": "image", "image": f"images/{number}.png"}


def text(words: str) -> dict[str, str]:
    """Return a part with a text."""
    return {"type": "text", "text": words}


def chat(*turns: Any) -> dict[str, Any]:
    """Return a sample: turns of the user and of the assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]}


CHATS = [
    chat([image(0), text("what is it?")], "a cat"),
    chat("no image here\n\n", [text("none\n")]),
    chat([text("first\n"), image(1), text("\nthen"), image(2)], "two of them", "and?", "that is all"),
    chat([text("look"), image(3)], "\n\nyes", [image(4), text("this one?")], "no"),
    chat([image(4), text("a")], "b"),
    chat("only text", "an answer that is longer than the others"),
    chat([image(2), image(0), text("which?")], "the left one"),
    chat("more text", "more answer"),
]
"""Eight chats. Of the second four, those of the second of two ranks have no image."""


def save_chats(folder: Path, chats: list[dict[str, Any]]) -> Path:
    """Save chats to `chats.jsonl`, with the images beside it."""
    save_images(folder / "images")
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in chats))
    return path


def vision_config(model: Path, file: Path, runs: Path, **more: Any) -> TextJobConfig:
    """Return the configuration of a job of two steps of four samples, with SGD, in the order of the file."""
    values: dict[str, Any] = {
        "job": "vision",
        "steps": 2,
        "model": {"folder": model},
        "dataset": {"files": [file], "length": 160},
        "run": {"folder": runs, "name": "vision"},
        "batch": {"global_size": 4, "microbatch_size": 1},
        "data": {"shuffle": False},
        "optimizer": {"kind": "sgd", "learning_rate": 0.5, "momentum": 0.0, "weight_decay": 0.0},
        "gradients": {"max_norm": None},
        "lr_schedule": {"kind": "transformers", "name": "constant"},
        "logging": {"every": 1, "progress": False},
        "resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}},
    }
    return TextJobConfig.model_validate({**values, **more})


def plain_inputs(processor: Any, sample: dict[str, Any], folder: Path) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the inputs of the model for one chat, and its labels, which are not shifted, by `transformers` alone.

    The labels are the tokens of each answer with its end token, which the ids of the roles enclose.
    """
    messages = [
        {**each, "content": [text(each["content"])] if isinstance(each["content"], str) else each["content"]}
        for each in sample["messages"]
    ]
    for message in messages:
        message["content"] = [
            {**part, "image": str(folder / part["image"])} if part["type"] == "image" else part
            for part in message["content"]
        ]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(messages, **options, processor_kwargs={"add_special_tokens": False})
    start, end, space = (
        processor.tokenizer.convert_tokens_to_ids(each) for each in ("<|assistant|>", "<|end|>", "<image>")
    )
    labels, is_answer = [], False
    for token in inputs["input_ids"][0].tolist():
        labels.append(token if is_answer and token != space else -100)
        is_answer = (is_answer or token == start) and token != end
    return dict(inputs), torch.tensor([labels])


@contextmanager
def wide_norms() -> Generator[None]:
    """Compute norms in the dtype of their input, in this process.

    `transformers` computes them in float32, and rounds gradients to it. So losses and gradients of float64 depend on
    the split of tokens over forwards and ranks, by 1e-7 of their sums.
    """

    def forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
        is_gemma = hasattr(norm, "eps")
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (norm.eps if is_gemma else norm.variance_epsilon))
        return scaled * (1 + norm.weight if is_gemma else norm.weight)

    names = {"gemma3": "Gemma3RMSNorm", "qwen2_5_vl": "Qwen2_5_VLRMSNorm"}
    names |= {"qwen3_vl": "Qwen3VLTextRMSNorm", "qwen3_vl_moe": "Qwen3VLMoeTextRMSNorm"}
    names |= {"pixtral": "PixtralRMSNorm", "mistral": "MistralRMSNorm"}
    with pytest.MonkeyPatch.context() as patch:
        for family, name in names.items():
            file = import_module(f"transformers.models.{family}.modeling_{family}")
            patch.setattr(getattr(file, name), "forward", forward)
        yield


@wide_norms()
def plain_training(
    model: Path, file: Path, chats: list[dict[str, Any]], *, sizes: Sequence[int] = (4, 4), rate: float = 0.5
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and parameters of a plain loop in float64: steps of so many samples, each in a forward of its own.

    Gradients are divided after backward, as in jobs: norms of `transformers` round them to float32.
    """
    transformers: Any = import_module("transformers")

    processor = transformers.AutoProcessor.from_pretrained(model)
    auto: Any = transformers.AutoModelForImageTextToText
    found: Any = auto.from_pretrained(model, dtype=torch.float64, **(EAGER if "moe" in model.name else {})).train()
    losses = []
    rest = iter(chats)
    for size in sizes:
        batch = [plain_inputs(processor, each, file.parent) for each in islice(rest, size)]
        count, total = sum(int((labels != -100).sum()) for _, labels in batch), 0.0
        for inputs, labels in batch:
            logits = found(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
            loss.backward()
            total += loss.item() / count
        with torch.no_grad():
            for each in found.parameters():
                if each.grad is not None:
                    each.sub_(each.grad, alpha=rate / count)
                each.grad = None
        losses.append(total)
    return losses, {name: each.detach() for name, each in found.state_dict().items()}


def losses_of(run: Path) -> list[float]:
    """Return the losses of a run."""
    return [each["loss"] for each in read_metrics(run / "metrics.jsonl") if "loss" in each]


def assert_trained(
    run: Path, losses: list[float], parameters: dict[str, torch.Tensor], *, family: str | None = None
) -> None:
    """Compare the losses of a run and the parameters of its export with those of `plain_training`.

    The bounds are those of float32 for families of `ROUNDED`.
    """
    transformers: Any = import_module("transformers")

    is_rounded = family in ROUNDED
    assert losses_of(run) == pytest.approx(losses, rel=1e-7 if is_rounded else 1e-9)
    export: Any = transformers.AutoModelForImageTextToText.from_pretrained(run / "export", dtype="auto")
    trained = dict(export.state_dict())
    assert trained.keys() == parameters.keys()
    bounds: dict[str, Any] = {"rtol": 1e-6, "atol": 5e-9} if is_rounded else {"rtol": 1e-8, "atol": 1e-10}
    for name, expected in parameters.items():
        torch.testing.assert_close(trained[name], expected, **bounds, msg=lambda text, name=name: f"{name}: {text}")
