"""Wall and CPU time of fine-tuning with LoRA from a file, compared with TRL, from the start of the process to its end.

    uv run --with trl python packages/d9d-loop/benchmarks/sft_pair.py --output sft_pair.json
    uv run --with trl python packages/d9d-loop/benchmarks/sft_pair.py --processes 2

Both train the same folder, a Qwen3 with random weights, for one epoch on the same prompts and completions, which both
pack, with the same LoRA, batch and learning rate, and write the adapters. Tests compare the tokens and labels of both
libraries. They run in pairs, every other one in reverse order. Reported are the seconds, and the median ratios.
"""

import argparse
import json
import os
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
TEMPLATE = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"


def make_folder(folder: Path, *, samples: int, size: int) -> None:
    """Write a model of random weights, its tokenizer, and the samples, made of the pages of this project."""
    transformers: Any = import_module("transformers")
    tokenizers: Any = import_module("tokenizers")
    pages = sorted((Path(__file__).parents[3] / "docs").glob("*.md"))
    texts = [part for page in pages for part in page.read_text(encoding="utf-8").split("\n\n") if len(part) > 80]
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=8192, special_tokens=["<eos>", "<pad>"])
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size // 4,
        eos_token_id=0,
        pad_token_id=1,
    )
    transformers.set_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    pairs = [{"prompt": one[: len(one) // 3], "completion": one[len(one) // 3 :]} for one in texts]
    chosen = [pairs[index % len(pairs)] for index in range(samples)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chosen), encoding="utf-8")


THEIRS = """
import sys, datasets, peft, trl
folder, rows, length, rank, rate, processes = sys.argv[1], *map(float, sys.argv[2:])
samples = datasets.Dataset.from_json(folder + "/samples.jsonl", cache_dir=folder + "/cache")
args = trl.SFTConfig(
    folder + "/trl", num_train_epochs=1, per_device_train_batch_size=1, max_length=int(length), packing=True,
    gradient_accumulation_steps=int(rows / processes), learning_rate=rate, max_grad_norm=1.0, optim="adamw_torch_fused",
    lr_scheduler_type="constant", logging_steps=10, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
    gradient_checkpointing=False, disable_tqdm=True,
)
config = peft.LoraConfig(r=int(rank), lora_alpha=int(rank), target_modules="all-linear", task_type="CAUSAL_LM")
trainer = trl.SFTTrainer(folder + "/model", args=args, train_dataset=samples, peft_config=config)
trainer.train()
trainer.save_model(folder + "/trl")
print(len(trainer.train_dataset), "rows")
"""


def command(name: str, folder: Path, processes: int) -> list[str]:
    """Return the command of a run."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    if name == "trl":
        (folder / "theirs.py").write_text(THEIRS, encoding="utf-8")
        words = [str(folder / "theirs.py"), str(folder), *map(str, (ROWS, LENGTH, RANK, RATE, processes))]
        return [sys.executable, *(launch if processes > 1 else []), *words]
    (folder / "sft.toml").write_text(
        f"""
job = "sft"
epochs = 1
run = {{ folder = "{folder}", name = "d9d" }}
model.folder = "{folder / "model"}"
dataset = {{ files = ["{folder / "samples.jsonl"}"], length = {LENGTH}, packing = true }}
adapter = {{ kind = "lora", rank = {RANK}, alpha = {RANK} }}
batch = {{ global_size = {ROWS}, microbatch_size = 1 }}
optimizer = {{ learning_rate = {RATE}, weight_decay = 0.0, betas = [0.9, 0.999] }}
lr_schedule = {{ kind = "transformers", name = "constant" }}
gradients.max_norm = 1.0
logging.every = 10
""",
        encoding="utf-8",
    )
    return [sys.executable, *(launch if processes > 1 else []), "-m", "d9d_loop", str(folder / "sft.toml")]


def run(name: str, folder: Path, processes: int) -> dict[str, float]:
    """Return wall and CPU seconds of a run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "D9D_DEVICE": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    words = command(name, folder, processes)
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"d9d": [], "trl": []}
    for repeat in range(arguments.repeats):
        for name in sorted(found, reverse=repeat % 2 == 1):
            with tempfile.TemporaryDirectory() as folder:
                make_folder(Path(folder), samples=arguments.samples, size=arguments.size)
                found[name].append(run(name, Path(folder), arguments.processes))
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
