"""Jobs on pairs of answers, compared with plain loops over `transformers` models that share no code with them."""

import copy
import json
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Trainer, hugging_face_model
from d9d_loop.data import TokenFileWriter
from d9d_loop.jobs import AdapterConfig, TextJobConfig, text_trainer
from d9d_loop.jobs.text_pairs import pair_rows
from d9d_loop.jobs.text_tasks import NextToken
from d9d_metrics import read_metrics

pytestmark = pytest.mark.usefixtures("trl_without_wandb")

pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
TEMPLATE = (
    "{{ bos }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PAIRS = [
    {"prompt": f"count to {n}", "chosen": " ".join(map(str, range(n))), "rejected": "no" * (1 + n % 3)}
    for n in range(1, 17)
]
# A new model is near the reference for the first steps; this rate moves it far enough for the margins to matter. SGD,
# because Adam divides gradients by their size, and so amplifies the rounding of the small ones.
RATE, STEPS = 1.0, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a language model, a reward model, and pairs."""
    import transformers

    path = tmp_path_factory.mktemp("released")
    alphabet = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"])
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)
    torch.manual_seed(0)
    special_ids: dict[str, Any] = {"eos_token_id": 257, "pad_token_id": 256, "num_labels": 1}
    config = transformers.Qwen3Config(vocab_size=len(fast), **special_ids, **SIZES)
    for name, kind in (
        ("model", transformers.Qwen3ForCausalLM),
        ("scorer", transformers.Qwen3ForSequenceClassification),
    ):
        kind(config).save_pretrained(path / name)
        fast.save_pretrained(path / name)
    (path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in PAIRS))
    return path


def _config(folder: Path, runs: Path, job: str, *, model: str = "model", **more: Any) -> TextJobConfig:
    values: dict[str, Any] = {
        "job": job,
        "steps": STEPS,
        "model": {"folder": folder / model},
        "dataset": {"files": [folder / "pairs.jsonl"], "length": 64},
        "run": {"folder": runs, "name": job},
        "batch": {"global_size": 4, "microbatch_size": 1},
        "data": {"shuffle": False},
        "optimizer": {"kind": "sgd", "learning_rate": RATE, "momentum": 0.0, "weight_decay": 0.0},
        "gradients": {"max_norm": None},
        "lr_schedule": {"kind": "transformers", "name": "constant"},
        "logging": {"every": 1, "progress": False},
        "resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}},
    }
    return TextJobConfig.model_validate({**values, **more})


def _losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def _train(config: TextJobConfig) -> Path:
    return text_trainer(config).train().run_dir


@cache
def _tokenizer(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


def _answer(folder: Path, pair: dict[str, str], key: str) -> tuple[torch.Tensor, int]:
    """Return the tokens [1, n] of a prompt with an answer, and the number of tokens of the prompt."""

    tokenizer = _tokenizer(folder / "model")
    prompt = f"<|user|>{pair['prompt']}<|end|><|assistant|>"
    ids = tokenizer(f"{prompt}{pair[key]}<|end|>", return_tensors="pt").input_ids
    return ids, len(tokenizer(prompt).input_ids)


def _score(model: Any, folder: Path, pair: dict[str, str], key: str) -> torch.Tensor:
    """Return the log-probability of an answer."""
    ids, start = _answer(folder, pair, key)
    log_probs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    return log_probs[:, start - 1 :].sum()


def _plain_dpo(model: Any, folder: Path, *, reference: Any, beta: float = 0.1) -> list[float]:
    """Return the losses of a plain loop in the precision of the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for pair in PAIRS[4 * step : 4 * step + 4]:
            with torch.no_grad():
                chosen, rejected = (_score(reference, folder, pair, key) for key in ("chosen", "rejected"))
            margin = _score(model, folder, pair, "chosen") - chosen - _score(model, folder, pair, "rejected") + rejected
            loss = -F.logsigmoid(beta * margin) / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _tolerance(exact: list[float], rounded: list[float]) -> list[float]:
    """Return the bounds of losses: 8 times the deviation of the same plain loop in float32, plus its rounding."""
    eps = torch.finfo(torch.float32).eps
    return [8 * abs(one - other) + 64 * eps * abs(one) for one, other in zip(exact, rounded, strict=True)]


def _assert_close(found: list[float], exact: list[float], rounded: list[float]) -> None:
    bounds = _tolerance(exact, rounded)
    assert [abs(one - other) <= bound for one, other, bound in zip(found, exact, bounds, strict=True)] == [
        True
    ] * STEPS, (
        found,
        exact,
        bounds,
    )


def _language_model(folder: Path, dtype: torch.dtype) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[list[float], list[float]]:
    """Return the losses of a plain loop in float64 and in float32."""
    found = []
    for dtype in (torch.float64, torch.float32):
        model = _language_model(folder, dtype)
        found.append(_plain_dpo(model, folder, reference=copy.deepcopy(model)))
    return found[0], found[1]


def test_dpo_equals_a_plain_loop(folder: Path, tmp_path: Path, plain: tuple[list[float], list[float]]) -> None:
    found = _losses(_train(_config(folder, tmp_path, "dpo")))
    assert max(found) > 1.01 * min(found)  # the model has moved away from its reference
    _assert_close(found, *plain)


@pytest.mark.parametrize(
    "mesh",
    [{"data_parallel_shard": 2}, {"data_parallel_replicate": 2}, {"context_parallel_shard": 2}],
    ids=["shard", "replicate", "context"],
)
@pytest.mark.slow("shard")
@pytest.mark.sample("shard", "context")
def test_dpo_on_two_ranks_equals_a_plain_loop(
    mesh: dict[str, int], folder: Path, tmp_path: Path, plain: tuple[list[float], list[float]]
) -> None:
    run_ranks(_train, _config(folder, tmp_path, "dpo", mesh=mesh), world_size=2)
    _assert_close(_losses(tmp_path / "dpo"), *plain)


def test_dpo_trains_without_dropout(folder: Path, tmp_path: Path, plain: tuple[list[float], list[float]]) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    path = copied / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_dropout": 0.5}))
    _assert_close(_losses(_train(_config(copied, tmp_path, "dpo"))), *plain)
    exported = json.loads((tmp_path / "dpo" / "export" / "config.json").read_text())
    assert exported["attention_dropout"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("job", "model"), [("dpo", "model"), ("reward", "scorer")])
def test_pairs_in_two_stages_have_the_losses_of_one_process(job: str, model: str, folder: Path, tmp_path: Path) -> None:
    one = _losses(_train(_config(folder, tmp_path / "one", job, model=model)))
    two = _config(folder, tmp_path / "two", job, model=model, mesh={"pipeline_parallel": 2})
    run_ranks(_train, two, world_size=2)
    assert _losses(tmp_path / "two" / job) == one


def test_a_resumed_job_compares_with_the_initial_weights(
    folder: Path, tmp_path: Path, plain: tuple[list[float], list[float]]
) -> None:
    _train(_config(folder, tmp_path, "dpo", steps=2))
    _train(_config(folder, tmp_path, "dpo"))
    found = [record for record in read_metrics(tmp_path / "dpo" / "metrics.jsonl") if "loss" in record]
    _assert_close([each["loss"] for each in found], *plain)


@pytest.mark.parametrize("full", [None, r"norm\.weight"], ids=["adapters", "and norms in full"])
def test_the_reference_of_adapters_is_the_model_without_them(folder: Path, tmp_path: Path, full: str | None) -> None:
    peft = pytest.importorskip("peft")
    pytest.importorskip("d9d_peft")
    adapter = {"rank": 4, "alpha": 8.0, "target": "q_proj", "full": full}
    run = _train(_config(folder, tmp_path, "dpo", adapter=adapter, checkpoint={"every": 1, "keep_last": 9}))
    trainer = text_trainer(_config(folder, tmp_path, "dpo", adapter=adapter))
    trainer.export(tmp_path / "first", step=1)
    # From the weights after step 1, a peer computes the loss of the next step.
    losses = []
    for dtype in (torch.float64, torch.float32):
        base = _language_model(folder, dtype)
        adapted = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "first" / "adapters").to(dtype)
        total = 0.0
        with torch.no_grad():
            for pair in PAIRS[4:8]:
                margins = [
                    _score(model, folder, pair, "chosen") - _score(model, folder, pair, "rejected")
                    for model in (adapted, base)
                ]
                total += -F.logsigmoid(0.1 * (margins[0] - margins[1])).item() / 4
        losses.append(total)
    found = _losses(run)[1]
    assert abs(found - losses[0]) <= _tolerance(losses[:1], losses[1:])[0]
    assert abs(found - 0.6931471805599453) > 1e-4


def test_peft_finds_the_class_of_the_model_of_adapters(folder: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    run = _train(_config(folder, tmp_path, "dpo", steps=1, adapter=AdapterConfig(rank=2)))
    found = peft.AutoPeftModelForCausalLM.from_pretrained(run / "adapters").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(run / "export").eval()
    ids = torch.arange(20)[None]
    torch.testing.assert_close(found(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-5)


def test_adapters_without_their_package_are_an_error_before_the_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "d9d_peft", None)
    config = _config(folder, tmp_path, "dpo", adapter=AdapterConfig(rank=2))
    with pytest.raises(UserError, match=r"\[adapter\] needs the package d9d-peft, which is not installed"):
        text_trainer(config)


def test_held_out_pairs_are_compared_with_the_reference(folder: Path, tmp_path: Path) -> None:
    config = _config(
        folder,
        tmp_path,
        "dpo",
        steps=1,
        dataset={"files": [folder / "pairs.jsonl"], "length": 64, "evaluation_files": [folder / "pairs.jsonl"]},
    )
    result = text_trainer(config).train()
    import transformers

    losses, margins = [], []
    for dtype in (torch.float64, torch.float32):
        reference = _language_model(folder, dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dpo" / "export", dtype=dtype)
        with torch.no_grad():
            found = [
                0.1
                * (
                    _score(model, folder, pair, "chosen")
                    - _score(reference, folder, pair, "chosen")
                    - _score(model, folder, pair, "rejected")
                    + _score(reference, folder, pair, "rejected")
                )
                for pair in PAIRS
            ]
        losses.append(-F.logsigmoid(torch.stack(found)).mean().item())
        margins.append(torch.stack(found))
    assert abs(result.evaluation["loss"] - losses[0]) <= _tolerance(losses[:1], losses[1:])[0]
    bound = _tolerance([margins[0].mean().item()], [margins[1].mean().item()])[0] + 1e-5
    assert abs(result.evaluation["reward_margin"] - margins[0].mean().item()) <= bound
    assert result.evaluation["reward_accuracy"] == (margins[0] > 0).double().mean().item()


def _rewards(model: Any, folder: Path, pair: dict[str, str]) -> torch.Tensor:
    return torch.cat([model(_answer(folder, pair, key)[0]).logits[0] for key in ("chosen", "rejected")])


@pytest.mark.slow("False")
@pytest.mark.parametrize("has_margins", [False, True])
def test_a_reward_model_equals_a_plain_loop(has_margins: bool, folder: Path, tmp_path: Path) -> None:
    import transformers

    margins = torch.tensor([0.5 * (n % 4) * has_margins for n in range(16)])
    samples = [{**pair, "margin": margin} for pair, margin in zip(PAIRS, margins.tolist(), strict=True)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    losses = []
    for dtype in (torch.float64, torch.float32):
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "scorer", dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        losses.append([])
        for step in range(STEPS):
            rewards = torch.stack([_rewards(model, folder, pair) for pair in PAIRS[4 * step : 4 * step + 4]])
            differences = rewards[:, 0] - rewards[:, 1] - margins[4 * step : 4 * step + 4]
            loss = (-F.logsigmoid(differences) + 0.01 * rewards.sum(1).square()).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    config = _config(
        folder,
        tmp_path,
        "reward",
        model="scorer",
        reward={"centering": 0.01},
        batch={"global_size": 4, "microbatch_size": 2},
        dataset={"files": [tmp_path / "pairs.jsonl"], "evaluation_files": [tmp_path / "pairs.jsonl"], "length": 64},
    )
    result = text_trainer(config).train()
    run = result.run_dir
    _assert_close(_losses(run), losses[0], losses[1])
    exported = transformers.AutoModelForSequenceClassification.from_pretrained(run / "export", dtype=torch.float32)
    assert exported.config.num_labels == 1
    torch.testing.assert_close(
        _rewards(exported, folder, PAIRS[0]), _rewards(model, folder, PAIRS[0]), rtol=1e-2, atol=1e-3
    )
    with torch.no_grad():
        differences = torch.stack([_rewards(exported, folder, pair) for pair in PAIRS]) @ torch.tensor([1.0, -1.0])
        sums = torch.stack([_rewards(exported, folder, pair) for pair in PAIRS]).sum(1)
    expected = (-F.logsigmoid(differences - margins) + 0.01 * sums.square()).mean().item()
    assert result.evaluation["loss"] == pytest.approx(expected, rel=1e-4)


def test_packed_pairs_have_the_losses_of_pairs_in_rows(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("d9d_modules")
    files = {"files": [folder / "pairs.jsonl"], "evaluation_files": [folder / "pairs.jsonl"]}
    preference = {"beta": 0.1, "length_normalized": True, "target_margin": 0.5, "reference": False}
    found = []
    for packing, length in ((False, 64), (True, 160)):
        data = {**files, "length": length, "packing": packing}
        config = _config(
            folder,
            tmp_path / str(packing),
            "dpo",
            steps=1,
            dataset=data,
            preference=preference,
            optimizer={"learning_rate": 1e-30},
        )
        found.append(text_trainer(config).train().evaluation)
    for name in ("loss", "reward_margin", "reward_accuracy"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-5)


@pytest.mark.slow
def test_packed_pairs_in_two_stages_have_the_losses_of_one_process(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("d9d_modules")
    data = {"files": [folder / "pairs.jsonl"], "length": 160, "packing": True}
    options: dict[str, Any] = {"dataset": data, "batch": {"global_size": 2, "microbatch_size": 1}}
    one = _losses(_train(_config(folder, tmp_path / "one", "dpo", **options)))
    run_ranks(_train, _config(folder, tmp_path / "two", "dpo", mesh={"pipeline_parallel": 2}, **options), world_size=2)
    assert _losses(tmp_path / "two" / "dpo") == pytest.approx(one, rel=1e-4)
    assert max(one) > 1.01 * min(one)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, r"pairs\.jsonl, line 17: .*expected chosen and rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, r"pairs\.jsonl, line 17: the chosen and the rejected"),
    ],
)
def test_a_bad_pair_is_named_before_the_start(
    sample: dict[str, str], message: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*PAIRS, sample]))
    with pytest.raises(UserError, match=message):
        text_trainer(_config(folder, tmp_path, "dpo", dataset={"files": [tmp_path / "pairs.jsonl"], "length": 64}))


def test_dropped_and_cut_pairs_are_counted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"files": [folder / "pairs.jsonl"], "length": 40}
    _train(_config(folder, tmp_path, "dpo", steps=1, dataset=data))
    lengths = [[_answer(folder, pair, key) for key in ("chosen", "rejected")] for pair in PAIRS]
    cut = sum(max(ids.shape[1] for ids, _ in each) > 40 for each in lengths)
    assert cut
    assert (
        f"of 16 pairs, 0 are dropped, because they have no label within 40 tokens, and {cut} are truncated"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job": "sft", "preference": {}}, "preference is set, but job = sft; expected job = dpo"),
        ({"job": "dpo", "reward": {}}, "reward is set, but job = dpo; expected job = reward"),
        (
            {"job": "reward", "dataset": {"files": ["x"], "packing": True}},
            "packing is set, but job = reward; expected job = sft, vision, dpo or pretrain",
        ),
        (
            {"job": "reward", "prompts": ["a"]},
            "prompts is set, but job = reward; expected job = sft, vision, dpo or pretrain",
        ),
    ],
)
def test_a_setting_that_the_job_does_not_use_is_an_error(changes: dict[str, Any], message: str) -> None:
    values = {
        "steps": 1,
        "model": {"folder": "x"},
        "dataset": {"files": ["x"]},
        "run": {"name": "x"},
        "batch": {"global_size": 1},
    }
    with pytest.raises(ValueError, match=message):
        TextJobConfig.model_validate({**values, **changes})


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (None, "are the reference of this job, have changed since"),
        ({"rank": 2}, "the base weights have changed since .* was saved; expected those of adapters/"),
    ],
)
def test_a_resume_needs_the_weights_of_the_start(
    adapter: dict[str, int] | None, message: str, folder: Path, tmp_path: Path
) -> None:
    """The weights of a folder are replaced by others of the same name, shapes and sizes."""
    import transformers

    if adapter is not None:
        pytest.importorskip("d9d_peft")
    copied = shutil.copytree(folder, tmp_path / "copied")
    _train(_config(copied, tmp_path, "dpo", steps=1, adapter=adapter))
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(copied / "model")
    transformers.Qwen3ForCausalLM(config).save_pretrained(copied / "model")
    with pytest.raises(UserError, match=message):
        _train(_config(copied, tmp_path, "dpo", steps=2, adapter=adapter))


def test_tokens_are_an_error(folder: Path, tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "tokens", vocab_size=260) as writer:
        writer.append([1, 2, 3])
    with pytest.raises(
        UserError, match=r"job = dpo, but .*tokens has tokens; expected samples with chosen and rejected"
    ):
        text_trainer(_config(folder, tmp_path, "dpo", dataset={"files": [tmp_path / "tokens"], "length": 64}))


def test_a_task_without_reference_values_is_an_error_before_the_start(folder: Path, tmp_path: Path) -> None:
    config = _config(folder, tmp_path, "dpo")
    sft = TextJobConfig.model_validate({**config.model_dump(exclude_unset=True), "job": "sft"})
    trainer = Trainer(
        sft,
        model=hugging_face_model(folder / "model"),
        data=[{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 8,
        task=NextToken(),
        reference="initial",
    )
    with pytest.raises(UserError, match="the Trainer has a reference, but NextToken does not use one"):
        trainer.train()
    with pytest.raises(UserError, match="reference = 'final'; expected None"):
        Trainer(
            sft,
            model=hugging_face_model(folder / "model"),
            data=[{"x": 1}] * 8,
            task=NextToken(),
            reference="final",  # ty: ignore[invalid-argument-type]
        ).train()


def _trl(kind: str, folder: Path, samples: list[dict[str, Any]], work: Path, **options: Any) -> Any:
    """Return a DPOTrainer or RewardTrainer that reads the samples in order."""
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    auto = {"DPO": transformers.AutoModelForCausalLM, "Reward": transformers.AutoModelForSequenceClassification}[kind]
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(work),
        max_length=64,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        **options,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        auto.from_pretrained(folder, dtype=torch.float32),
        args=args,
        train_dataset=datasets.Dataset.from_list(samples),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    trainer._get_train_sampler = lambda dataset=None: torch.utils.data.SequentialSampler(trainer.train_dataset)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("form", ["texts", "messages", "without a prompt", "texts without a prompt", "options"])
def test_tokens_and_losses_of_dpo_equal_those_of_trl(form: str, folder: Path, tmp_path: Path) -> None:
    turns = [
        {
            "prompt": _turn("user", each["prompt"]),
            **{key: _turn("assistant", each[key]) for key in ("chosen", "rejected")},
        }
        for each in PAIRS
    ]
    samples: list[dict[str, Any]] = PAIRS if form == "texts" else turns
    if form == "without a prompt":
        samples = [{key: [*each["prompt"], *each[key]] for key in ("chosen", "rejected")} for each in turns]
    if form == "texts without a prompt":
        samples = _without_prompts()
    if form == "options":
        samples = [{**each, "chat_template_kwargs": {"bos": "count "}} for each in turns]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    data = {"files": [tmp_path / "pairs.jsonl"], "length": 64, "labels": "all", "text_pairs": "joined"}
    config = _config(folder, tmp_path, "dpo", dataset=data)
    trainer = _trl("DPO", folder / "model", samples, tmp_path / "trl", beta=0.1)
    stream = pair_rows(config).training(seed=0)
    rows = [row for entry in stream.cursor().take(len(samples)) for row in stream.read(entry)]
    theirs = []
    for row in trainer.train_dataset:
        for key in ("chosen_ids", "rejected_ids"):
            ids = row["prompt_ids"] + row[key]
            theirs.append([ids[:-1], ([-100] * len(row["prompt_ids"]) + row[key])[1:]])
    assert [[row["input_ids"].tolist(), row["labels"].tolist()] for row in rows] == theirs
    trainer.train()
    run = _train(config)
    records = [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    _assert_equal_steps(run, records, trainer, "rewards/margins", "rewards/accuracies")


def _assert_equal_steps(run: Path, records: list[Any], trainer: Any, margin: str, accuracy: str) -> None:
    """Compare all steps and the trained weights, computed in float32 by both, with those of a trainer of TRL."""
    names = {"loss": "loss", "grad_norm": "grad_norm", "reward_margin": margin, "reward_accuracy": accuracy}
    logged = [each for each in trainer.state.log_history if "loss" in each]
    assert len(records) == len(logged) == STEPS
    for ours, theirs in zip(records, logged, strict=True):
        expected = [theirs[name] for name in names.values()]
        assert [ours[name] for name in names] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    exported = type(trainer.model).from_pretrained(run / "export", dtype=torch.float32).state_dict()
    for name, expected in trainer.model.state_dict().items():
        torch.testing.assert_close(exported[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["texts", "messages", "texts without a prompt"])
def test_tokens_and_losses_of_a_reward_model_equal_those_of_trl(form: str, folder: Path, tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = [{**each, "margin": 0.5 * (n % 3)} for n, each in enumerate(PAIRS)]
    if form == "texts without a prompt":
        samples = _without_prompts()
    if form == "messages":
        samples = [
            {
                "prompt": _turn("user", each["prompt"]),
                **{key: _turn("assistant", each[key]) for key in ("chosen", "rejected")},
            }
            for each in PAIRS
        ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    data = {"files": [tmp_path / "pairs.jsonl"], "length": 64, "labels": "all", "text_pairs": "joined"}
    config = _config(folder, tmp_path, "reward", model="scorer", dataset=data, reward={"centering": 0.01})
    trainer = _trl("Reward", folder / "scorer", samples, tmp_path / "trl", center_rewards_coefficient=0.01)
    stream = pair_rows(config).training(seed=0)
    rows = [row["input_ids"].tolist() for entry in stream.cursor().take(len(samples)) for row in stream.read(entry)]
    assert rows == [row[key] for row in trainer.train_dataset for key in ("chosen_ids", "rejected_ids")]
    trainer.train()
    run = _train(config)
    records = [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    _assert_equal_steps(run, records, trainer, "margin", "accuracy")


def _turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _without_prompts() -> list[dict[str, Any]]:
    """Return pairs as whole texts, as in hh-rlhf."""
    return [{key: f"Q: {each['prompt']} A: {each[key]}" for key in ("chosen", "rejected")} for each in PAIRS]
