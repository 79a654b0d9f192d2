"""Load exports of every family in other programs: equal logits, an error, or a note that is printed at export.

    uv run --no-sync python .ci/check_exports.py                    # all readers
    uv run --no-sync python .ci/check_exports.py ctranslate2        # readers whose names begin so

Each reader runs `read_exports.py` in an environment of its own, with pinned versions. Exports are those of d9d's own
models, and of `hugging_face_model` ("hf-..."), without a source folder, so that each entry of `config.json` is ours.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "integration_tests")]

import test_config_folders as folders  # noqa: E402
from read_exports import EXPECTED  # noqa: E402

from d9d_dist import StageInfo  # noqa: E402
from d9d_loop import hugging_face_model  # noqa: E402
from d9d_loop.model.export_notes import export_notes  # noqa: E402
from d9d_modules import from_pretrained_config  # noqa: E402
from d9d_state import save_model_state  # noqa: E402

_COMMON = ("torch==2.15.0", "safetensors==0.8.0", "numpy<3", "accelerate==1.15.0")
_V4, _V5 = "transformers==4.57.6", "transformers==5.23.0"
READERS = {
    "transformers 5": ("transformers", _V5),
    "transformers 4": ("transformers", _V4),
    "ctranslate2, transformers 5": ("ctranslate2", _V5, "ctranslate2==4.8.5"),
    "ctranslate2, transformers 4": ("ctranslate2", _V4, "ctranslate2==4.8.5"),
    "GGUF, transformers 5": ("gguf", _V5, "gguf==0.19.0"),
    "GGUF, transformers 4": ("gguf", _V4, "gguf==0.19.0"),
}
"""Script argument and packages of each reader."""

UNKNOWN_TO_4 = ("glm4_moe_lite", "qwen3_5_text", "qwen3_5_moe_text")
COMPARED = {
    "ctranslate2": (
        "llama",
        "llama-linear",
        "mistral-full",
        "qwen2",
        "qwen3",
        "qwen3-window",
        "hf-qwen3",
        "gemma3_text-short",
    ),
    "GGUF": ("llama", "llama-yarn", "mistral", "qwen2-window", "qwen3-window", "qwen3_moe", "gemma3_text", "hf-llama"),
}
"""Exports that each reader must load, so that an environment in which nothing loads is an error."""

AGAIN = ("llama-linear", "llama-longrope", "gemma3_text-linear")
"""Exports that `hugging_face_model` writes again, besides one of each family."""

LIMIT = 1e-4
"""Largest relative difference of logits in float32 that count as equal."""


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and configurations of the exports."""
    folders.SIZES["hidden_size"] = 32  # divided by the heads, the head dim, which some programs require
    for name in (each for each in folders.TYPES if each not in folders.VISION):
        base: dict[str, Any] = dict(folders._written(name)[0])
        rope: dict[str, Any] | None = base.get("rope_parameters")
        if rope is not None and "rope_theta" in rope:
            base["rope_parameters"] = {**rope, "rope_theta": 500.0}
        if name == "qwen3":
            base["head_dim"] = 128  # the reader of GGUF knows no other
        if name == "qwen3_moe":
            base["moe_intermediate_size"] = 768  # likewise
        yield name, base
        yield f"{name}-tied", {**base, "tie_word_embeddings": True}
        yield from ((f"{name}-{change}", config) for change, config in changes(name, base))


def changes(name: str, base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield RoPE scalings, windows and sizes of a family."""
    kinds = {
        "llama": tuple(folders.ROPES),
        "qwen2": ("yarn",),
        "mistral": ("yarn",),
        "qwen3": ("yarn", "llama3"),
        "qwen3_moe": ("yarn",),
    }
    plain = {key: value for key, value in base.items() if not key.startswith("rope_")}
    for kind in kinds.get(name, ()):
        rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 500.0, **folders.ROPES[kind]}
        for factors in ("short_factor", "long_factor"):
            if factors in rope:
                rope[factors] = [1.0 + 0.5 * index + (factors == "long_factor") for index in range(4)]
        length = {"max_position_embeddings": 16} if kind == "dynamic" else {}
        yield kind, {**plain, **length, "rope_parameters": rope}
    windows = {key: value for key, value in base.items() if key != "layer_types"}
    if name in ("qwen2", "qwen3", "qwen3_moe"):
        yield "window", {**windows, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    if name == "qwen3_moe":
        yield "unnormalized", {**base, "norm_topk_prob": False}
        yield "normalized", {**base, "norm_topk_prob": True}
    if name == "mistral":
        yield "full", {**base, "sliding_window": None}
    if name == "llama":
        released = {"rope_type": "llama3", "rope_theta": 5e5, **folders.ROPES["llama3"]}
        yield "8192", {**plain, "rope_parameters": {**released, "original_max_position_embeddings": 8192}}
        yield "head16", {**base, "head_dim": 16}
    if name == "gemma3_text":
        pattern = ["sliding_attention"] * 5 + ["full_attention"]
        short: dict[str, Any] = {
            **base,
            "sliding_window": 64,
            "query_pre_attn_scalar": 256,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "num_hidden_layers": 6,
            "layer_types": pattern,
        }
        yield "short", short
        yield "eps", {**short, "rms_norm_eps": 0.1}
        yield "scalar", {**short, "query_pre_attn_scalar": 9}
        yield "pattern", {**short, "layer_types": pattern[::-1]}
        full, local = (short["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention"))
        other, linear = {**local, "rope_theta": 50.0}, {**full, "rope_type": "linear", "factor": 8.0}
        yield "local", {**short, "rope_parameters": {"full_attention": full, "sliding_attention": other}}
        yield "linear", {**short, "rope_parameters": {"full_attention": linear, "sliding_attention": local}}


def write(folder: Path, config: dict[str, Any]) -> None:
    """Export a model of a configuration, with a tokenizer, and the logits in float64."""
    found = from_pretrained_config(config)
    torch.manual_seed(0)
    model = found.build(StageInfo())
    ones = "norm" in config["model_type"] or not config["model_type"].startswith(("gemma", "qwen3_5", "qwen3_next"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name and ones), std=0.3)
    size = found.params.vocab_size
    ids = folders.IDS % size
    save_model_state(model, folder, found.state_mapper().inverse(), extra_files=found.export_files(), progress=False)
    with torch.no_grad():
        logits = model.double()(ids).float()
    save_file({"ids": ids.contiguous(), "logits": logits.contiguous()}, folder / EXPECTED)
    words = {"<|endoftext|>" if number == 2 else f"w{number}": number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))  # noqa: S106 - a token of texts
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_again(source: Path, folder: Path) -> None:
    """Export the model of a folder by `hugging_face_model`."""
    provider = hugging_face_model(source)
    model_class: Any = type(provider.build(StageInfo()))
    model = model_class.from_pretrained(source)
    mapper = provider.state_mapper(model)
    files = provider.export_files()
    save_model_state(model, folder, mapper and mapper.inverse(), extra_files=files, progress=False)
    for name in (EXPECTED, "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())


def read(name: str, exports: Path) -> dict[str, float | str]:
    """Return the errors of the logits, or the messages, of all exports in one reader."""
    script, *packages = READERS[name]
    command = ["uv", "run", "--isolated", "--no-project", "--python", "3.11"]
    command += [word for each in (*_COMMON, *packages) for word in ("--with", each)]
    words = [*command, "python", str(ROOT / ".ci" / "read_exports.py"), script, str(exports)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


def is_equal(outcome: float | str) -> bool:
    return not isinstance(outcome, str) and outcome <= LIMIT


def problems(outcomes: dict[str, dict[str, float | str]], exports: Path) -> Iterator[str]:
    """Yield the differences without a note, the notes without a difference, and what should load and does not."""
    for name, found in outcomes.items():
        program = name.partition(",")[0]
        others = [each for other, each in outcomes.items() if other.startswith(program)]
        for case, outcome in found.items():
            config = json.loads((exports / case / "config.json").read_text())
            has_note = any(note.reader == program for note in export_notes(config))
            must_load = case in COMPARED.get(program, ()) or program == "transformers 5"
            must_load |= program == "transformers 4" and config["model_type"] not in UNKNOWN_TO_4
            if isinstance(outcome, str):
                if must_load:
                    yield f"{name}: {case} does not load: {outcome}"
            elif outcome > LIMIT and not has_note:
                yield f"{name}: {case} differs by {outcome:.1e}, and no note is printed"
            elif has_note and all(is_equal(each[case]) for each in others):
                yield f"{name}: {case} is equal, and a note is printed"


def main(readers: list[str]) -> int:
    chosen = [name for name in READERS if not readers or name.startswith(tuple(readers))]
    outcomes: dict[str, dict[str, float | str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        exports = Path(temporary)
        for name, config in cases():
            write(exports / name, config)
            if "-" not in name or name in AGAIN:
                write_again(exports / name, exports / f"hf-{name}")
        for name in chosen:
            found = read(name, exports)
            outcomes[name] = found
            gaps = [each for each in found.values() if not isinstance(each, str)]
            equal = sum(gap <= LIMIT for gap in gaps)
            print(f"{name}: {equal} exports equal, {len(gaps) - equal} differ, {len(found) - len(gaps)} raise errors")
        failures = [*problems(outcomes, exports)]
    print("\n".join(failures) or "no problem")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
