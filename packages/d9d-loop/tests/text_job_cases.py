"""Small folders of `transformers` families, files with samples, and configurations of jobs, for tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from d9d_loop.jobs import TextJobConfig, text_trainer

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 8}
SPECIAL = ("<s>", "<pad>", "</s>")
IDS: dict[str, Any] = {"vocab_size": 259, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}


def byte_tokenizer(*, adds_special: bool = True) -> Tokenizer:
    """Return a tokenizer with the ids 0 <s>, 1 <pad>, 2 </s>, and one token per byte."""
    letters = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    if adds_special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    return tokenizer


def save_folder(
    folder: Path,
    config: Any,
    architecture: str,
    *,
    dtype: torch.dtype = torch.float32,
    names: Sequence[str | None] = SPECIAL,
) -> Path:
    """Save a new model of a family with the tokenizer; `names` are its tokens for start, padding and end."""
    import transformers

    special = dict(zip(("bos_token", "pad_token", "eos_token"), names, strict=False))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **special)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    getattr(transformers, architecture)(config).to(dtype).save_pretrained(folder)
    return folder


def write_lines(path: Path, samples: list[dict[str, Any]]) -> Path:
    """Write samples as JSON lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in samples))
    return path


def labeled(path: Path, labels: list[Any], count: int = 8) -> Path:
    """Write texts of different lengths with labels in turn."""
    samples = [{"text": "ab" * (1 + n), "label": labels[n % len(labels)]} for n in range(count)]
    return write_lines(path, samples)


def job_config(job: str, model: dict[str, Any], file: Path, runs: Path, **more: Any) -> TextJobConfig:
    """Return the configuration of a job of one step of four samples."""
    values: dict[str, Any] = {
        "job": job,
        "steps": 1,
        "model": model,
        "dataset": {"files": [file], "length": 32},
        "run": {"folder": runs, "name": job},
        "batch": {"global_size": 4, "microbatch_size": 4},
        "optimizer": {"learning_rate": 1e-2},
        "logging": {"every": 1, "progress": False},
        "resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}},
    }
    return TextJobConfig.model_validate({**values, **more})


def train(config: TextJobConfig) -> Path:
    """Train a job, and return its run folder."""
    return text_trainer(config).train().run_dir
