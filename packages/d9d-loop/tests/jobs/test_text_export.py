"""Special tokens in the exports of language models: `generate` ends where training data end."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from text_job_cases import GROUPED, byte_tokenizer, job_config, train, write_lines
from tokenizers import Tokenizer, models, pre_tokenizers

from d9d_loop.jobs.text_export import end_ids
from d9d_loop.result import load_result

transformers = pytest.importorskip("transformers", reason="the oracle")

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS = ["<|im_end|>", "<|user|>", "<|assistant|>", "<|doc|>"]  # ids 259 to 262; the base has the ids 0, 1 and 2
NAMED = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}


def _save_tokenizer(folder: Path, backend: Tokenizer, **named: str) -> Path:
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **named)
    fast.save_pretrained(folder)
    return folder


def _with_turns() -> Tokenizer:
    backend = byte_tokenizer(adds_special=False)
    backend.add_special_tokens(TURNS)
    return backend


def _reordered() -> Tokenizer:
    letters = [*TURNS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(TURNS)
    return backend


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose end token is not the one that ends the turns of its chat template."""
    folder = tmp_path_factory.mktemp("base")
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    config = transformers.Qwen3Config(vocab_size=264, **ids, **GROUPED)
    model = transformers.Qwen3ForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(**ids, do_sample=True, temperature=0.6)
    model.save_pretrained(folder)
    return _save_tokenizer(folder, _with_turns(), **NAMED)


# Tokenizer of the job, job, options; expected: (bos, eos, pad) of config.json, end tokens of generate and d9d-chat.
CASES: dict[str, tuple[str, str, dict[str, Any], tuple[int | None, ...], set[int]]] = {
    "turns of chats": ("base", "sft", {}, (0, 2, 1), {2, 259}),
    "end of texts": ("base", "pretrain", {"end_token": "<|doc|>"}, (0, 2, 1), {2, 262}),
    "other names": ("named", "sft", {}, (0, 259, 262), {2, 259}),
    "other vocabulary": ("reordered", "sft", {}, (None, 0, 3), {0}),
    "no end token": ("unnamed", "pretrain", {}, (None, None, None), set()),
    "new model": ("new-named", "sft", {}, (0, 259, 262), {259}),
    "new model without names": ("new-plain", "pretrain", {"end_token": "<|doc|>"}, (None, 262, None), {262}),
    "new model with an entry": ("new-entry", "pretrain", {"end_token": "<|doc|>"}, (0, 5, 262), {5}),
}


@pytest.mark.sample(
    "turns of chats-packing",
    "other vocabulary-rows",
    "no end token-rows",
    "new model without names-rows",
)
@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packing"])
@pytest.mark.parametrize("case", CASES)
def test_an_export_ends_where_the_training_data_end(case: str, packing: bool, base: Path, tmp_path: Path) -> None:
    kind, job, options, expected, ends = CASES[case]
    if packing or kind.startswith("new"):
        pytest.importorskip("d9d_modules", reason="own models of the family")
    tokenizers = {
        "named": (_with_turns, {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|doc|>"}),
        "reordered": (_reordered, {"eos_token": "<|im_end|>", "pad_token": "<|doc|>"}),
        "unnamed": (_reordered, {}),
        "plain": (_with_turns, {}),
    }
    name = kind.removeprefix("new-").replace("entry", "named")
    model: dict[str, Any] = {"family": "qwen3", **GROUPED} if kind.startswith("new") else {"folder": base}
    if name != "base":
        make, named = tokenizers[name]
        model["tokenizer"] = _save_tokenizer(tmp_path / "tokenizer", make(), **named)
    model |= {"eos_token_id": 5} if kind == "new-entry" else {}
    rows = [{"text": "some text", "prompt": "q", "completion": "answer"}] * 8
    file = write_lines(tmp_path / "rows.jsonl", rows)
    dataset = {"files": [file], "length": 16, "packing": packing, **options}
    config = job_config(job, model, file, tmp_path, dataset=dataset)
    export = train(config) / "export"
    found = transformers.AutoConfig.from_pretrained(export)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == expected
    loaded = transformers.AutoModelForCausalLM.from_pretrained(export)
    stops = loaded.generation_config.eos_token_id
    assert {*(stops if isinstance(stops, list) else [stops])} - {None} == ends
    assert ends <= set(end_ids(config)), "samples of an evaluation"
    result = load_result(export, device=torch.device("cpu"))
    assert ends <= set(result.stop_tokens)
    if kind == "base":
        assert loaded.generation_config.temperature == 0.6


def test_a_base_that_names_only_its_end_token_gets_the_end_of_turns(base: Path, tmp_path: Path) -> None:
    model = shutil.copytree(base, tmp_path / "model", ignore=shutil.ignore_patterns("generation_config.json"))
    config = json.loads((model / "config.json").read_text())
    del config["bos_token_id"], config["pad_token_id"]
    (model / "config.json").write_text(json.dumps(config))
    file = write_lines(tmp_path / "rows.jsonl", [{"prompt": "q", "completion": "answer"}] * 8)
    run = train(job_config("sft", {"folder": model}, file, tmp_path))
    assert transformers.GenerationConfig.from_pretrained(run / "export").eos_token_id == [2, 259]


def test_a_chat_ends_with_the_turn_of_its_template(base: Path) -> None:
    """In any folder, also if `generation_config.json` does not list this token."""
    assert load_result(base, device=torch.device("cpu")).stop_tokens == (2, 259)


@pytest.mark.parametrize("has_own", [False, True])
def test_a_finished_job_is_continued_with_the_same_end_tokens(has_own: bool, base: Path, tmp_path: Path) -> None:
    """The base has no generation_config.json, so that only the first export wrote one."""
    model = shutil.copytree(base, tmp_path / "model", ignore=shutil.ignore_patterns("generation_config.json"))
    file = write_lines(tmp_path / "rows.jsonl", [{"prompt": "q", "completion": "answer"}] * 8)
    named = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|doc|>"}
    own = {"tokenizer": _save_tokenizer(tmp_path / "own", _with_turns(), **named)} if has_own else {}
    for steps in (1, 2):
        run = train(job_config("sft", {"folder": model, **own}, file, tmp_path, steps=steps))
        found = transformers.GenerationConfig.from_pretrained(run / "export")
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (0, [2, 259], 262 if has_own else 1)
