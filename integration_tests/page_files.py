"""Files and real runs that the commands of a page start from, in its folder: what the page's reader has already."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from commands import run_commands

ROOT = Path(__file__).resolve().parents[1]
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
_PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "intermediate_size": 32, "fullatt_block_indexes": [0]}
_PLANNED = """
job = "pretrain"
steps = 1000
model = { family = "qwen3", hidden_size = 256, num_hidden_layers = 4 }
dataset = { files = ["corpus.jsonl"], length = 512, packing = true }
batch = { global_size = 4096, microbatch_size = 1 }
mesh = { data_parallel_shard = -1 }
"""


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_model(folder: Path) -> None:
    """Write a tiny chat model with a token for each byte."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - an extra

    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    letters = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    names: dict[str, Any] = {"eos_token": "<|end|>", "pad_token": "<|end|>", "chat_template": _TEMPLATE}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    config = transformers.Qwen3Config(vocab_size=259, eos_token_id=0, pad_token_id=0, bos_token_id=None, **_SIZES)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


def _write_vision_model(folder: Path) -> None:
    """Write a tiny Qwen2.5-VL with a token for each byte, and a photo beside it."""
    from PIL import Image  # noqa: PLC0415 - an extra

    transformers: Any = import_module("transformers")
    _write_model(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens={"image_token": "<image>"})
    patches = {"patch_size": 4, "merge_size": 2}
    images = transformers.Qwen2VLImageProcessor(**patches, size={"shortest_edge": 64, "longest_edge": 1024})
    template = _TEMPLATE.replace(
        "{{ m.content }}",
        "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}",
    )
    videos = transformers.Qwen2VLVideoProcessor(**patches)
    processor = transformers.Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=template)
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_SIZES, "vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config={"hidden_size": 16, "num_heads": 2, "depth": 1, "out_hidden_size": 16, **_PATCHES},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    Image.new("RGB", (40, 24), (200, 100, 50)).save(folder.parent / "photo.png")


def _write_chats(folder: Path) -> None:
    turns = [("user", "What is {}?"), ("assistant", "It is {}.")]
    chats = [[{"role": role, "content": text.format(n)} for role, text in turns] for n in range(60)]
    _write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats])


def _train_runs(folder: Path) -> None:
    """Train the runs `sft`, and `qlora`, which has only adapters."""
    _write_model(folder / "base")
    _write_chats(folder)
    _write_lines(folder / "held_out.jsonl", [{"text": "one and two"}])
    common = 'job = "sft"\nsteps = 2\nmodel = {folder = "base"}\ndataset = {files = ["chats.jsonl"], length = 64}\n'
    common += "batch = {global_size = 4}\n"
    (folder / "sft.toml").write_text(common + 'run = {name = "sft"}\n')
    adapter = 'adapter = {rank = 2, base = "nf4", block_size = 8}\n'
    (folder / "qlora.toml").write_text(common + 'run = {name = "qlora"}\n' + adapter)
    run_commands("d9d-train sft.toml\nd9d-train qlora.toml", folder, 0)


def _write_base(folder: Path) -> None:
    _write_model(folder / "Qwen3-0.6B")


def _write_text_job(folder: Path) -> None:
    _write_base(folder)
    _write_chats(folder)


def _write_vision_job(folder: Path) -> None:
    _write_vision_model(folder / "Qwen2.5-VL-3B")


def _write_plan(folder: Path) -> None:
    (folder / "train.toml").write_text(_PLANNED)
    _write_lines(folder / "corpus.jsonl", [{"text": f"document {n}"} for n in range(40)])
    (folder / "examples").symlink_to(ROOT / "examples")


def _write_texts(folder: Path) -> None:
    (folder / "books").mkdir()
    for number in range(100):
        (folder / "books" / f"{number}.txt").write_text(f"the book number {number}")
    _write_lines(folder / "crawl.jsonl", [{"text": f"the page number {n}"} for n in range(100)])
    trained = "d9d-tokenize books --tokenizer tokenizer.json --train-vocab-size 300 --output trained"
    run_commands(trained, folder, 0)


PAGE_FILES: dict[str, Callable[[Path], None]] = {
    "docs/inference.md": _train_runs,
    "docs/choosing_a_layout.md": _write_plan,
    "docs/quickstart.md": _write_base,
    "docs/text_jobs.md": _write_text_job,
    "docs/vision_language_models.md": _write_vision_job,
    "docs/which_layout.md": _write_plan,
    "docs/your_dataset.md": _write_texts,
}
