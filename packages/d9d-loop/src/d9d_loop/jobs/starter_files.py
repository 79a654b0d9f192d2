"""Commented configuration files to start from: `d9d-train --init sft`."""

from collections.abc import Mapping
from pathlib import Path

from d9d_dist import UserError

_TEMPLATE = """# {title}: d9d-train {job}.toml
# On 4 ranks: torchrun --nproc-per-node 4 -m d9d_loop {job}.toml
job = "{job}"
steps = {steps}

{sections}
[run]
name = "{job}"                     # written to runs/{job}

[batch]
global_size = 16                # samples per optimizer step, over all ranks
microbatch_size = 2             # samples per forward pass on one rank

[optimizer]
learning_rate = {rate}

[lr_schedule]
warmup_steps = 10
"""

_SECTIONS = {
    "sft": """[model]
folder = "Qwen3-0.6B"           # hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B

[dataset]
files = ["chats.jsonl"]         # lines with messages, conversations, or prompt and completion
held_out = 0.05                 # fraction of the samples held out for evaluation
length = 1024                   # tokens

[adapter]                       # without this section, all parameters are trained
kind = "lora"
rank = 16
""",
    "pretrain": """[model]
family = "qwen3"                # a model_type of transformers; the other keys are entries of its config.json
hidden_size = 256
intermediate_size = 768
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 64
# tokenizer = "Qwen3-0.6B"      # folder with tokenizer.json; without it, each byte is a token

[dataset]
files = ["corpus.jsonl"]        # or .parquet, .csv, .txt, or a token file of d9d-tokenize
held_out = 0.05
length = 512
end_token = "<|endoftext|>"     # ends each text; a token of the tokenizer
""",
    "classify": """[model]
folder = "bert-base-uncased"    # encoder or decoder; the classification head is new

[dataset]
files = ["reviews.jsonl"]       # lines with text and label
held_out = 0.1
length = 256
""",
    "embed": """[model]
folder = "Qwen3-0.6B"           # encoder or decoder

[embedding]
pooling = "last"                # or "mean", "first"
attention = "model"             # "bidirectional": each token of a decoder attends to all tokens of its text
group = 8                       # pairs in a sample; the documents of the other pairs are negatives

[dataset]
files = ["pairs.jsonl"]         # lines with query and positive
held_out = 0.1
length = 256
""",
}

_HEADS = {
    "sft": {"title": "Fine-tune a chat model with LoRA", "steps": 200, "rate": "2e-4"},
    "pretrain": {"title": "Pretrain a new language model", "steps": 1000, "rate": "1e-3"},
    "classify": {"title": "Train a classifier of texts", "steps": 300, "rate": "5e-5"},
    "embed": {"title": "Train text embeddings on pairs", "steps": 300, "rate": "2e-5"},
}

STARTERS: Mapping[str, str] = {
    job: _TEMPLATE.format(job=job, sections=_SECTIONS[job], **head) for job, head in _HEADS.items()
}
"""Content of the starter file of each job."""


def write_starter(job: str, folder: Path) -> Path:
    """Write the starter file of a job to a folder, as `JOB.toml`, and return its path.

    Raises:
        UserError: If there is no such job, or the file exists.
    """
    if job not in STARTERS:
        raise UserError(f"--init {job}: no such job; expected one of {', '.join(STARTERS)}.")
    path = folder / f"{job}.toml"
    if path.exists():
        raise UserError(f"{path} already exists; rename or remove it first.")
    path.write_text(STARTERS[job], encoding="utf-8")
    return path
