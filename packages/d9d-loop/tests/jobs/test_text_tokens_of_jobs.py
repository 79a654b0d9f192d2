"""Cuts, dates, tokenizers of exports and vocabularies of jobs on text."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from d9d_dist import UserError
from d9d_loop.data import TokenFile, read_chat_tokenizer, read_conversation, read_text_tokenizer
from d9d_loop.data.__main__ import main
from d9d_loop.jobs import TextJobConfig, text_trainer
from d9d_loop.jobs.text_data import chat_rows, labeled_rows, text_windows

pytestmark = pytest.mark.usefixtures("trl_without_wandb")

SPECIAL = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def _tokenizer(folder: Path, *, template: str = TEMPLATE, closing: bool = False, reverse: bool = False) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    backend = Tokenizer(models.BPE(vocab={each: n for n, each in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if closing:
        backend.post_processor = processors.TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", 257)])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def _config(job: str, tokenizer: Path | None, rows: list[Any], folder: Path, **more: Any) -> TextJobConfig:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"files": [folder / "rows.jsonl"], "length": 16, **more.pop("dataset", {})}
    values = {
        "job": job,
        "steps": 1,
        "model": {"family": "qwen3", "tokenizer": tokenizer, **SIZES, **more.pop("model", {})},
        "run": {"folder": folder / "runs", "name": "run"},
        "batch": {"global_size": 2, "microbatch_size": 2},
        "optimizer": {"learning_rate": 1e-3},
        "logging": {"progress": False},
        "resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}},
    }
    return TextJobConfig.model_validate({**values, "dataset": dataset, **more})


@pytest.mark.parametrize("packing", [False, True])
def test_conversations_that_the_length_cuts_are_counted(packing: bool, tmp_path: Path) -> None:
    rows = [{"prompt": "q" * (20 if n % 4 else 2), "completion": "a" * (30 if n == 8 else 3)} for n in range(12)]
    said: list[str] = []
    folder = _tokenizer(tmp_path / "model")
    data = chat_rows(_config("sft", folder, rows, tmp_path, dataset={"packing": packing}), said.append)
    assert said == [
        "of 12 conversations, 9 are dropped, because they have no label within 16 tokens, and 1 are truncated. "
        "Increase dataset.length to keep them."
    ]
    stream = data.training(seed=0)
    samples = [stream.read(entry) for entry in stream.cursor().take(3)]
    assert all((sample["labels"] != -100).any() for sample in samples)
    assert packing or max(len(sample["input_ids"]) for sample in samples) == 15  # 16 tokens: 15 inputs, 15 labels
    long = _config("sft", folder, [rows[1]] * 4, tmp_path, dataset={"packing": packing})
    with pytest.raises(UserError, match="all 4 conversations are dropped: none has a label within its first 16 tokens"):
        chat_rows(long)


@pytest.mark.parametrize(("length", "expected"), [(16, 16), (5, 5)])
def test_a_cut_keeps_the_closing_token(length: int, expected: int, tmp_path: Path) -> None:
    folder = _tokenizer(tmp_path / "model", closing=True)
    rows = [{"text": "x" * 40, "label": n % 2} for n in range(2)]
    data, _ = labeled_rows(_config("classify", folder, rows, tmp_path, dataset={"length": length}))
    stream = data.training(seed=0)
    ids = stream.read(stream.cursor().take(1)[0])["input_ids"].tolist()
    assert len(ids) == expected
    assert ids[-1] == 257


def test_a_template_prints_the_date_of_the_job(tmp_path: Path) -> None:
    folder = _tokenizer(tmp_path / "model", template="{{ strftime_now('%d %B %Y') }}" + TEMPLATE)
    rows = [{"prompt": "q", "completion": "a"}] * 2
    said: list[str] = []
    chat_rows(_config("sft", folder, rows, tmp_path, dataset={"length": 64, "date": "2026-05-01"}), said.append)
    assert said == ["the chat template prints 2026-05-01 as the date of today (dataset.date)."]
    default, dated = read_chat_tokenizer(folder), read_chat_tokenizer(folder, today=date(2026, 5, 1))
    assert default(read_conversation(rows[0])).text.startswith("26 July 2024")
    assert dated(read_conversation(rows[0])).text.startswith("01 May 2026")
    assert default.identity() != dated.identity()


def test_the_cache_holds_the_tokens_of_each_tokenizer(tmp_path: Path) -> None:
    rows = [{"text": "to be or not to be"}] * 4
    first = []
    for name, reverse in (("one", False), ("two", True)):
        folder = _tokenizer(tmp_path / name, reverse=reverse)
        first.append(text_windows(_config("pretrain", folder, rows, tmp_path)).training(seed=0).read(0))
        ids = read_text_tokenizer(folder).encode(rows[0]["text"])
        assert first[-1]["input_ids"].tolist() == ids[:16]
    ended = text_windows(_config("pretrain", folder, rows, tmp_path, dataset={"end_token": "<|end|>"}))
    assert ended.training(seed=0).read(1)["input_ids"][2] == 257
    with pytest.raises(UserError, match=r"the tokenizer has no end token '</s>'; .* with dataset.end_token"):
        text_windows(_config("pretrain", folder, rows, tmp_path, dataset={"end_token": "</s>"}))


@pytest.mark.parametrize("job", ["pretrain", "sft"])
@pytest.mark.parametrize("packing", [False, True])
def test_a_tokenizer_larger_than_the_embedding_is_an_error(job: str, packing: bool, tmp_path: Path) -> None:
    rows = [{"text": "to be or not to be", "prompt": "q", "completion": "a"}] * 4
    folder = _tokenizer(tmp_path / "model")
    config = _config(job, folder, rows, tmp_path, dataset={"packing": packing}, model={"vocab_size": 258})
    with pytest.raises(UserError, match="the tokenizer has 260 tokens, but the embedding of the model has 258"):
        text_trainer(config)


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_the_export_has_the_tokenizer_of_the_job(kind: str, tmp_path: Path) -> None:
    import transformers

    source = None
    if kind == "file":
        source = _tokenizer(tmp_path / "model", reverse=True) / "bpe.json"
        (tmp_path / "model" / "tokenizer.json").rename(source)
    rows = [{"text": "to be or not to be"}] * 4
    config = _config("pretrain", source, rows, tmp_path)
    text_trainer(config).train()
    run = text_trainer(config.model_copy(update={"steps": 2})).train().run_dir  # replaces the export
    auto: Any = transformers.AutoTokenizer.from_pretrained(run / "export")
    expected = list(b"Gr\xc3\xb6\xc3\x9fe") if source is None else read_text_tokenizer(source).encode("Größe")
    assert auto("Größe").input_ids == expected


@pytest.mark.parametrize("end_token", [None, "<|user|>"])
def test_a_job_has_the_tokens_that_the_command_writes(end_token: str | None, tmp_path: Path) -> None:
    """Empty texts are skipped, although the tokenizer adds a token to each text."""
    tokenizer = _tokenizer(tmp_path / "tokenizer", closing=True)
    texts = ["ab", "", "a longer text", "", "c" * 40]
    config = _config(
        "pretrain", tokenizer, [{"text": text} for text in texts], tmp_path, dataset={"end_token": end_token}
    )
    options = [] if end_token is None else [f"--end-token={end_token}"]
    main([str(tmp_path / "rows.jsonl"), f"--output={tmp_path / 'tokens'}", f"--tokenizer={tokenizer}", *options])
    dataset = config.dataset.model_copy(update={"files": (tmp_path / "tokens",)})
    rows, of_file = (
        text_windows(each).training(seed=0) for each in (config, config.model_copy(update={"dataset": dataset}))
    )
    assert rows.identity() == of_file.identity()
    file = TokenFile(tmp_path / "tokens")
    end = [] if end_token is None else [258]
    ids = [[*read_text_tokenizer(tokenizer).encode(text), *end] for text in texts if text]
    assert [file[n]["tokens"].tolist() for n in range(len(file))] == ids


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b"}]
LONG = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "c" * 40}]
SAMPLES: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": TURNS}, {"messages": LONG}, {"messages": [*TURNS, *LONG]}],
    "turns": [{"prompt": TURNS[:1], "completion": TURNS[1:]}, {"prompt": LONG[:1], "completion": LONG[1:]}],
    "texts": [{"prompt": "two and two is", "completion": " four"}, {"prompt": "q", "completion": "x" * 40}],
}


def _trl(folder: Path, samples: list[dict[str, Any]], work: Path, **options: Any) -> list[list[list[int]]]:
    """Return the tokens and labels of SFTTrainer."""
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=len(tokenizer), **SIZES))
    args = trl.SFTConfig(output_dir=str(work), max_length=16, report_to=[], use_cpu=True, bf16=False, **options)
    dataset = datasets.Dataset.from_list(samples)
    trainer = trl.SFTTrainer(model, args=args, train_dataset=dataset, processing_class=tokenizer)
    return [[row["input_ids"], row["labels"]] for row in trainer.train_dataset]


def _ours(folder: Path, samples: list[dict[str, Any]], work: Path, **dataset: Any) -> list[list[list[int]]]:
    """Return the tokens and labels of a job, in the form of `transformers`, whose models shift the labels."""
    config = _config("sft", folder, samples, work, dataset=dataset, data={"shuffle": False})
    stream = chat_rows(config).training(seed=0)
    rows = [stream.read(entry) for entry in stream.cursor().take(len(samples))]
    return [[row["input_ids"].tolist(), row["labels"].tolist()] for row in rows]


def _shifted(rows: list[list[list[int]]]) -> list[list[list[int]]]:
    return [[ids[:-1], labels[1:]] for ids, labels in rows]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLES)
def test_tokens_and_labels_equal_those_of_trl(kind: str, tmp_path: Path) -> None:
    folder = _tokenizer(tmp_path / "model", template=CHATML)
    ours = _ours(folder, SAMPLES[kind], tmp_path, labels="all", text_pairs="joined")
    assert ours == _shifted(_trl(folder, SAMPLES[kind], tmp_path / "trl"))


def test_all_labels_and_joined_texts(tmp_path: Path) -> None:
    folder = _tokenizer(tmp_path / "model", template=CHATML)
    tokenizer = read_chat_tokenizer(folder, labels="all", text_pairs="joined")
    joined, whole = (tokenizer(read_conversation(SAMPLES[kind][0])) for kind in ("texts", "messages"))
    assert [text[slice(*span)] for text, (span,) in ((each.text, each.spans) for each in (joined, whole))] == [
        " four<|end|>",
        "<|user|>q<|end|>\n<|assistant|>a b<|end|>\n",
    ]
    assert sum(joined.mask) == 6
    assert all(whole.mask)
    first_only = _tokenizer(tmp_path / "first", template="{{ messages[0].content }}<|end|>")
    with pytest.raises(UserError, match="no token follows the prompt; expected a completion"):
        read_chat_tokenizer(first_only, labels="all")(read_conversation(SAMPLES["turns"][0]))
    with pytest.raises(ValidationError, match=r"dataset.labels is set, but job = pretrain; expected job = sft"):
        _config("pretrain", folder, [{"text": "a"}], tmp_path, dataset={"labels": "all"})
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match='text_pairs = "joined", but the tokenizer names no eos_token'):
        read_chat_tokenizer(folder, text_pairs="joined")
