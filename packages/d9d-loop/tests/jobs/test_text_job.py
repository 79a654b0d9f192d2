import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from array import array
from contextlib import nullcontext
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from d9d_dist import UserError, read_launch
from d9d_dist.testing import assert_rounds_like, in_float64, run_ranks
from d9d_loop import Finished
from d9d_loop.data import read_chat_tokenizer, read_conversation, tokenize_chats, tokenize_text, write_tokens
from d9d_loop.jobs import STARTERS, EmbeddingConfig, TextJobConfig, text_trainer, write_starter
from d9d_loop.jobs.job_config import AdapterConfig, JobKind
from d9d_loop.jobs.text_data import chat_rows, labeled_rows, packed_texts, text_tokenizer, text_windows
from d9d_loop.jobs.text_groups import _texts, text_groups
from d9d_loop.jobs.text_job import _PEFT_TASKS
from d9d_loop.jobs.text_model import auto_class
from d9d_loop.jobs.text_samples import TextSamples
from d9d_metrics import read_metrics

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FILES = {"sft": "chats.jsonl", "pretrain": "texts.jsonl", "classify": "labeled.jsonl", "embed": "pairs.jsonl"}
QUICK = {"resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small Qwen3 with tokenizer and chat template, and files with samples."""
    import transformers

    path = tmp_path_factory.mktemp("released")
    tokenizer = Tokenizer(
        models.BPE(vocab={each: n for n, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    special = {"eos_token": "<|end|>", "pad_token": "<|end|>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)
    model = path / "model"
    fast.save_pretrained(model)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(vocab_size=len(fast), eos_token_id=256, **SIZES)
    transformers.Qwen3ForCausalLM(config).save_pretrained(model)
    chats = [{"prompt": f"count to {n}", "completion": " ".join(map(str, range(n)))} for n in range(1, 41)]
    _write(path / "chats.jsonl", chats)
    _write(path / "texts.jsonl", [{"text": f"{n} plus {n} is {2 * n}. " * 4} for n in range(40)])
    labeled = [{"text": ("good" if n % 2 else "bad") * (1 + n % 3), "label": ["bad", "good"][n % 2]} for n in range(40)]
    _write(path / "labeled.jsonl", labeled)
    pairs = [{"query": f"{n}?", "positive": f"it is {n}", "negatives": [f"not {n}"]} for n in range(40)]
    _write(path / "pairs.jsonl", pairs)
    return path


def _write(path: Path, samples: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in samples))


def _config(folder: Path, runs: Path, job: str, **more: Any) -> TextJobConfig:
    values: dict[str, Any] = {
        "job": job,
        "steps": 4,
        "model": {"folder": folder / "model"},
        "dataset": {"files": [folder / FILES[job]], "held_out": 0.2, "length": 48},
        "run": {"folder": runs, "name": job},
        "batch": {"global_size": 8, "microbatch_size": 2},
        "optimizer": {"learning_rate": 1e-2},
        "logging": {"every": 1, "progress": False},
        **QUICK,
    }
    return TextJobConfig.model_validate({**values, **more})


def _losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def _train(config: TextJobConfig) -> Path:
    result = text_trainer(config).train()
    return result.run_dir


JOBS: dict[str, dict[str, Any]] = {
    "sft": {"adapter": {"rank": 4, "alpha": 8.0}},
    "pretrain": {},
    "classify": {},
    "embed": {"embedding": {"group": 2, "num_negatives": 1, "pooling": "last", "temperature": 0.2}, "steps": 6},
}


def _load(job: str, export: Path) -> Any:
    import transformers

    kinds = {"classify": transformers.AutoModelForSequenceClassification, "embed": transformers.AutoModel}
    return kinds.get(job, transformers.AutoModelForCausalLM).from_pretrained(export, dtype=torch.float32).eval()


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.sample("sft")
def test_losses_equal_on_four_ranks_and_transformers_loads_the_export(job: str, folder: Path, tmp_path: Path) -> None:
    if job == "sft":
        pytest.importorskip("d9d_peft")  # trains an adapter
    run = _train(_config(folder, tmp_path / "one", job, **JOBS[job]))
    four = _config(folder, tmp_path / "four", job, mesh={"data_parallel_replicate": 2}, **JOBS[job])
    run_ranks(_train, four, world_size=4)
    losses = _losses(run)
    # About 200 roundings in sequence add up like a random walk; the weights carry them to all later steps.
    rounding = len(losses) * 200**0.5 * torch.finfo(torch.float32).eps
    assert _losses(tmp_path / "four" / job) == pytest.approx(losses, rel=rounding)
    assert losses[-1] < losses[0]
    assert any("evaluation_loss" in record for record in read_metrics(run / "metrics.jsonl"))
    ids = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (_load(job, tmp_path / ranks / job / "export")(ids)[0] for ranks in ("one", "four"))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert (run / "export" / "tokenizer.json").read_bytes() == (folder / "model" / "tokenizer.json").read_bytes()


@pytest.mark.slow("sft")
@pytest.mark.parametrize("job", ["sft", pytest.param("pretrain", marks=pytest.mark.full)])
def test_losses_of_a_job_are_equal_over_context_parallel_ranks(job: str, folder: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {"dataset": {"files": [folder / FILES[job]], "length": 47}, "steps": 2}  # rows are padded
    losses = _losses(_train(_config(folder, tmp_path / "one", job, **more)))
    run_ranks(
        _train,
        _config(folder, tmp_path / "two", job, mesh={"context_parallel_shard": 2}, **more),
        world_size=2,
    )
    rounding = len(losses) * 200**0.5 * torch.finfo(torch.float32).eps  # as above
    assert _losses(tmp_path / "two" / job) == pytest.approx(losses, rel=rounding)


PACKED: dict[str, dict[str, Any]] = {
    "sft": {"adapter": {"rank": 4, "alpha": 8.0}},
    "pretrain": {"model": {"family": "qwen3", **SIZES}},
}


def _packed(folder: Path, runs: Path, job: str, **more: Any) -> TextJobConfig:
    pytest.importorskip("d9d_modules")  # trains its models
    data = {"files": [folder / FILES[job]], "held_out": 0.2, "length": 96, "packing": True}
    return _config(folder, runs, job, dataset=data, pipeline={"draw": False}, **{**PACKED[job], **more})


def test_a_packed_encoder_is_refused(folder: Path, tmp_path: Path) -> None:
    """Each position would see the token that it predicts."""
    pytest.importorskip("d9d_peft")  # has d9d-modules beside it, whose models are trained
    config = _packed(folder, tmp_path, "pretrain", model={"family": "modernbert"})
    with pytest.raises(UserError, match="job = pretrain predicts the next token, but the model is bidirectional"):
        text_trainer(config)


@pytest.mark.parametrize("job", PACKED)
@pytest.mark.parametrize(
    "mesh",
    [
        {"pipeline_parallel": 2},
        pytest.param({"context_parallel_shard": 2}, marks=pytest.mark.full),
        # No tp: sft's model has one key and value head, and no degree divides pretrain's vocabulary of 257.
        pytest.param({"pipeline_parallel": 2, "data_parallel_shard": 2}, marks=pytest.mark.full),
    ],
    ids=["pp", "cp", "pp-dp"],
)
@pytest.mark.full
def test_losses_of_a_packed_job_are_equal_over_pipelines(
    mesh: dict[str, int], job: str, folder: Path, tmp_path: Path
) -> None:
    if job == "sft":
        pytest.importorskip("d9d_peft")  # trains an adapter
    world_size = prod(mesh.values())
    losses = _losses(_train(_packed(folder, tmp_path / "one", job, checkpoint={"every": 2})))
    split = _packed(folder, tmp_path / "split", job, mesh=mesh, checkpoint={"every": 2})
    run_ranks(_train, split, world_size=world_size)
    rounding = len(losses) * 200**0.5 * torch.finfo(torch.float32).eps  # as above
    assert _losses(tmp_path / "split" / job) == pytest.approx(losses, rel=rounding)
    assert losses[-1] < losses[0]
    ids = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (_load(job, tmp_path / layout / job / "export")(ids)[0] for layout in ("one", "split"))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    export = tmp_path / "split" / job / "export"
    before = [file.read_bytes() for file in sorted(export.glob("*.safetensors"))]
    shutil.rmtree(export)
    (tmp_path / "split" / job / "checkpoints" / "step-00000004").rename(tmp_path / "away")  # as if killed before it
    run_ranks(_train, split, world_size=world_size)
    assert [file.read_bytes() for file in sorted(export.glob("*.safetensors"))] == before


@pytest.mark.slow
def test_the_loss_of_packed_chats_equals_transformers_on_separate_chats(folder: Path, tmp_path: Path) -> None:
    import transformers

    pytest.importorskip("d9d_modules")
    chats = [{"prompt": f"say {n}", "completion": "yes " * n} for n in range(1, 5)]
    _write(tmp_path / "few.jsonl", chats)
    data = {"files": [tmp_path / "few.jsonl"], "length": 160, "packing": True}
    batch = {"global_size": 1}
    config = _config(folder, tmp_path, "sft", steps=1, dataset=data, batch=batch, data={"shuffle": False})
    stream = chat_rows(config).training(seed=0)
    row = stream.read(stream.cursor().take(1)[0])
    numbers = row["documents"][row["labels"] != -100].unique()
    assert len(numbers) > 1
    run = _train(config)

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model, total, count = _load("sft", folder / "model").double(), 0.0, 0
    texts = {f"<|user|>{each['prompt']}<|end|><|assistant|>": f"{each['completion']}<|end|>" for each in chats}
    for number in numbers:
        found = tokenizer.decode(row["input_ids"][row["documents"] == number])
        prompt = next(each for each in texts if found.startswith(each))
        ids = tokenizer(prompt + texts[prompt], return_tensors="pt").input_ids
        labels = ids.clone()
        labels[:, : len(tokenizer(prompt).input_ids)] = -100
        num_labels = int((labels != -100).sum())
        total, count = total + model(ids, labels=labels).loss.item() * num_labels, count + num_labels
    # Roundings of at most 200 operators in sequence add up like a random walk.
    assert _losses(run)[0] == pytest.approx(total / count, rel=200**0.5 * torch.finfo(torch.float32).eps)


def _greedy(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    for _ in range(num_tokens):
        with torch.no_grad():
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-num_tokens:]


def _samples(run: Path) -> list[tuple[int, str]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["sample_0"]["text"]) for record in records if "sample_0" in record]


def test_prompts_are_answered_at_each_evaluation_as_by_the_exported_model(folder: Path, tmp_path: Path) -> None:
    import transformers

    config = _config(folder, tmp_path, "sft", prompts=["count to 3"], evaluation={"every": 2})
    run = _train(config)
    (first, _), (last, text) = _samples(run)
    assert (first, last) == (2, 4)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(run / "export")
    prompt = "<|user|>count to 3<|end|><|assistant|>"
    ids = tokenizer(prompt).input_ids
    answer = _greedy(_load("sft", run / "export"), ids, 48 - len(ids))  # dataset.length
    answer = answer[: answer.index(256) + 1] if 256 in answer else answer
    assert text == prompt + tokenizer.decode(answer)
    assert "Samples of text" in (run / "report.html").read_text()


@pytest.mark.parametrize("job", ["sft", "pretrain"])
def test_a_sample_ends_with_the_first_stop_token(job: str, folder: Path, tmp_path: Path) -> None:
    """The end token of the tokenizer, and in a chat the token that ends a turn, here another one."""
    ends = {"sft": "<|end|>", "pretrain": "<|assistant|>"}
    data: dict[str, Any] = {"files": [folder / FILES[job]], "held_out": 0.2, "length": 48}
    data |= {"end_token": "<|assistant|>"} if job == "pretrain" else {}
    samples = TextSamples(_config(folder, tmp_path, job, prompts=["one"], dataset=data))
    ids = {text: torch.tensor(text_tokenizer(_config(folder, tmp_path, job)).token_id(text)) for text in ends.values()}
    written: dict[str, Any] = {}

    def forward(*, input_ids: torch.Tensor) -> torch.Tensor:
        """Predict a letter, then the end."""
        return (
            torch.stack([torch.tensor(65) if n % 3 else ids[ends[job]] for n in range(input_ids.shape[1])])
            .eq(torch.arange(259)[:, None])
            .T[None]
            .float()
        )

    ctx = SimpleNamespace(size=lambda *axes: 1, device=torch.device("cpu"))
    samples.keep_context(SimpleNamespace(ctx=ctx))  # ty: ignore[invalid-argument-type]
    samples.write(SimpleNamespace(forward=forward, track=written.update))  # ty: ignore[invalid-argument-type]
    assert written["sample_0"].text.endswith(ends[job])
    assert written["sample_0"].text.removeprefix("<|user|>one<|end|><|assistant|>").count(ends[job]) == 1


@pytest.mark.full
def test_prompts_are_continued_over_a_pipeline(folder: Path, tmp_path: Path) -> None:
    config = _packed(folder, tmp_path, "pretrain", prompts=["7 plus 7 is "], mesh={"pipeline_parallel": 2})
    run_ranks(_train, config, world_size=2)
    run = tmp_path / "pretrain"
    ids = _greedy(_load("pretrain", run / "export"), list(b"7 plus 7 is "), 64)
    assert _samples(run)[-1] == (4, "7 plus 7 is " + bytes(each for each in ids if each < 256).decode(errors="ignore"))


def test_a_prompt_must_be_shorter_than_a_sample(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompts: 'a{55}.* has \d+ tokens; expected .* dataset.length = 48"):
        text_trainer(_config(folder, tmp_path, "sft", prompts=["a" * 60]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": ["a"]}, r"prompts are set, but there are no evaluation data; expected dataset.held_out"),
        (
            {"prompts": ["a"], "job": "classify"},
            r"prompts is set, but job = classify; expected job = sft, vision, dpo or pretrain",
        ),
        (
            {"mesh": {"context_parallel_replicate": 2}, "job": "reward"},
            r"context_parallel_replicate = 2 is set, but job = reward; expected 1, or sft, vision, dpo or pretrain",
        ),
        ({"mesh": {"expert_parallel": 2}, "job": "embed"}, r"expert_parallel = 2 is set, but job = embed; expected 1"),
        ({"job": "classify", "dataset": {"files": ["x"], "packing": True}}, r"packing is set, but job = classify"),
        ({"job": "embed", "dataset": {"files": ["x"], "too_long": "drop"}}, r"too_long = drop, but job = embed"),
        ({"job": "sft", "dataset": {"files": ["x"], "end_token": "x"}}, r"end_token is set, but job = sft"),
        (
            {"job": "sft", "dataset": {"files": ["x"], "text_field": "x"}},
            r"text_field is set, but job = sft; expected job = pretrain or classify\. Remove dataset\.text_field",
        ),
        (
            {"job": "pretrain", "dataset": {"files": ["x"], "label_field": "x"}},
            r"label_field is set, but job = pretrain",
        ),
        ({"job": "embed", "dataset": {"files": ["x"], "date": "2025-01-02"}}, r"date is set, but job = embed"),
        ({"job": "pretrain", "dataset": {"files": ["x"], "too_long": "refuse"}}, r"job = pretrain splits long texts"),
        (
            {"model": {"folder": "x", "dtype": "bfloat16"}, "dataset": {"files": ["x"], "packing": True}},
            r"model.dtype applies to transformers models, but dataset.packing = true uses",
        ),
    ],
)
def test_invalid_packing_is_refused(changes: dict[str, Any], message: str) -> None:
    values = {"job": "sft", "steps": 1, "model": {"folder": "x"}, "dataset": {"files": ["x"]}, **changes}
    values |= {"batch": {"global_size": 1}, "run": {"name": "x"}}
    with pytest.raises(ValidationError, match=message):
        TextJobConfig.model_validate(values)


def test_peft_has_a_task_for_the_class_of_every_job() -> None:
    assert {auto_class(job).__name__ for job in get_args(JobKind)} == _PEFT_TASKS.keys()


@pytest.mark.parametrize("kind", get_args(AdapterConfig.model_fields["kind"].annotation))
@pytest.mark.sample("lora")
def test_adapters_are_merged_and_loaded_by_peft(kind: str, folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    result = text_trainer(_config(folder, tmp_path, "sft", adapter={"kind": kind, "rank": 4, "alpha": 8.0})).train()
    run = result.run_dir
    assert result.export_dir == run / "export"
    base = _load("sft", folder / "model")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, run / "adapters").eval()
        merged, peer = _load("sft", run / "export")(ids).logits, adapted(ids).logits
    assert_rounds_like([merged], [in_float64(adapted, ids).logits], peer=[peer])
    assert (merged - before).abs().max() > 1e-4


@pytest.mark.full
def test_a_base_is_quantized_while_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    peft, blocks = pytest.importorskip("peft"), pytest.importorskip("d9d_peft.block_format")
    adapter = {"rank": 4, "alpha": 8.0, "base": "nf4", "block_size": 8}
    trainer = text_trainer(_config(folder, tmp_path, "sft", adapter=adapter))
    ids, found = torch.arange(12)[None], []

    def take(done: Finished) -> None:
        assert done.model.get_parameter("model.layers.0.mlp.up_proj.weight").dtype == torch.uint8
        with torch.no_grad():
            found.append(done.model.eval()(ids).logits)

    trainer.events.on(Finished, take)
    run = trainer.train().run_dir
    assert not (run / "export").exists()
    base = _load("sft", folder / "model")
    for name, weight in base.named_parameters():
        if name.endswith("_proj.weight"):
            weight.data = blocks.dequantize_blocks(
                *blocks.quantize_blocks(weight.data, "nf4", 8), "nf4", dtype=torch.float32
            )
    with torch.no_grad():
        peer = peft.PeftModel.from_pretrained(base, run / "adapters").eval()
        assert_rounds_like(found, [in_float64(peer, ids).logits], peer=[peer(ids).logits])


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.sample("sft")
def test_a_job_in_two_stages_equals_one_process(job: str, folder: Path, tmp_path: Path) -> None:
    if job == "sft":
        pytest.importorskip("d9d_peft")  # trains an adapter
    more: dict[str, Any] = {**JOBS[job], "evaluation": {"every": 2}}
    more |= {"prompts": ["count to 3"]} if job in ("sft", "pretrain") else {}
    _train(_config(folder, tmp_path / "one", job, **more))
    two = _config(folder, tmp_path / "two", job, mesh={"pipeline_parallel": 2}, **more)
    run_ranks(_train, two, world_size=2)
    runs = [tmp_path / name / job for name in ("one", "two")]
    ours, theirs = (
        [
            {name: value for name, value in record.items() if "loss" in name or name.startswith("sample_")}
            for record in read_metrics(run / "metrics.jsonl")
        ]
        for run in runs
    )
    assert ours == theirs
    assert len(ours) > 4
    one, other = (_load(job, run / "export").state_dict() for run in runs)
    assert one.keys() == other.keys()
    assert all(torch.equal(each, other[name]) for name, each in one.items())


def test_the_loss_of_a_chat_equals_transformers_on_the_answer(folder: Path, tmp_path: Path) -> None:
    import transformers

    _write(tmp_path / "one.jsonl", [{"prompt": "say two", "completion": "2 is two"}])
    config = _config(
        folder, tmp_path, "sft", steps=1, dataset={"files": [tmp_path / "one.jsonl"]}, batch={"global_size": 1}
    )
    run = _train(config)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder / "model")
    prompt, answer = "<|user|>say two<|end|><|assistant|>", "2 is two<|end|>"
    ids = tokenizer(prompt + answer, return_tensors="pt").input_ids
    labels = ids.clone()
    labels[:, : len(tokenizer(prompt).input_ids)] = -100
    peer = _load("sft", folder / "model")
    exact, found = in_float64(peer, ids, labels=labels).loss, torch.tensor(_losses(run)[:1])
    assert_rounds_like([found], [exact[None]], peer=[peer(ids, labels=labels).loss.detach()[None]])


@pytest.mark.usefixtures("rehearses")
def test_a_new_model_of_a_family_learns_bytes(folder: Path, tmp_path: Path) -> None:
    run = _train(_config(folder, tmp_path, "pretrain", model={"family": "qwen3", **SIZES}, steps=8))
    losses = _losses(run)
    assert losses[0] == pytest.approx(torch.tensor(257.0).log().item(), rel=0.05)
    assert losses[-1] < losses[0] - 0.3
    assert _load("pretrain", run / "export").config.vocab_size == 257


@pytest.mark.full
def test_samples_of_a_table_equal_those_of_json_lines(folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.load_dataset("json", data_files=str(folder / "labeled.jsonl"), split="train")
    table.to_parquet(tmp_path / "labeled.parquet")
    table.save_to_disk(str(tmp_path / "saved"))
    runs = []
    for number, path in enumerate([folder / "labeled.jsonl", tmp_path / "labeled.parquet", tmp_path / "saved"]):
        data = {"files": [path], "held_out": 0.2, "length": 48}
        runs.append(_losses(_train(_config(folder, tmp_path / str(number), "classify", dataset=data, steps=2))))
    assert runs[0] == runs[1] == runs[2]


def _run(file: Path, arguments: list[str]) -> None:
    sys.argv = ["d9d-train", str(file), *arguments]
    runpy.run_module("d9d_loop", run_name="__main__")


@pytest.mark.parametrize("job", STARTERS)
@pytest.mark.sample("sft")
def test_a_starter_file_is_short_complete_and_runs(job: str, folder: Path, tmp_path: Path) -> None:
    if job == "sft":
        pytest.importorskip("d9d_peft")  # trains an adapter
    text = write_starter(job, tmp_path).read_text()
    assert sum(bool(line.strip()) and not line.startswith("#") for line in text.splitlines()) <= 25
    values = tomllib.loads(text)
    assert TextJobConfig.model_validate(values).job == job
    where = ["--dataset.files", json.dumps([str(folder / FILES[job])]), "--run.folder", str(tmp_path), "--steps", "2"]
    model = [] if job == "pretrain" else ["--model.folder", str(folder / "model")]
    sizes = ["--dataset.length", "16"] if job == "pretrain" else []
    few = ["--embedding.group", "2", "--embedding.num_negatives", "1"] if job == "embed" else []
    run_ranks(_run, tmp_path / f"{job}.toml", [*where, *model, *sizes, *few, "--batch.global_size", "4"], world_size=1)
    assert (tmp_path / job / "export" / "model.safetensors").is_file()
    with pytest.raises(UserError, match=r"already exists; rename or remove it first"):
        write_starter(job, tmp_path)


def test_starter_files_are_listed(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "d9d_loop", "--init"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert [line.split()[2] for line in found.stdout.splitlines()] == list(STARTERS)


@pytest.mark.full
@pytest.mark.parametrize("job", JOBS)
def test_a_resumed_job_ends_like_an_uninterrupted_one(job: str, folder: Path, tmp_path: Path) -> None:
    if job == "sft":
        pytest.importorskip("d9d_peft")  # trains an adapter
    given = {**JOBS[job], "steps": 4}
    whole = _train(_config(folder, tmp_path / "whole", job, **given))
    parts = tmp_path / "parts"
    config = _config(folder, parts, job, **given, checkpoint={"every": 2})
    _train(config)
    (parts / job / "checkpoints" / "step-00000004").rename(parts / "away")  # as if killed before the last save
    _train(config)
    name = "model.safetensors"
    assert (whole / "export" / name).read_bytes() == (parts / job / "export" / name).read_bytes()


@pytest.mark.slow
def test_the_export_of_a_bidirectional_decoder_has_bidirectional_attention(folder: Path, tmp_path: Path) -> None:
    embedding = {"group": 2, "num_negatives": 1, "attention": "bidirectional"}
    run = _train(_config(folder, tmp_path, "embed", steps=1, embedding=embedding))
    model = _load("embed", run / "export")
    ids = torch.arange(24).view(2, 12)
    ids[1, :6] = ids[0, :6]
    with torch.no_grad():
        early = model(ids)[0][:, 0]
    assert (early[0] - early[1]).abs().max() > 1e-3  # the first token sees the later ones


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 20.0}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 2.0,
    "rope_theta": 20.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": {"files": ["absent.jsonl"]}}, r"dataset\.files: absent\.jsonl does not exist"),
        ({"dataset": {"files": []}}, r"dataset\.files has no files"),
        ({"model": {"family": "qwen33"}}, r"model\.family = 'qwen33' is unknown"),
        ({"model": {"folder": "absent"}}, r"model\.folder = absent does not exist; .* hf download"),
        (
            {"model": {"family": "qwen3", "hidden_sise": 32}},
            r"model\.hidden_sise is not an entry .* did you mean hidden_size",
        ),
        (
            {"model": {"family": "qwen3", "hidden_size": "big"}},
            r"\[model\] is not a valid configuration of qwen3: .*hidden_size",
        ),
        (
            {"model": {"family": "llama", "hidden_size": 16, "num_attention_heads": 3}},
            r"\[model\] is not a valid configuration of llama: .*hidden size \(16\) is not a multiple",
        ),
        (
            {"model": {"family": "qwen3", **SIZES, "num_attention_heads": 4, "num_key_value_heads": 3}},
            r"model\.num_key_value_heads = 3 does not divide num_attention_heads = 4",
        ),
        ({"model": {"family": "bert"}}, r"job = pretrain predicts the next token, but the model is bidirectional"),
        (
            {"model": {"family": "gpt2", "n_positions": 32}},
            r"dataset\.length = 48, but the model has 32 learned positions",
        ),
        (
            {"model": {"family": "llama", "max_position_embeddings": 32, "rope_parameters": DYNAMIC}},
            r"dataset\.length = 48, .* rope_type = dynamic; expected at most 32 positions",
        ),
        (
            {"model": {"family": "llama", **SIZES, "max_position_embeddings": 64, "rope_parameters": LONGROPE}},
            r"dataset\.length = 48, .* rope_type = longrope; expected at most 32 .* set short_factor",
        ),
        ({"model": {"family": "llama", "rope_theta": 5.0}}, r"got rope_theta for LlamaConfig.* Set rope_parameters"),
        ({"batch": {"global_size": 999}}, r"batch\.global_size = 999, but the training data have \d+ samples"),
        (
            {"job": "embed", "embedding": {"group": 99, "num_negatives": 0}},
            r"embedding\.group = 99, but there are 32 samples",
        ),
    ],
)
def test_mistakes_in_a_configuration_are_refused(
    change: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        text_trainer(_config(folder, tmp_path, **{"job": "pretrain", **change})).train()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "null.jsonl",
            b'{"text": "a"}\n\n{"text": null}',
            r"null\.jsonl, line 3: a sample has text = None; expected a text",
        ),
        ("broken.jsonl", b'{"text": "a"}\n{"text"', r"broken\.jsonl, line 2: .*; expected a JSON object"),
        ("latin.txt", b"caf\xe9", r"latin\.txt is not UTF-8 text"),
        ("data.parquet", b"csv, renamed", r"data\.parquet cannot be read: .* Expected a valid \.parquet file"),
        ("data.csv", b"text,label\na,b\nc,d,e\n", r"data\.csv cannot be read: .*Expected 2 fields in line 3, saw 3"),
        (
            "data.xlsx",
            b"PK\x03\x04\x14\x00\xe9\x00",
            r"data\.xlsx has the suffix \.xlsx; expected \.jsonl, .*\.parquet",
        ),
    ],
)
def test_files_without_texts_are_refused(name: str, content: bytes, message: str, folder: Path, tmp_path: Path) -> None:
    if name.endswith((".parquet", ".csv")):
        pytest.importorskip("datasets")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        text_trainer(_config(folder, tmp_path / "runs", "pretrain", dataset={"files": [tmp_path / name]}))


@pytest.mark.parametrize(
    ("job", "name", "message"),
    [
        ("sft", "", r"model\.folder = .*model is a file; expected its folder, with config\.json"),
        ("pretrain", "config.json", r"config\.json cannot be used: .*Correct or download it again"),
        ("sft", "tokenizer.json", r"tokenizer\.json is not a tokenizer\.json: .*Download it again"),
        ("pretrain", "tokenizer.json", r"tokenizer\.json is not a tokenizer\.json: .*Download it again"),
    ],
)
def test_a_broken_model_folder_is_refused(job: str, name: str, message: str, folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    if name:
        shutil.copytree(folder / "model", model)
    (model / name).write_text('{"model_type": "qwen3",')
    with pytest.raises(UserError, match=message):
        text_trainer(_config(folder, tmp_path, job, model={"folder": model}))


def test_a_folder_of_adapters_is_no_model(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "adapters")
    for path in (tmp_path / "adapters").glob("model*.safetensors"):
        path.rename(path.with_name("adapter_model.safetensors"))
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"model\.folder = .*adapters has adapters; expected a model\. Set it to the export"
    ):
        text_trainer(_config(folder, tmp_path, "sft", model={"folder": tmp_path / "adapters"}))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("torch_dtype", r"torch_dtype is not an entry of config\.json\. Set model\.dtype"),
        ("revision", r"revision is not an entry of config\.json\. Download this revision"),
        ("trust_remote_code", r"trust_remote_code is not an entry of config\.json\. Remove it"),
    ],
)
def test_arguments_of_from_pretrained_are_no_entries_of_a_model(entry: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextJobConfig.model_validate({"job": "sft", "model": {"folder": "a", entry: "main"}})


def test_an_error_of_a_quantized_base_names_the_keys_of_the_job(folder: Path, tmp_path: Path) -> None:
    """Layers of GPT-2 are a `Conv1D`."""
    import transformers

    pytest.importorskip("d9d_peft")
    base = shutil.copytree(folder / "model", tmp_path / "base")
    size = transformers.AutoConfig.from_pretrained(base).vocab_size
    config = transformers.GPT2Config(vocab_size=size, n_embd=64, n_layer=1, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(base)
    job = _config(folder, tmp_path, "sft", model={"folder": base}, adapter={"base": "nf4"})
    with pytest.raises(
        UserError, match=r"^\[adapter\]: .*Conv1D.* narrow adapter.target, or set adapter.base"
    ) as caught:
        text_trainer(job).train()
    assert "inject" not in str(caught.value)
    assert "quantize_base" not in str(caught.value)


@pytest.mark.full
def test_a_packed_job_with_a_quantized_base_runs_from_its_file_on_one_and_two_ranks(
    folder: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    file = write_starter("sft", tmp_path)
    words = ["--dataset.files", json.dumps([str(folder / FILES["sft"])]), "--model.folder", str(folder / "model")]
    words += ["--dataset.packing", "true", "--adapter.base", "nf4", "--adapter.block_size", "8", "--steps", "3"]
    words += ["--dataset.length", "96", "--batch.global_size", "4", "--logging.every", "1"]
    for ranks in (1, 2):
        shard = ["--mesh.data_parallel_shard", str(ranks), "--run.folder", str(tmp_path / str(ranks))]
        run_ranks(_run, file, [*words, *shard], world_size=ranks)
    one, two = tmp_path / "1" / "sft", tmp_path / "2" / "sft"
    losses = _losses(one)
    rounding = len(losses) * 200**0.5 * torch.finfo(torch.float32).eps  # as above
    assert _losses(two) == pytest.approx(losses, rel=rounding)
    adapted = [peft.PeftModel.from_pretrained(_load("sft", folder / "model"), run / "adapters") for run in (one, two)]
    found, expected = (each.eval()(torch.arange(12)[None]).logits for each in adapted)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_class_is_a_text_or_an_integer(folder: Path, tmp_path: Path) -> None:
    _write(tmp_path / "lists.jsonl", [{"text": "a", "label": [1, 2]}])
    with pytest.raises(UserError, match=r"lists.jsonl, line 1: a sample has label = \[1, 2\]; expected a class"):
        text_trainer(_config(folder, tmp_path, "classify", dataset={"files": [tmp_path / "lists.jsonl"]}))


def test_a_bad_chat_is_named_before_training(folder: Path, tmp_path: Path) -> None:
    _write(tmp_path / "chats.jsonl", [{"prompt": "a", "completion": "b"}, {"messages": [{"role": "user"}]}])
    with pytest.raises(
        UserError, match=r"chats.jsonl, line 2: message 0 has the keys role; expected role, and content"
    ):
        chat_rows(_config(folder, tmp_path, "sft", dataset={"files": [tmp_path / "chats.jsonl"]}))


def test_classes_of_a_csv_file_are_its_words_and_those_of_json_lines(folder: Path, tmp_path: Path) -> None:
    """Words that readers of tables call missing are classes, and integers are sorted by value."""
    pytest.importorskip("datasets")
    labels = ["NA", "null", "10", "9", "nan", "-1"] * 2
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"NA,{each}\n" for each in labels))
    _write(
        tmp_path / "a.jsonl", [{"text": "NA", "label": int(each) if each[-1].isdigit() else each} for each in labels]
    )
    for suffix in ("csv", "jsonl"):
        config = _config(folder, tmp_path, "classify", dataset={"files": [tmp_path / f"a.{suffix}"]})
        provider, classes = labeled_rows(config)
        assert [*classes.numbers] == ["-1", "9", "10", "NA", "nan", "null"]
        stream = provider.training(seed=0)
        assert [stream.read(entry)["labels"].item() for entry in range(6)] == [3, 5, 2, 1, 4, 0]
    (tmp_path / "a.csv").write_text("text,label\na,1\nb,\n")
    with pytest.raises(UserError, match=r"a.csv, sample 1: a sample has label = ''; expected a class"):
        labeled_rows(_config(folder, tmp_path, "classify", dataset={"files": [tmp_path / "a.csv"]}))


def test_a_class_that_only_the_evaluation_has_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    _write(tmp_path / "other.jsonl", [{"text": "a", "label": "ugly"}])
    data = {"files": [folder / FILES["classify"]], "evaluation_files": [tmp_path / "other.jsonl"]}
    with pytest.raises(UserError, match=r"the label 'ugly' is not among the training labels; .*dataset\.files"):
        text_trainer(_config(folder, tmp_path, "classify", dataset=data))


def test_numbers_of_the_command_line_are_entries_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('job = "pretrain"\nsteps = 1\nrun.name = "x"\nbatch.global_size = 1\n')
    words = ["--model.family", "qwen3", "--model.hidden_size", "32", "--model.hidden_act", "gelu"]
    config = TextJobConfig.from_cli(tmp_path / "job.toml", arguments=[*words, "--dataset.files", '["x"]'])
    assert config.model.entries == {"hidden_size": 32, "hidden_act": "gelu"}


def test_embedding_settings_are_refused_in_other_jobs(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"embedding is set, but job = sft; expected job = embed"):
        _config(folder, tmp_path, "sft", embedding={})


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        ({}, r"a sample has 1 texts in 'negatives', but embedding\.num_negatives is not set; expected the number"),
        ({"num_negatives": 2}, r"a sample has 1 texts in 'negatives'; expected at least embedding\.num_negatives = 2"),
        ({"query_field": "ask", "num_negatives": 1}, r"a sample has no text 'ask'; it has query, positive, negatives"),
    ],
)
def test_samples_without_the_texts_of_an_embedding_are_refused(
    embedding: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    config = _config(folder, tmp_path, "embed", embedding={"group": 2, **embedding})
    with pytest.raises(UserError, match=r"pairs.jsonl, line 1: " + message):
        text_groups(config, config.embedding or EmbeddingConfig())


@pytest.mark.parametrize(
    ("negative", "embedding", "expected"),
    [
        ("hard", {"num_negatives": 1}, ["q", "p", "hard"]),
        (["hard", "easy"], {"num_negatives": 1}, ["q", "p", "hard"]),
        (["hard"], {"num_negatives": 0}, ["q", "p"]),
        ("hard", {}, "1 texts in 'negative', but embedding.num_negatives is not set"),
        (None, {}, "0 texts in 'negative', but embedding.num_negatives is not set"),
        ([{"text": "hard"}], {"num_negatives": 1}, "negative = [{'text': 'hard'}]; expected a text or a list of texts"),
        ([None, "hard"], {"num_negatives": 1}, "negative = [None, 'hard']; expected a text or a list of texts"),
        ({"text": "hard"}, {"num_negatives": 1}, "negative = {'text': 'hard'}; expected a text or a list of texts"),
    ],
)
def test_negatives_are_texts_or_an_error(negative: Any, embedding: dict[str, Any], expected: list[str] | str) -> None:
    config = EmbeddingConfig.model_validate({"negatives_field": "negative", **embedding})
    sample = {"query": "q", "positive": "p", "negative": negative}
    with nullcontext() if isinstance(expected, list) else pytest.raises(UserError, match=re.escape(str(expected))):
        assert _texts(sample, config) == expected


def test_each_pair_is_in_one_group_and_groups_have_equally_many_pairs(folder: Path, tmp_path: Path) -> None:
    import transformers

    config = _config(folder, tmp_path, "embed", embedding={"group": 7, "num_negatives": 1})
    stream = text_groups(config, config.embedding or EmbeddingConfig()).training(seed=0)
    groups = [stream.read(entry) for entry in stream.cursor().take(5)]  # an epoch of 32 pairs
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder / "model")
    queries = [tokenizer.decode(text) for texts, num_pairs in groups for text in texts[:num_pairs]]
    assert len(set(queries)) == len(queries) == 32
    assert sorted(num_pairs for _, num_pairs in groups) == [6, 6, 6, 7, 7]
    assert {len(texts) for texts, _ in groups} == {3 * 7}


def test_a_model_needs_either_a_folder_or_a_family() -> None:
    with pytest.raises(ValueError, match=r"expected either folder \(released weights\) or family \(a new model\)"):
        TextJobConfig.model_validate({"job": "sft", "model": {}})


def test_a_token_file_is_of_the_models_tokenizer_and_is_not_split(folder: Path, tmp_path: Path) -> None:
    texts, tokenizer = [f"{n} plus {n}. " * 9 for n in range(9)], folder / "model" / "tokenizer.json"
    tokenize_text(texts, tmp_path / "tokens", tokenizer=tokenizer, end_token=None)
    reordered = json.loads(tokenizer.read_text())
    vocab = reordered["model"]["vocab"]
    reordered["model"]["vocab"] = dict(zip(vocab, reversed(vocab.values()), strict=True))
    (tmp_path / "other.json").write_text(json.dumps(reordered))
    tokenize_text(texts, tmp_path / "other", tokenizer=tmp_path / "other.json", end_token=None)

    def opened(files: str, **more: Any) -> Any:
        data = {"files": [tmp_path / files], "length": 16, **more.pop("dataset", {})}
        config = _config(folder, tmp_path / "runs", "pretrain", dataset=data, **more)
        return text_windows(config), packed_texts(config)

    windows, _ = opened("tokens", dataset={"evaluation_files": [folder / FILES["pretrain"]]})
    assert len(windows.evaluation()) > 0
    with pytest.raises(UserError, match=r"dataset.held_out = 0.2, but .*tokens has tokens, which are not split"):
        opened("tokens", dataset={"held_out": 0.2})
    message = r"dataset.files: .* was written with another tokenizer; expected that of the job"
    with pytest.raises(UserError, match=message):
        opened("other")
    opened("other", model={"folder": folder / "model", "tokenizer": tmp_path / "other.json"})
    with pytest.raises(UserError, match=message):
        opened("tokens", model={"family": "qwen3"})
    with pytest.raises(UserError, match=r"job = sft: the token file has no loss masks"):
        chat_rows(_config(folder, tmp_path, "sft", dataset={"files": [tmp_path / "tokens"]}))
    with pytest.raises(UserError, match=r"end_token = '<\|end\|>', but dataset.files: .* written without an end token"):
        opened("tokens", dataset={"end_token": "<|end|>"})
    tokenize_text(texts, tmp_path / "ended", tokenizer=tokenizer, end_token="<|user|>")  # noqa: S106
    with pytest.raises(UserError, match=r"was written with --end-token '<\|user\|>'; expected the same one"):
        opened("ended", dataset={"end_token": "<|end|>"})
    opened("ended", dataset={"end_token": "<|user|>"})


def test_tokens_of_other_programs_are_recognised_by_their_contents(folder: Path, tmp_path: Path) -> None:
    texts, tokenizer = [f"{n} plus {n}. " * 9 for n in range(9)], folder / "model" / "tokenizer.json"
    file = tokenize_text(texts, tmp_path / "tokens", tokenizer=tokenizer)
    for to in ("megatron", "llm.c", "nanogpt"):
        write_tokens(file, tmp_path / to, to)

    def config(*files: str, **more: Any) -> TextJobConfig:
        data = {"files": [tmp_path / name for name in files], "length": 16, **more}
        return _config(folder, tmp_path / "runs", "pretrain", dataset=data)

    def rows(provider: Any) -> list[Any]:
        samples = provider.training(seed=0)
        entries = samples.cursor().take(12)
        return [samples.read(entry)["input_ids"].tolist() for entry in entries]

    expected = rows(text_windows(config("tokens")))
    for path in ("megatron", "megatron.bin", "megatron.idx", "llm.c.bin", "nanogpt.bin"):
        assert rows(text_windows(config(path))) == expected
    assert rows(packed_texts(config("megatron"))) == rows(packed_texts(config("tokens")))
    shards = text_windows(config("llm.c.bin", "llm.c.bin", evaluation_files=[tmp_path / "megatron"]))
    assert shards.num_samples == (2 * file.manifest.num_tokens - 1) // 16
    with pytest.raises(UserError, match="has no document boundaries, so its documents cannot be packed"):
        packed_texts(config("nanogpt.bin")).training(seed=0)
    with pytest.raises(UserError, match=r"dataset.files: got tokens of several formats \(.*expected one format"):
        text_windows(config("megatron", "nanogpt.bin"))
    (other := tmp_path / "other" / "nanogpt.bin").parent.mkdir()
    other.write_bytes(array("H", range(260)).tobytes())
    with pytest.raises(
        UserError, match=r"dataset.files: .*nanogpt.bin has the tokens 0 to 259; expected 0 to 258, the vocab"
    ):
        text_windows(_config(folder, tmp_path, "pretrain", dataset={"files": [other]}))
    with pytest.raises(UserError, match=r"job = sft: the token file has no loss masks"):
        chat_rows(_config(folder, tmp_path, "sft", dataset={"files": [tmp_path / "megatron"]}))


@pytest.mark.parametrize("packing", [False, True])
def test_a_token_file_of_longer_chats_is_an_error(packing: bool, folder: Path, tmp_path: Path) -> None:
    """Parts of a chat that is split would lack the messages before them."""
    chats = [json.loads(line) for line in (folder / FILES["sft"]).read_text().splitlines()]
    tokenizer = read_chat_tokenizer(folder / "model")
    longest = max(len(tokenizer(read_conversation(chat)).tokens) for chat in chats)
    tokenize_chats(chats, tmp_path / "tokens", tokenizer=tokenizer)
    dataset = {"files": [tmp_path / "tokens"], "packing": packing, "length": longest}
    chat_rows(_config(folder, tmp_path, "sft", dataset=dataset))
    message = rf"dataset.files has a conversation of {longest} tokens; expected at most dataset.length = {longest - 1}"
    with pytest.raises(UserError, match=message):
        chat_rows(_config(folder, tmp_path, "sft", dataset={**dataset, "length": longest - 1}))


def test_masks_of_a_token_file_are_used_or_an_error(folder: Path, tmp_path: Path) -> None:
    tokenizer = read_chat_tokenizer(folder / "model")
    tokenize_chats([{"prompt": "a", "completion": "b"}] * 9, tmp_path / "tokens", tokenizer=tokenizer)
    config = _config(folder, tmp_path, "pretrain", dataset={"files": [tmp_path / "tokens"], "length": 8})
    with pytest.raises(UserError, match=r"job = pretrain: dataset.files has loss masks of conversations; .*job = sft"):
        text_windows(config)


@pytest.mark.parametrize(("job", "packing"), [*((job, False) for job in JOBS), ("sft", True), ("pretrain", True)])
def test_a_job_of_epochs_reads_all_samples_in_each(job: str, packing: bool, folder: Path, tmp_path: Path) -> None:
    if packing:
        pytest.importorskip("d9d_modules")
    more: dict[str, Any] = {"embedding": {"group": 2, "num_negatives": 1}} if job == "embed" else {}
    data = {"files": [folder / FILES[job]], "length": 48, "packing": packing}
    config = _config(folder, tmp_path, job, dataset=data, steps=None, epochs=3, pipeline={"draw": False}, **more)
    plan = text_trainer(config).plan_for(read_launch())
    cursor, sizes = plan.stream.cursor(), list[int]()
    while entries := cursor.take(8):
        sizes.append(len(entries))
    assert len(sizes) == plan.steps == 3 * (plan.steps // 3)
    count = {"embed": 20, "classify": 40, "sft": 40}.get(job, sum(sizes) // 3)
    if not packing:
        assert sizes == [*[8] * (count // 8), *([count % 8] if count % 8 else [])] * 3


@pytest.mark.parametrize(("job", "packing"), [*((job, False) for job in JOBS), ("sft", True), ("pretrain", True)])
@pytest.mark.sample("sft-False")
def test_a_job_notices_other_data_other_tokens_and_another_template(
    job: str,
    packing: bool,
    folder: Path,
    tmp_path: Path,
) -> None:
    if packing:
        pytest.importorskip("d9d_modules")
    shutil.copytree(folder / "model", tmp_path / "model")
    tokenizer = tmp_path / "model" / "tokenizer.json"
    lines = (folder / FILES[job]).read_text().splitlines()
    more: dict[str, Any] = {"embedding": {"group": 2, "num_negatives": 1}} if job == "embed" else {}

    def identity(lines: list[str]) -> Any:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"  # the name does not matter
        file.write_text("\n".join(lines))
        data = {"files": [file], "length": 48, "packing": packing}
        model = {"folder": tmp_path / "model"}
        config = _config(folder, tmp_path / "runs", job, model=model, dataset=data, pipeline={"draw": False}, **more)
        return text_trainer(config).plan_for(read_launch()).stream.identity()

    before = identity(lines)
    assert identity(lines) == before
    assert identity([*lines[:7], lines[7].replace(" ", "  ", 2).replace("7", "8"), *lines[8:]]) != before
    assert identity([lines[1], lines[0], *lines[2:]]) != before
    if job == "sft":
        template = tmp_path / "model" / "chat_template.jinja"
        text = template.read_text()
        template.write_text(text.replace("<|end|>", "<|end|> "))
        assert identity(lines) != before
        template.write_text(text)
    reordered = json.loads(tokenizer.read_text())
    vocab = reordered["model"]["vocab"]
    reordered["model"]["vocab"] = dict(zip(vocab, reversed(vocab.values()), strict=True))
    tokenizer.write_text(json.dumps(reordered))
    assert identity(lines) != before


@pytest.mark.usefixtures("rehearses")
@pytest.mark.slow("sft")
@pytest.mark.parametrize("job", ["classify", "sft"])
def test_a_function_of_all_predictions_is_named_in_the_file(
    job: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"figures_{job}.py").write_text(
        "def right(found):\n"
        "    chosen = found['logits'].argmax(-1) if 'logits' in found else found['predictions']\n"
        "    return {'right': (chosen == found['labels']).mean(), 'labels': len(chosen)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = _config(folder, tmp_path, job, compute_metrics=f"figures_{job}:right", steps=1)
    found = text_trainer(config).train().evaluation
    if job == "classify":
        assert (found["right"], found["labels"]) == (found["accuracy"], 8)
    else:
        assert 0 <= found["right"] <= 1
        assert found["labels"] > 8
    with pytest.raises(UserError, match=f"compute_metrics = 'figures_{job}:rihgt': no rihgt in .*did you mean right"):
        text_trainer(_config(folder, tmp_path, job, compute_metrics=f"figures_{job}:rihgt"))


def test_logits_are_computed_at_labels_if_the_model_takes_positions_of_each_row(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes_positions() -> bool:
        config = _config(folder, tmp_path, "sft", dataset={"files": [folder / "chats.jsonl"], "packing": False})
        task: Any = text_trainer(config).plan_for(read_launch()).task
        return task.label_logits

    assert takes_positions()
    monkeypatch.delattr("transformers.modeling_utils.slice_logits_to_keep")
    assert not takes_positions()
