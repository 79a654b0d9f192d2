import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from text_job_cases import GROUPED, IDS, SIZES, byte_tokenizer, job_config, labeled, save_folder, train, write_lines

from d9d_dist import Launch, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import GradientsReady, ModelReady, StepDone
from d9d_loop.data.text_tokens import train_tokenizer
from d9d_loop.jobs import text_trainer
from d9d_loop.jobs.text_data import labeled_rows
from d9d_loop.resilience.bad_steps import BadStepError
from d9d_metrics import read_metrics

QWEN3: dict[str, Any] = {**IDS, **GROUPED}


def _qwen3(folder: Path, **more: Any) -> Path:
    import transformers

    saved = {name: more.pop(name) for name in ("dtype", "names") if name in more}
    entries: dict[str, Any] = {**QWEN3, **more}
    return save_folder(folder, transformers.Qwen3Config(**entries), "Qwen3ForCausalLM", **saved)


def _classifier(folder: Path, **more: Any) -> Any:
    import transformers

    auto = transformers.AutoModelForSequenceClassification
    return auto.from_pretrained(folder, dtype=torch.float32, **more).eval()


def _first_loss(config: Any) -> float:
    losses: list[float] = []
    trainer = text_trainer(config)
    trainer.events.on(StepDone, lambda done: losses.append(float(done.loss)))
    trainer.train()
    return losses[0]


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"dim": 16, "n_layers": 1, "n_heads": 2},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", SIZES),
    "pooler in the file": ("RobertaConfig", "RobertaModel", {**SIZES, "max_position_embeddings": 34}),
    "electra": ("ElectraConfig", "ElectraForPreTraining", {**SIZES, "embedding_size": 16}),
    "albert": ("AlbertConfig", "AlbertForPreTraining", {**SIZES, "embedding_size": 16}),
    "deberta": ("DebertaV2Config", "DebertaV2ForMaskedLM", SIZES),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", {**SIZES, "cls_token_id": 0, "sep_token_id": 2}),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
        },
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2},
    ),
    "xlnet": ("XLNetConfig", "XLNetLMHeadModel", {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**SIZES, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample("bert", "gpt2")
def test_an_adapted_classifier_of_any_family_equals_base_and_adapters_in_peft(family: str, tmp_path: Path) -> None:
    """The new head is trained and stored with the adapters, which cover the layers that peft calls all-linear."""
    import transformers

    peft = pytest.importorskip("peft")
    name, architecture, sizes = FAMILIES[family]
    model = save_folder(tmp_path / "model", getattr(transformers, name)(**{**IDS, **sizes}), architecture)
    adapter: dict[str, Any] = {"adapter": {"rank": 2}, "steps": 3}
    run = train(job_config("classify", {"folder": model}, labeled(tmp_path / "l.jsonl", [0, 1]), tmp_path, **adapter))
    base, export = _classifier(model, num_labels=2, pad_token_id=1), _classifier(run / "export")
    # peft matches the name of a head in longer names, so its head is chosen here.
    linear = peft.get_peft_model(_classifier(model, num_labels=2), peft.LoraConfig(target_modules="all-linear"))
    theirs = {each.partition(".lora_A")[0] for each, _ in linear.named_parameters() if "lora_A" in each}
    tensors = load_file(run / "adapters" / "adapter_model.safetensors")
    ours = {each.partition(".lora_A")[0] for each in tensors if "lora_A" in each}
    whole = {each for each in tensors if "lora" not in each}
    inside = f"base_model.model.{base.base_model_prefix}."
    assert ours <= theirs
    assert all(f"{each}.weight" in whole or not each.startswith(inside) for each in theirs - ours)
    heads = [each for each, _ in base.named_parameters() if not f"base_model.model.{each}".startswith(inside)]
    stored = load_file(model / "model.safetensors")
    assert {f"base_model.model.{each}" for each in heads if each not in stored} <= whole
    ids = torch.tensor([[0, 20, 30, 2], [0, 50, 60, 2]])
    with torch.no_grad():
        found = peft.PeftModel.from_pretrained(base, run / "adapters").eval()(ids)[0]
        expected = export(ids)[0]
        auto = peft.AutoPeftModelForSequenceClassification.from_pretrained(run / "adapters", pad_token_id=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(auto.eval()(ids)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    "adapter", [{"kind": "dora"}, {"base": "nf4", "block_size": 8}, {"base": "int8", "block_size": 8}]
)
def test_a_new_head_is_trained_and_stored_with_every_kind_of_adapter_on_two_ranks(
    adapter: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("d9d_peft")
    model, file = _qwen3(tmp_path / "model"), labeled(tmp_path / "l.jsonl", ["bad", "good"], 16)
    heads = []
    for ranks in (1, 2):
        options = {
            "adapter": {"rank": 2, "block_size": 8, **adapter},
            "steps": 4,
            "batch": {"global_size": 4, "microbatch_size": 2},
        }
        config = job_config(
            "classify", {"folder": model}, file, tmp_path / str(ranks), checkpoint={"every": 2}, **options
        )
        run_ranks(train, config, world_size=ranks)
        run = tmp_path / str(ranks) / "classify"
        (run / "checkpoints" / "step-00000004").rename(tmp_path / f"away-{ranks}")  # as if killed before the last save
        run_ranks(train, config, world_size=ranks)
        assert json.loads((run / "adapters" / "adapter_config.json").read_text())["modules_to_save"] == ["score"]
        heads.append(load_file(run / "adapters" / "adapter_model.safetensors")["base_model.model.score.weight"])
    torch.testing.assert_close(heads[0], heads[1], rtol=1e-4, atol=1e-5)


def test_adapters_of_a_tied_head_are_saved_and_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("d9d_peft")
    model = _qwen3(tmp_path / "model", tie_word_embeddings=True)
    file = write_lines(tmp_path / "t.jsonl", [{"text": "some text of many bytes" * 40}])
    run = train(
        job_config("pretrain", {"folder": model}, file, tmp_path, adapter={"rank": 2, "target": "lm_head|q_proj"})
    )
    assert "The weight of lm_head is tied, so the adapters are saved, but not merged" in capsys.readouterr().out
    tensors = load_file(run / "adapters" / "adapter_model.safetensors")
    assert tensors["base_model.model.lm_head.lora_B.weight"].shape == (259, 2)
    assert not (run / "export").exists()


def test_a_tied_head_is_trained_in_full_by_any_of_its_names(tmp_path: Path) -> None:
    pytest.importorskip("d9d_peft")
    model = _qwen3(tmp_path / "model", tie_word_embeddings=True)
    file = write_lines(tmp_path / "t.jsonl", [{"text": "some text of many bytes" * 40}])
    adapter = {"rank": 2, "target": "q_proj", "full": r"lm_head|model\.norm"}
    run = train(job_config("pretrain", {"folder": model}, file, tmp_path, adapter=adapter, steps=1))
    before, after = (load_file(each / "model.safetensors") for each in (model, run / "export"))
    changed = {name for name, each in before.items() if not torch.equal(each, after[name])}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= changed
    names = load_file(run / "adapters" / "adapter_model.safetensors").keys()
    assert {f"base_model.model.{each}.weight" for each in ("lm_head", "model.embed_tokens", "model.norm")} <= names


def test_an_adapter_of_a_tied_weight_in_a_pipeline_is_an_error_that_names_it(tmp_path: Path) -> None:
    pytest.importorskip("d9d_peft")
    model = _qwen3(tmp_path / "model", tie_word_embeddings=True)
    file = write_lines(tmp_path / "t.jsonl", [{"text": "some text of many bytes" * 40}])
    options = {"adapter": {"rank": 2, "target": "lm_head|q_proj"}, "mesh": {"pipeline_parallel": 2}}
    trainer = text_trainer(job_config("pretrain", {"folder": model}, file, tmp_path, **options))
    with pytest.raises(UserError, match=r"adapter\.target chooses lm_head, whose weight is tied; expected no adapter"):
        trainer.plan_for(Launch(world_size=2, device="cpu"))


def test_a_target_without_layers_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("d9d_peft")
    model, file = _qwen3(tmp_path / "model"), labeled(tmp_path / "l.jsonl", [0, 1])
    config = job_config("classify", {"folder": model}, file, tmp_path, adapter={"target": "query_key_value"})
    with pytest.raises(UserError, match=r"the pattern 'query_key_value', which matches no module; expected nn\.Linear"):
        text_trainer(config).train()


def test_adapters_that_no_file_can_hold_are_an_error_before_the_start(tmp_path: Path) -> None:
    """GLM-4 joins two matrices that d9d's own model has as two layers."""
    import transformers

    pytest.importorskip("d9d_peft")
    model = save_folder(tmp_path / "model", transformers.Glm4Config(**IDS, **GROUPED), "Glm4ForCausalLM")
    file = write_lines(tmp_path / "t.jsonl", [{"text": "some text of many bytes" * 40}])
    dataset = {"files": [file], "length": 16, "packing": True}
    config = job_config("pretrain", {"folder": model}, file, tmp_path, adapter={"rank": 2}, dataset=dataset)
    with pytest.raises(
        UserError, match=r"\[adapter\]: .*gate_up_proj.* narrow adapter\.target, or set dataset\.packing"
    ):
        text_trainer(config).train()
    assert not (tmp_path / "pretrain").exists()


@pytest.mark.full
def test_packed_and_unpacked_jobs_adapt_the_same_parameters(tmp_path: Path) -> None:
    import transformers

    pytest.importorskip("d9d_moe")
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Qwen3MoeConfig(**IDS, **GROUPED, **experts, mlp_only_layers=[0])
    model = save_folder(tmp_path / "model", config, "Qwen3MoeForCausalLM")
    file = write_lines(tmp_path / "t.jsonl", [{"text": "some text of many bytes" * 40}])
    shapes = []
    for packing in (False, True):
        dataset = {"files": [file], "length": 16, "packing": packing}
        runs = tmp_path / str(packing)
        run = train(job_config("pretrain", {"folder": model}, file, runs, adapter={"rank": 2}, dataset=dataset))
        tensors = load_file(run / "adapters" / "adapter_model.safetensors")
        shapes.append({name: tensor.shape for name, tensor in tensors.items()})
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) == 2 * (2 * 4 + 3)


def test_what_adapters_cover_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("d9d_peft")
    model, file = _qwen3(tmp_path / "model"), labeled(tmp_path / "l.jsonl", [0, 1])
    train(job_config("classify", {"folder": model}, file, tmp_path, adapter={"rank": 2, "target": "[qv]_proj$"}))
    # 2 layers of (16 + 8) * 16 elements; all: (16 + 8 + 8 + 16) * 16 + 3 * 16 * 32 for each layer, 2 * 16 of the head.
    part = 2 * 24 * 16 / (2 * (48 * 16 + 3 * 16 * 32) + 2 * 16)
    printed = capsys.readouterr().out
    assert f"adapters of 4 layers (q_proj, v_proj), which have {part:.0%} of the elements of all matrices" in printed
    assert "1 new parameters are trained in full: score.weight." in printed


def test_a_classifier_pads_as_its_folder_and_counts_positions_of_roberta(tmp_path: Path) -> None:
    import transformers

    sizes: dict[str, Any] = {**SIZES, "max_position_embeddings": 34, "num_labels": 2}
    config = transformers.RobertaConfig(**IDS, **sizes, initializer_range=0.5)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = save_folder(tmp_path / "model", config, "RobertaForSequenceClassification")
    file = labeled(tmp_path / "l.jsonl", [0, 1], 4)
    job = job_config("classify", {"folder": model}, file, tmp_path, data={"shuffle": False})
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    batch = tokenizer(["ab" * (1 + n) for n in range(4)], padding=True, return_tensors="pt")
    reference = _classifier(model).double()
    expected = torch.nn.functional.cross_entropy(reference(**batch).logits, torch.tensor([0, 1, 0, 1])).item()
    assert _first_loss(job) == pytest.approx(expected, rel=1e-5)
    assert json.loads((tmp_path / "classify" / "export" / "config.json").read_text())["pad_token_id"] == 1
    with pytest.raises(UserError, match=r"length = 33, but the model has 32 learned positions .* up to the padding id"):
        text_trainer(job_config("classify", {"folder": model}, file, tmp_path, dataset={"files": [file], "length": 33}))


@pytest.mark.parametrize(
    ("model_id", "names", "expected"),
    [(1, ["<s>", "<pad>", "</s>"], 1), (None, ["<pad>", "<s>", "</s>"], 0), (None, ["<s>", None, "</s>"], 2)],
    ids=["of the model", "of the tokenizer", "the end token"],
)
def test_a_decoder_classifies_padded_batches_like_single_texts(
    model_id: int | None, names: list[str | None], expected: int, tmp_path: Path
) -> None:
    import transformers

    model = _qwen3(tmp_path / "model", pad_token_id=model_id, names=names)
    run = train(job_config("classify", {"folder": model}, labeled(tmp_path / "l.jsonl", [0, 1]), tmp_path))
    export = _classifier(run / "export")
    assert export.config.pad_token_id == expected
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(run / "export")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = ["ab", "abab" * 3]
    with torch.no_grad():
        batched = export(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        single = torch.cat([export(**tokenizer([text], return_tensors="pt")).logits for text in texts])
    torch.testing.assert_close(batched, single)


def test_different_or_missing_padding_ids_are_an_error(tmp_path: Path) -> None:
    file = labeled(tmp_path / "l.jsonl", [0, 1])
    model = _qwen3(tmp_path / "other", names=["<s>", "<s>", "</s>"])
    with pytest.raises(UserError, match=r"pad_token_id = 1, but its tokenizer pads with 0; .*Set model\.pad_token_id"):
        text_trainer(job_config("classify", {"folder": model}, file, tmp_path))
    text_trainer(job_config("classify", {"folder": model, "pad_token_id": 0}, file, tmp_path))
    model = _qwen3(tmp_path / "none", pad_token_id=None, names=["<s>"])
    with pytest.raises(UserError, match=r"neither a padding token nor an end token; .*Set model\.pad_token_id"):
        text_trainer(job_config("classify", {"folder": model}, file, tmp_path))


@pytest.mark.parametrize("packing", [False, True])
def test_a_new_model_has_the_special_tokens_of_its_tokenizer(packing: bool, tmp_path: Path) -> None:
    import transformers

    if packing:
        pytest.importorskip("d9d_modules")
    texts = [f"the {n} cats sat on the mat. " * 4 for n in range(8)]
    file, tokenizer = (
        write_lines(tmp_path / "t.jsonl", [{"text": each} for each in texts]),
        train_tokenizer(texts, vocab_size=270),
    )
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    dataset = {"files": [file], "length": 16, "packing": packing}
    model = {"family": "qwen3", "tokenizer": tmp_path / "tokenizer.json", **GROUPED}
    run = train(job_config("pretrain", model, file, tmp_path, dataset=dataset))
    assert transformers.AutoModelForCausalLM.from_pretrained(run / "export").generation_config.eos_token_id == 0


def test_special_tokens_of_a_family_are_not_those_of_another_vocabulary(tmp_path: Path) -> None:
    """The defaults of GPT-2 are 50256, which a small vocabulary does not have; bytes end with token 256."""
    file = write_lines(tmp_path / "t.jsonl", [{"text": "some text " * 9}] * 8)
    model = {"family": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}
    run = train(job_config("pretrain", model, file, tmp_path, dataset={"files": [file], "length": 16}))
    config = json.loads((run / "export" / "config.json").read_text())
    assert (config.get("bos_token_id"), config["eos_token_id"], config.get("pad_token_id")) == (None, 256, None)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
def test_a_folder_in_16_bits_is_trained_in_float32_and_exported_in_its_dtype(
    dtype: torch.dtype, packing: bool, tmp_path: Path
) -> None:
    if packing:
        pytest.importorskip("d9d_modules")
    model = _qwen3(tmp_path / "model", dtype=dtype)
    file = write_lines(tmp_path / "t.jsonl", [{"text": f"{n} plus {n} is {2 * n}. " * 3} for n in range(40)])
    config = job_config(
        "pretrain", {"folder": model}, file, tmp_path, dataset={"files": [file], "length": 32, "packing": packing}
    )
    dtypes: set[torch.dtype] = set()
    trainer = text_trainer(config)
    trainer.events.on(GradientsReady, lambda ready: dtypes.update(each.dtype for each in ready.model.parameters()))
    run = trainer.train().run_dir
    assert dtypes == {torch.float32}
    exported = load_file(run / "export" / "model.safetensors")
    assert {each.dtype for each in exported.values()} == {dtype}
    assert all(each.isfinite().all() for each in exported.values())
    assert json.loads((run / "export" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_a_value_beyond_float16_is_not_exported(tmp_path: Path) -> None:
    """A float32 parameter may be finite although its value in the dtype of the folder is not."""
    model = _qwen3(tmp_path / "model", dtype=torch.float16)
    config = job_config("classify", {"folder": model}, labeled(tmp_path / "l.jsonl", [0, 1]), tmp_path)
    trainer = text_trainer(config)

    @torch.no_grad()
    def enlarge(done: StepDone) -> None:
        del done
        models[0].get_parameter("model.norm.weight").fill_(1e5)

    models: list[Any] = []
    trainer.events.on(ModelReady, lambda ready: models.append(ready.model))
    trainer.events.on(StepDone, enlarge)
    with pytest.raises(BadStepError, match=r"after step 1, model\.norm\.weight are not finite, or beyond the range"):
        trainer.train()
    assert not (tmp_path / "classify" / "export").exists()


def test_an_explicit_dtype_is_used_and_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = _qwen3(tmp_path / "model"), labeled(tmp_path / "l.jsonl", [0, 1])
    run = train(job_config("classify", {"folder": model, "dtype": "bfloat16"}, file, tmp_path, precision="bfloat16"))
    printed = capsys.readouterr().out
    assert "trained parameters are bfloat16" in printed
    assert "stay in float32" not in printed
    assert load_file(run / "export" / "model.safetensors")["score.weight"].dtype == torch.bfloat16
    with pytest.raises(UserError, match=r"trained parameters are float16; expected float32 or bfloat16"):
        text_trainer(job_config("classify", {"folder": model, "dtype": "float16"}, file, tmp_path / "half")).train()


def _trained_classifier(folder: Path, names: list[str]) -> Path:
    import transformers

    labels: dict[str, Any] = {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: n for n, name in enumerate(names)},
    }
    config = transformers.Qwen3Config(**QWEN3, **labels)
    return save_folder(folder, config, "Qwen3ForSequenceClassification")


@pytest.mark.parametrize("labels", [["POSITIVE", "NEUTRAL", "NEGATIVE"], [1, 0, 2]], ids=["names", "numbers"])
def test_the_classes_of_a_classifier_are_kept(labels: list[Any], tmp_path: Path) -> None:
    import transformers

    names = ["NEUTRAL", "POSITIVE", "NEGATIVE"]
    model = _trained_classifier(tmp_path / "model", names)
    file = labeled(tmp_path / "l.jsonl", labels, 4)
    config = job_config("classify", {"folder": model}, file, tmp_path, data={"shuffle": False})
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    batch = tokenizer(["ab" * (1 + n) for n in range(4)], padding=True, return_tensors="pt")
    logits = _classifier(model).double()(**batch).logits
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([1, 0, 2, 1])).item()
    assert _first_loss(config) == pytest.approx(expected, rel=1e-5)
    exported = json.loads((tmp_path / "classify" / "export" / "config.json").read_text())
    assert exported["id2label"] == {str(n): name for n, name in enumerate(names)}


def test_other_classes_than_those_of_a_classifier_are_an_error_or_asked_for(tmp_path: Path) -> None:
    model = _trained_classifier(tmp_path / "model", ["good", "bad"])
    file = labeled(tmp_path / "l.jsonl", ["a", "b", "c"])
    message = r"the model has the classes good, bad, but dataset\.files has the labels a, b, c; .*model\.num_labels"
    with pytest.raises(UserError, match=message):
        text_trainer(job_config("classify", {"folder": model}, file, tmp_path))
    run = train(job_config("classify", {"folder": model, "num_labels": 3}, file, tmp_path / "three"))
    assert load_file(run / "export" / "model.safetensors")["score.weight"].shape == (3, 16)
    assert _classifier(run / "export").config.id2label == {0: "a", 1: "b", 2: "c"}
    with pytest.raises(UserError, match=r"model\.num_labels = 5, but dataset\.files has 3 labels: .*id2label"):
        text_trainer(job_config("classify", {"folder": model, "num_labels": 5}, file, tmp_path))
    swapped = {"folder": model, "id2label": {"a": "0", "b": "1"}}
    with pytest.raises(UserError, match=r"model\.id2label = .*; expected a table such as"):
        text_trainer(job_config("classify", swapped, file, tmp_path))
    named = {"folder": model, "id2label": {"0": "b", "1": "a"}}
    file = labeled(tmp_path / "two.jsonl", ["a", "b"])
    run = train(job_config("classify", named, file, tmp_path / "two"))
    assert _classifier(run / "export").config.label2id == {"b": 0, "a": 1}
    for entry in ({"label2id": {"a": 0, "b": 1}}, {"num_labels": 3}):
        with pytest.raises(UserError, match=rf"model\.{next(iter(entry))} = .*; expected .* Set only model\.id2label"):
            text_trainer(job_config("classify", {**named, **entry}, file, tmp_path))
    text_trainer(job_config("classify", {**named, "label2id": {"a": 1, "b": 0}}, file, tmp_path))


def _problem_of(model: dict[str, Any], file: Path, runs: Path) -> tuple[str, dict[int, str]]:
    """Train a classifier; return the kind of its export as `transformers` reads it, and the names of its classes."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(train(job_config("classify", model, file, runs)) / "export")
    assert config.problem_type is not None
    return config.problem_type, config.id2label


@pytest.mark.parametrize(("kind", "size"), [("regression", 1), ("multi_label_classification", 3)])
def test_an_export_has_the_problem_that_was_trained(kind: str, size: int, tmp_path: Path) -> None:
    """Otherwise `pipeline` computes no softmax, and another job has an error."""
    import transformers

    entries: Any = {**QWEN3, "num_labels": size, "problem_type": kind}
    model = save_folder(tmp_path / "model", transformers.Qwen3Config(**entries), "Qwen3ForSequenceClassification")
    file = labeled(tmp_path / "l.jsonl", ["a", "b"])
    with pytest.raises(UserError, match=rf"^\[model\] has problem_type = {kind}, but job = classify trains one class"):
        text_trainer(job_config("classify", {"folder": model, "num_labels": 2, "problem_type": kind}, file, tmp_path))
    single = "single_label_classification"
    assert _problem_of({"folder": model, "num_labels": 2}, file, tmp_path / "new") == (single, {0: "a", 1: "b"})
    if size == 3:
        numbers = labeled(tmp_path / "n.jsonl", [0, 2])
        with pytest.raises(UserError, match=rf"{model} has problem_type = {kind}, .* set model\.problem_type to it"):
            text_trainer(job_config("classify", {"folder": model}, numbers, tmp_path))
        kept = _problem_of({"folder": model, "problem_type": single}, numbers, tmp_path / "kept")
        assert kept == (single, {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"})


def test_a_named_class_needs_no_training_sample(tmp_path: Path) -> None:
    model = _trained_classifier(tmp_path / "model", ["good", "bad", "ugly"])
    data = {"files": [labeled(tmp_path / "l.jsonl", ["good", "bad"])], "length": 32}
    data["evaluation_files"] = [labeled(tmp_path / "e.jsonl", ["ugly"])]
    rows, _ = labeled_rows(job_config("classify", {"folder": model}, tmp_path / "l.jsonl", tmp_path, dataset=data))
    held_out: Any = rows.evaluation()
    assert held_out[0]["labels"] == 2


@pytest.mark.usefixtures("rehearses")
def test_a_text_without_tokens_is_an_error(tmp_path: Path) -> None:
    model = _qwen3(tmp_path / "model")
    byte_tokenizer(adds_special=False).save(str(model / "tokenizer.json"))
    file = write_lines(tmp_path / "l.jsonl", [{"text": "", "label": n % 2} for n in range(4)])
    with pytest.raises(UserError, match=r"the tokenizer gives no tokens for the text ''; expected at least one"):
        text_trainer(job_config("classify", {"folder": model}, file, tmp_path)).train()


@pytest.mark.parametrize("packing", [False, True])
def test_the_balance_loss_of_experts_is_that_of_transformers(packing: bool, tmp_path: Path) -> None:
    """One row of 31 tokens, so that packing has the same samples."""
    import transformers

    if packing:
        pytest.importorskip("d9d_moe")
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
    }
    options: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "use_cache": False}
    config = transformers.Qwen3MoeConfig(**IDS, **GROUPED, **experts, **options)
    model = save_folder(tmp_path / "model", config, "Qwen3MoeForCausalLM")
    file = write_lines(tmp_path / "t.jsonl", [{"text": "some text of many bytes" * 40}])
    dataset = {"files": [file], "length": 31, "packing": packing}
    job = job_config("pretrain", {"folder": model}, file, tmp_path, dataset=dataset, batch={"global_size": 1})
    seen: dict[str, Any] = {}

    def keep(ready: GradientsReady) -> None:
        seen.update(
            {
                name: each.grad.clone()
                for name, each in ready.model.named_parameters()
                if each.grad is not None and name.endswith(("mlp.gate.weight", "router.weight", "router.gate.weight"))
            }
        )

    trainer = text_trainer(job)
    trainer.events.on(GradientsReady, keep)
    run = trainer.train().run_dir
    assert seen
    loss = next(record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record)
    assert loss > torch.tensor(259.0).log() + 0.9  # the balance loss is 2 for an even load of two experts per token
    exported = json.loads((run / "export" / "config.json").read_text())
    assert (exported["output_router_logits"], exported["router_aux_loss_coef"]) == (True, 0.5)
