"""Jobs on text from every source: ids, labels, masks and the first loss equal those of `transformers`, in float64.

The folder hides nothing: its padding id is not 0, the end token is in the middle of the vocabulary, the tokenizer adds
tokens around a text, and has added tokens and a stored truncation.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional as F

from d9d_dist.testing import run_ranks
from d9d_loop.data import tokenize_chats, tokenize_text
from d9d_loop.jobs import TextJobConfig, text_trainer
from d9d_loop.jobs.text_data import chat_rows, chat_tokenizer, packed_texts, text_windows
from d9d_metrics import read_metrics

pytest.importorskip("transformers", reason="the oracle")
pytest.importorskip("d9d_modules", reason="models of packed rows")

SPECIAL = ("<unk>", "<|end|>", "<s>", "<pad>", "<|user|>", "<|assistant|>")  # ids 256 to 261
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": 270,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "eos_token_id": 257,
    "bos_token_id": 258,
    "pad_token_id": 259,
}
LENGTH = 40
CHATS = [("q" * (3 + n % 5), f"answer <new> {n}" + "x" * (n * 7 % 41)) for n in range(6)]
TEXTS = [f"text {n}: größer <new> " + "ab<|end|>" * (n % 3 + 1) for n in range(6)]
SOURCES = ("jsonl", "two-files", "parquet", "save_to_disk", "token-file")
JOBS = ("sft", "sft-packed", "pretrain", "pretrain-packed", "classify", "embed")
ROUTES = [(job, source) for job in JOBS for source in SOURCES if source != "token-file" or job[:3] in ("sft", "pre")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("routes")
    letters = {each: n for n, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens(["<new>"])
    ends = [("<s>", 258), ("<|end|>", 257)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A <|end|>", special_tokens=ends)
    named = {"bos_token": "<s>", "eos_token": "<|end|>", "pad_token": "<pad>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **named)
    for name in ("lm", "classifier"):
        torch.manual_seed(3)
        config = transformers.Qwen3Config(**SIZES)
        model: Any = transformers.Qwen3ForCausalLM(config)
        if name == "classifier":
            model = transformers.Qwen3ForSequenceClassification(config)
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(torch.randn_like(each) * 0.3)
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
        backend.enable_truncation(8)
        backend.enable_padding(length=8, pad_id=0, pad_token="!")  # noqa: S106
        backend.save(str(folder / name / "tokenizer.json"))
        backend.no_truncation()
        backend.no_padding()
    return folder


def _rows(job: str) -> list[dict[str, Any]]:
    if job == "sft":
        return [{"prompt": prompt, "completion": answer} for prompt, answer in CHATS]
    if job == "embed":
        return [{"query": f"q{n}", "positive": f"{text} and more"} for n, text in enumerate(TEXTS)]
    return [{"text": text, "label": ("LABEL_0", "LABEL_1")[n % 2]} for n, text in enumerate(TEXTS)]


def _write(job: str, source: str, folder: Path, tmp_path: Path) -> list[Path]:
    rows = _rows(job)
    if source in ("jsonl", "two-files"):
        parts = [rows] if source == "jsonl" else [rows[:2], rows[2:]]
        paths = [tmp_path / f"{number}.jsonl" for number in range(len(parts))]
        for path, part in zip(paths, parts, strict=True):
            path.write_text("".join(json.dumps(row) + "\n" for row in part))
        return paths
    if source == "token-file":
        if job == "sft":
            tokenizer = chat_tokenizer(_config("sft", folder, [], tmp_path))
            tokenize_chats(rows, tmp_path / "tokens", tokenizer=tokenizer, max_length=LENGTH - 1, too_long="truncate")
        else:
            tokenize_text(TEXTS, tmp_path / "tokens", tokenizer=folder / "lm" / "tokenizer.json")
        return [tmp_path / "tokens"]
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(rows)
    path = tmp_path / ("rows.parquet" if source == "parquet" else "rows")
    (table.to_parquet if source == "parquet" else table.save_to_disk)(str(path))
    return [path]


def _config(job: str, folder: Path, files: list[Path], runs: Path, **more: Any) -> TextJobConfig:
    kind, _, packing = job.partition("-")
    values: dict[str, Any] = {
        "job": kind,
        "steps": 1,
        "model": {"folder": folder / ("classifier" if kind == "classify" else "lm")},
        "dataset": {"files": files or ["x"], "length": LENGTH, "packing": bool(packing)},
        "run": {"folder": runs, "name": "run"},
        "batch": {"global_size": 1 if kind == "embed" else 6, "microbatch_size": 1},
        "optimizer": {"learning_rate": 1e-3},
        "data": {"shuffle": False},
        "logging": {"every": 1, "progress": False},
        "export": False,
        "resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}},
        **({"embedding": {"group": 6}} if kind == "embed" else {}),
    }
    return TextJobConfig.model_validate({**values, **more})


def _documents(job: str, folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return the tokens and labels [n] of each document, by the tokenizer of `transformers` alone."""
    import transformers

    auto: Any = transformers.AutoTokenizer.from_pretrained(folder / "lm")
    found = []
    for prompt, answer in CHATS if job.startswith("sft") else [("", text) for text in TEXTS]:
        if job.startswith("sft"):
            before = auto(f"<|user|>{prompt}<|end|><|assistant|>", add_special_tokens=False).input_ids
            ids = [*before, *auto(f"{answer}<|end|>", add_special_tokens=False).input_ids][:LENGTH]
            labels = [-100] * len(before) + ids[len(before) :]
        else:
            ids = labels = auto(answer).input_ids
        found.append((torch.tensor(ids[:-1]), torch.tensor(labels[1:])))
    if job == "pretrain":  # windows over all documents
        ids = torch.cat([torch.cat([ids, labels[-1:]]) for ids, labels in found])
        windows = range(0, len(ids) - LENGTH, LENGTH)
        return [(ids[start : start + LENGTH], ids[start + 1 : start + LENGTH + 1]) for start in windows]
    if job == "pretrain-packed":  # parts of at most LENGTH positions
        found = [part for ids, labels in found for part in zip(ids.split(LENGTH), labels.split(LENGTH), strict=True)]
    return found


def _expected_loss(job: str, folder: Path) -> float:
    """Return the mean loss over all samples, each computed alone by the model of `transformers` in float64."""
    import transformers

    kind = job.partition("-")[0]
    if kind in ("sft", "pretrain"):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "lm", dtype=torch.float64)
        with torch.no_grad():
            pairs = [(model(ids[None]).logits[0], labels) for ids, labels in _documents(job, folder)]
        logits, labels = (torch.cat(each) for each in zip(*pairs, strict=True))
        return float(F.cross_entropy(logits, labels))
    auto: Any = transformers.AutoTokenizer.from_pretrained(folder / "lm")

    def ids_of(text: str) -> Tensor:
        return torch.tensor([auto(text, truncation=True, max_length=LENGTH).input_ids])

    with torch.no_grad():
        if kind == "classify":
            auto_class = transformers.AutoModelForSequenceClassification
            model = auto_class.from_pretrained(folder / "classifier", dtype=torch.float64)
            logits = torch.cat([model(ids_of(text)).logits for text in TEXTS])
            return float(F.cross_entropy(logits, torch.arange(len(TEXTS)) % 2))
        model = transformers.AutoModel.from_pretrained(folder / "lm", dtype=torch.float64)
        sides = [
            torch.stack([model(ids_of(row[side])).last_hidden_state[0].mean(0) for row in _rows("embed")])
            for side in ("query", "positive")
        ]
    queries, documents = (F.normalize(side, dim=-1) for side in sides)
    return float(F.cross_entropy(queries @ documents.mT / 0.05, torch.arange(len(queries))))


def _parts(row: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the ids and labels of each document of a packed row, or of the whole row."""
    documents = row.get("documents", torch.zeros_like(row["input_ids"]))
    for number in documents.unique():
        ids, labels = row["input_ids"][documents == number], row["labels"][documents == number]
        if (labels != -100).any():
            yield ids, labels


def _train(config: TextJobConfig) -> None:
    text_trainer(config).train()


@pytest.mark.sample(
    "sft-two-files-1",
    "pretrain-packed-token-file-1",
    "classify-parquet-1",
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("job", "source"), [pytest.param(*each, id="-".join(each)) for each in ROUTES])
def test_every_route_trains_the_tokens_of_transformers(
    job: str, source: str, ranks: int, folder: Path, tmp_path: Path
) -> None:
    kind = job.partition("-")[0]
    files = _write(kind, source, folder, tmp_path)
    config = _config(job, folder, files, tmp_path / "runs")
    more: dict[str, Any] = {}
    if kind in ("sft", "pretrain"):
        make = {"sft": chat_rows, "sft-packed": chat_rows, "pretrain": text_windows, "pretrain-packed": packed_texts}
        once = config.model_copy(update={"epochs": 1, "steps": None})
        stream = make[job](once).training(seed=0)
        rows = [stream.read(entry) for entry in stream.cursor().take(100)]
        found = [[each.tolist() for each in part] for row in rows for part in _parts(row)]
        assert sorted(found) == sorted([ids.tolist(), labels.tolist()] for ids, labels in _documents(job, folder))
        more = {"batch": {"global_size": len(rows), "microbatch_size": 1}, "epochs": 1, "steps": None}
    if ranks == 2:
        if kind == "embed" or (more and more["batch"]["global_size"] % 2):
            pytest.skip("the rows of an epoch do not divide by two")
        more["mesh"] = {"data_parallel_replicate": 2}
    config = _config(job, folder, files, tmp_path / "runs", **more)
    if ranks == 1:
        _train(config)
    else:
        run_ranks(_train, config, world_size=ranks)
    loss = next(each["loss"] for each in read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl") if "loss" in each)
    # Weights and activations are float32 in the job: about 200 roundings in sequence add up like a random walk.
    assert loss == pytest.approx(_expected_loss(job, folder), rel=200**0.5 * torch.finfo(torch.float32).eps)
