"""Wall and CPU time of fine-tuning with LoRA from a file, compared with TRL, from the start of the process to its end.

    uv run --with trl python packages/d9d-loop/benchmarks/sft_pair.py --output sft_pair.json
    uv run --with trl python packages/d9d-loop/benchmarks/sft_pair.py --processes 2
    uv run --with trl python packages/d9d-loop/benchmarks/sft_pair.py --images --samples 200

Both train the same folder, a Qwen3 with random weights, for one epoch on the same prompts and completions, which both
pack, with the same LoRA, batch and learning rate, and write the adapters. With `--images`, it is a Qwen2.5-VL, each
prompt has an image, and neither packs. Tests compare the tokens, pixels and labels of both libraries. They run in
pairs, every other one in reverse order. Reported are the seconds, and the median ratios.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

ROWS, LENGTH, RANK, RATE = 4, 512, 16, 2e-4
VISION_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"


def make_folder(folder: Path, *, samples: int, size: int, images: bool) -> None:
    """Write a model of random weights, its tokenizer, and the samples, made of the pages of this project."""
    transformers: Any = import_module("transformers")
    tokenizers: Any = import_module("tokenizers")
    pages = sorted((Path(__file__).parents[3] / "docs").glob("*.md"))
    texts = [part for page in pages for part in page.read_text(encoding="utf-8").split("\n\n") if len(part) > 80]
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=8192, special_tokens=["<eos>", "<pad>", *VISION_TOKENS])
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **special)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": size,
        "intermediate_size": 3 * size,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    transformers.set_seed(0)
    # An answer begins with a letter: this tokenizer would join other characters with the end of the generation prompt.
    cuts = [(text, re.search(r"[a-z]", text[len(text) // 3 :])) for text in texts]
    pairs = [
        {"prompt": text[: len(text) // 3 + cut.start()], "completion": text[len(text) // 3 + cut.start() :]}
        for text, cut in cuts
        if cut is not None
    ]
    chosen = [pairs[index % len(pairs)] for index in range(samples)]
    if images:
        _save_vision_model(folder, tokenizer, sizes)
        chosen = [_with_image(folder, index, each) for index, each in enumerate(chosen)]
    else:
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder / "model")
        config = transformers.Qwen3Config(**sizes, head_dim=size // 4)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    (folder / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chosen), encoding="utf-8")


def _save_vision_model(folder: Path, tokenizer: Any, sizes: dict[str, Any]) -> None:
    transformers: Any = import_module("transformers")
    patches = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% for part in m.content %}{% if part.type == 'image' %}"
    )
    template += (
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}<eos>{% endfor %}"
    )
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    processor = transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(**patches, size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112}),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(**patches),
        chat_template=template,
    )
    processor.save_pretrained(folder / "model")
    width = sizes["hidden_size"]
    heads = width // sizes["num_attention_heads"] // 2
    rope = {"rope_type": "default", "mrope_section": [heads // 2, heads // 4, heads // 4], "rope_theta": 1e4}
    tower = {
        "hidden_size": width // 2,
        "intermediate_size": width,
        "num_heads": 4,
        "depth": 2,
        "out_hidden_size": width,
    }
    ids = [tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS]
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = transformers.Qwen2_5_VLConfig(
        text_config={**sizes, "rope_parameters": rope},
        vision_config={**tower, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]},
        **dict(zip(names, ids, strict=True)),
    )
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder / "model")


def _with_image(folder: Path, index: int, pair: dict[str, str]) -> dict[str, Any]:
    """Return a conversation about an image of random pixels."""
    file = folder / "images" / f"{index % 50}.png"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        pixels = import_module("numpy").random.default_rng(index).integers(0, 256, (112, 112, 3), dtype="uint8")
        import_module("PIL.Image").fromarray(pixels).save(file)
    question = [{"type": "image"}, {"type": "text", "text": pair["prompt"]}]
    answer = [{"type": "text", "text": pair["completion"]}]
    return {
        "images": [str(file)],
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
    }


THEIRS = """
import sys, datasets, peft, trl
folder, rows, length, rank, rate, processes, images = sys.argv[1], *map(float, sys.argv[2:])
samples = datasets.Dataset.from_json(folder + "/samples.jsonl", cache_dir=folder + "/cache")
if images:
    samples = samples.cast_column("images", datasets.Sequence(datasets.Image()))
args = trl.SFTConfig(
    folder + "/trl", num_train_epochs=1, per_device_train_batch_size=1, packing=not images,
    max_length=None if images else int(length), dataloader_pin_memory=False,
    gradient_accumulation_steps=int(rows / processes), learning_rate=rate, max_grad_norm=1.0, optim="adamw_torch_fused",
    lr_scheduler_type="constant", logging_steps=10, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
    gradient_checkpointing=False, disable_tqdm=True,
)
config = peft.LoraConfig(r=int(rank), lora_alpha=int(rank), task_type="CAUSAL_LM",
    target_modules=r".*language_model.*_proj" if images else "all-linear")
trainer = trl.SFTTrainer(folder + "/model", args=args, train_dataset=samples, peft_config=config)
trainer.train()
trainer.save_model(folder + "/trl")
print(len(trainer.train_dataset), "rows")
"""


def command(name: str, folder: Path, processes: int, *, images: bool) -> list[str]:
    """Return the command of a run."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    if name == "trl":
        (folder / "theirs.py").write_text(THEIRS, encoding="utf-8")
        words = [str(folder / "theirs.py"), str(folder), *map(str, (ROWS, LENGTH, RANK, RATE, processes, int(images)))]
        return [sys.executable, *(launch if processes > 1 else []), *words]
    target = ', target = "language_model.*_proj$"' if images else ""
    (folder / "sft.toml").write_text(
        f"""
job = "{"vision" if images else "sft"}"
epochs = 1
run = {{ folder = "{folder}", name = "d9d" }}
model.folder = "{folder / "model"}"
dataset = {{ files = ["{folder / "samples.jsonl"}"], length = {LENGTH}, packing = {str(not images).lower()} }}
adapter = {{ kind = "lora", rank = {RANK}, alpha = {RANK}{target} }}
batch = {{ global_size = {ROWS}, microbatch_size = 1 }}
optimizer = {{ learning_rate = {RATE}, weight_decay = 0.0, betas = [0.9, 0.999] }}
lr_schedule = {{ kind = "transformers", name = "constant" }}
gradients.max_norm = 1.0
logging.every = 10
""",
        encoding="utf-8",
    )
    return [sys.executable, *(launch if processes > 1 else []), "-m", "d9d_loop", str(folder / "sft.toml")]


def run(name: str, folder: Path, processes: int, *, images: bool) -> dict[str, float]:
    """Return wall and CPU seconds of a run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "D9D_DEVICE": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    words = command(name, folder, processes, images=images)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{name} ended with code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return {"wall": wall, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=800)
    parser.add_argument("--size", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--images", action="store_true", help="train a vision-language model on images and texts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"d9d": [], "trl": []}
    for repeat in range(arguments.repeats):
        for name in sorted(found, reverse=repeat % 2 == 1):
            with tempfile.TemporaryDirectory() as folder:
                make_folder(Path(folder), samples=arguments.samples, size=arguments.size, images=arguments.images)
                found[name].append(run(name, Path(folder), arguments.processes, images=arguments.images))
    pairs = list(zip(found["d9d"], found["trl"], strict=True))
    result = {
        "processes": arguments.processes,
        "samples": arguments.samples,
        "seconds": {
            name: [{what: round(each[what], 2) for what in each} for each in runs] for name, runs in found.items()
        },
        "ratios": {
            what: round(statistics.median(ours[what] / theirs[what] for ours, theirs in pairs), 3)
            for what in ("wall", "cpu")
        },
    }
    print(json.dumps(result, indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
