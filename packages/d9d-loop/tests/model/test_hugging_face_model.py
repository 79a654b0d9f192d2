import json
import sys
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_cases import CASES
from pydantic import JsonValue
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from d9d_dist import DistributedContext, MeshConfig, StageInfo, UserError
from d9d_dist.testing import assert_trees_close, full_gradients, full_parameters, run_ranks
from d9d_loop import (
    Finished,
    GradientsReady,
    Inference,
    InferenceConfig,
    InferenceTask,
    Loss,
    ModelReady,
    StepDone,
    Task,
    Trainer,
    TrainerConfig,
    hugging_face_model,
    validate_config,
)
from d9d_loop.model.export_notes import with_older_entries

Batch = dict[str, torch.Tensor]
_NUM_SAMPLES = 4
_FLOAT32_UNIT = torch.finfo(torch.float32).eps
_MESHES = {
    "one rank": {},
    "shards": {"data_parallel_shard": 2},
    "replicas": {"data_parallel_replicate": 2},
    "tensor": {"tensor_parallel": 2},
    "shards and tensor": {"data_parallel_shard": 2, "tensor_parallel": 2},
}
# Written down, because asking the classes would import all of them in every test run.
_WITHOUT_TENSOR_PLAN = {
    *("gpt2", "bert", "roberta", "distilbert", "albert", "electra", "t5", "bart"),
    *("vit", "clip vision", "whisper", "wav2vec2", "mamba"),
}
_TRIED = [
    (mesh, name) for mesh in _MESHES for name in CASES if "tensor" not in mesh or name not in _WITHOUT_TENSOR_PLAN
]


class _Squares(Task):
    """Mean square of the model's outputs, summed over samples."""

    def inputs(self, batch: Batch) -> Mapping[str, Any]:
        return batch

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        first = outputs["logits"] if "logits" in outputs else outputs["last_hidden_state"]
        return Loss(first.square().flatten(1).mean(1).sum(), weight=len(first))


class _Sums(InferenceTask):
    def inputs(self, batch: Batch) -> Mapping[str, Any]:
        return batch

    def results(self, outputs: Any, batch: Batch) -> Sequence[JsonValue]:
        return [row.sum().item() for row in outputs["logits"]]


def _job(folder: Path, mesh: Mapping[str, int]) -> dict[str, Any]:
    quiet = {"logging": {"progress": False}, "resilience": {"watchdog": {"enabled": False}}}
    return {"run": {"folder": str(folder)}, "mesh": dict(mesh), **quiet}


def _config(folder: Path, mesh: Mapping[str, int], *, steps: int = 1) -> TrainerConfig:
    values = {"steps": steps, "batch": {"global_size": _NUM_SAMPLES}, "optimizer": {"learning_rate": 1e-2}}
    quiet = {"trackers": (), "resilience": {"watchdog": {"enabled": False}, "health": {"enabled": False}}}
    return validate_config(TrainerConfig, {**_job(folder, mesh), **values, **quiet})


def _samples(name: str) -> list[Batch]:
    samples = CASES[name].samples(_NUM_SAMPLES)
    return [
        {key: value.double() if value.is_floating_point() else value for key, value in sample.items()}
        for sample in samples
    ]


def _batch(name: str) -> Batch:
    samples = _samples(name)
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**full_parameters(model), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def _train(folder: str, name: str, mesh: dict[str, int], steps: int = 1) -> dict[str, Any]:
    """Train; return the initial values, the results of the last step, and the final values."""
    seen: dict[str, Any] = {}

    def take_model(event: ModelReady) -> None:
        seen.update(before=_tensors(event.model), training=event.model.training)

    trainer = Trainer(
        _config(Path(folder), mesh, steps=steps),
        model=hugging_face_model(Path(folder) / "model", dtype=torch.float64, experts_implementation="eager"),
        data=_samples(name),
        task=_Squares(),
    )
    trainer.events.on(ModelReady, take_model)
    trainer.events.on(GradientsReady, lambda event: seen.update(gradients=full_gradients(event.model)))
    trainer.events.on(StepDone, lambda event: seen.update(loss=event.loss.item()))
    trainer.events.on(Finished, lambda event: seen.update(after=_tensors(event.model)))
    trainer.train()
    return seen


class _Float32Operators(TorchFunctionMode):
    """Counts operators that compute in less than float64 on the way to the loss, such as those of norms and routers.

    A layout may round the result of each to the other side, which moves it by one unit of float32.
    """

    num_operators = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        self.num_operators += any(leaf.dtype == torch.float32 for leaf in leaves)
        return output


def _load(name: str, folder: Path) -> Any:
    import transformers

    model_class = getattr(transformers, CASES[name].model_class)
    return model_class.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")


@pytest.mark.parametrize(("mesh", "name"), _TRIED)
@pytest.mark.sample("replicas-gpt2")
@pytest.mark.slow("tensor-glm4 moe lite")
def test_a_folder_trains_as_the_model_of_from_pretrained(tmp_path: Path, name: str, mesh: str) -> None:
    import transformers

    config = getattr(transformers, CASES[name].model_class).config_class
    assert bool(config.base_model_tp_plan) == (name not in _WITHOUT_TENSOR_PLAN)
    folder = CASES[name].save(tmp_path / "model")
    if _MESHES[mesh]:
        seen, *_ = run_ranks(_train, str(tmp_path), name, _MESHES[mesh], world_size=prod(_MESHES[mesh].values()))
    else:
        seen = _train(str(tmp_path), name, {})
    model = _load(name, folder)
    assert_trees_close(seen["before"], _tensors(model), rtol=0, atol=0)
    assert seen["training"]
    with _Float32Operators() as narrow:
        loss = _Squares().loss(model.train()(**_batch(name)), _batch(name))
    mean = loss.total / loss.weight
    mean.backward()
    expected = full_gradients(model)
    got = {key: seen["gradients"].get(key, torch.zeros_like(value)) for key, value in expected.items()}
    # Roundings to float32 are independent, so their sum grows as the square root of their number.
    rtol = _FLOAT32_UNIT * narrow.num_operators**0.5 if CASES[name].rounds_to_float32 else 1e-9
    assert_trees_close((seen["loss"], got), (mean.item(), expected), rtol=rtol)
    exported = _load(name, tmp_path / "run" / "export")
    assert_trees_close(_tensors(exported), seen["after"], rtol=0, atol=0)


def test_an_export_equals_save_pretrained(tmp_path: Path) -> None:
    folder = CASES["mixtral"].save(tmp_path / "model")
    _train(str(tmp_path), "mixtral", {})
    model = _load("mixtral", tmp_path / "run" / "export")
    model.save_pretrained(tmp_path / "saved")
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert_trees_close(exported, load_file(tmp_path / "saved" / "model.safetensors"), rtol=0, atol=0)
    assert exported.keys() == load_file(folder / "model.safetensors").keys()
    config, saved = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("run/export", "saved"))
    assert config == with_older_entries(saved)


def test_a_job_resumes_from_its_checkpoint_without_the_weights(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        CASES["llama tied"].save(tmp_path / name / "model")
    whole = _train(str(tmp_path / "whole"), "llama tied", {}, steps=2)
    first = _train(str(tmp_path / "parts"), "llama tied", {}, steps=1)
    weights = tmp_path / "parts" / "model" / "model.safetensors"
    save_file({key: value * 0 for key, value in load_file(weights).items()}, weights)
    second = _train(str(tmp_path / "parts"), "llama tied", {}, steps=2)
    assert first["loss"] != second["loss"]
    assert_trees_close(second["after"], whole["after"], rtol=0, atol=0)


def _infer(folder: str, mesh: dict[str, int], weights: str | None) -> None:
    sizes = {"batch_size": 2, "part_size": 2}
    inference = Inference(
        validate_config(InferenceConfig, {**_job(Path(folder), mesh), **sizes, "weights": weights}),
        model=hugging_face_model(Path(folder) / "model", dtype=torch.float64),
        data=_samples("llama tied"),
        task=_Sums(),
    )
    inference.run()


@pytest.mark.parametrize("weights", [None, "other"])
def test_an_inference_loads_the_weights_of_the_folder_or_its_configuration(tmp_path: Path, weights: str | None) -> None:
    folder = CASES["llama tied"].save(tmp_path / "model")
    if weights is not None:
        tensors = load_file(folder / "model.safetensors")
        (tmp_path / weights).mkdir()
        save_file({name: tensor * 2 for name, tensor in tensors.items()}, tmp_path / weights / "model.safetensors")
    _infer(str(tmp_path), {}, weights and str(tmp_path / weights))
    model = _load("llama tied", folder)
    if weights is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    expected = model(**_batch("llama tied")).logits.flatten(1).sum(1).tolist()
    lines = (tmp_path / "run" / "results" / "results.jsonl").read_text().splitlines()
    torch.testing.assert_close([json.loads(line) for line in lines], expected)


def _build(provider: Any) -> nn.Module:
    torch.manual_seed(5)
    return provider.build(StageInfo())


def test_new_parameters_are_initialized_as_by_from_pretrained(tmp_path: Path) -> None:
    import transformers

    folder = CASES["bert"].save(tmp_path / "model")
    auto = transformers.AutoModelForSequenceClassification
    provider = hugging_face_model(folder, auto, new=["classifier.*", "bert.pooler.*"], unused=["cls.*"], num_labels=3)
    model = _build(provider)
    torch.manual_seed(5)
    expected = auto.from_pretrained(folder, num_labels=3)
    assert type(model) is type(expected)
    real = {name: tensor for name, tensor in model.named_parameters() if not tensor.is_meta}
    assert set(real) == {
        f"{name}.{kind}" for name in ("classifier", "bert.pooler.dense") for kind in ("weight", "bias")
    }
    assert_trees_close(real, {name: expected.get_parameter(name).detach() for name in real}, rtol=0, atol=0)


def test_the_error_lists_missing_and_unused_weights(tmp_path: Path) -> None:
    import transformers

    folder = CASES["bert"].save(tmp_path / "model")
    provider = hugging_face_model(folder, transformers.BertForSequenceClassification)
    with pytest.raises(UserError, match=r"does not hold the weights of BertForSequenceClassification:") as caught:
        _build(provider)
    lines = str(caught.value).splitlines()
    assert [line for line in lines if "classifier" in line] == ["    classifier.bias", "    classifier.weight"]
    assert any('list them in new=["..."]' in line for line in lines)
    assert "    cls.predictions.transform.dense.weight" in lines
    assert any('list them in unused=["..."]' in line for line in lines)


def test_weights_of_another_shape_are_refused_unless_new(tmp_path: Path) -> None:
    folder = CASES["roberta"].save(tmp_path / "model")
    with pytest.raises(UserError, match=r"classifier.out_proj.weight: got \[3, 16\]; expected \[5, 16\]"):
        _build(hugging_face_model(folder, num_labels=5))
    model = _build(hugging_face_model(folder, num_labels=5, new=["classifier.out_proj.*"]))
    assert not model.get_parameter("classifier.out_proj.weight").is_meta
    assert model.get_parameter("classifier.dense.weight").is_meta


def test_weights_that_cannot_be_fused_are_refused(tmp_path: Path) -> None:
    folder = CASES["mixtral"].save(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    save_file({**tensors, name: tensors[name][1:].clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"cannot be converted to those of MixtralForCausalLM; .* reports why"):
        _build(hugging_face_model(folder))


@pytest.mark.parametrize("differs", [False, True])
def test_tied_weights_that_are_stored_twice_stay_tied_if_equal(tmp_path: Path, differs: bool) -> None:
    import transformers

    folder = CASES["llama tied"].save(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + differs
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model: Any = _build(hugging_face_model(folder))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is not differs
    expected = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert (expected.lm_head.weight is expected.model.embed_tokens.weight) is not differs
    assert_trees_close(_train(str(tmp_path), "llama tied", {})["before"], _tensors(expected.double()), rtol=0, atol=0)


def test_an_index_of_several_files_is_read(tmp_path: Path) -> None:
    CASES["qwen2"].build().save_pretrained(tmp_path / "model", max_shard_size="8KB")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    before = _train(str(tmp_path), "qwen2", {})["before"]
    assert_trees_close(before, _tensors(_load("qwen2", tmp_path / "model")), rtol=0, atol=0)


@pytest.mark.parametrize("by", ["configuration", "folder"])
def test_without_weights_a_model_has_the_initialization_of_transformers(tmp_path: Path, by: str) -> None:
    import transformers

    folder = CASES["qwen3"].save(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(folder)
    provider = hugging_face_model(config) if by == "configuration" else hugging_face_model(folder, from_scratch=True)
    assert provider.initial_weights is None
    assert not provider.late_init
    model = _build(provider)
    torch.manual_seed(5)
    expected = transformers.AutoModelForCausalLM.from_config(config)
    assert_trees_close(_tensors(model), _tensors(expected), rtol=0, atol=0)


@pytest.mark.parametrize("by", ["configuration", "folder"])
def test_training_keeps_no_cache_and_an_export_keeps_the_setting_of_the_folder(tmp_path: Path, by: str) -> None:
    import transformers

    folder = CASES["qwen3"].save(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(folder)
    provider: Any = hugging_face_model(config if by == "configuration" else folder)
    for _ in range(2):  # a second model has the settings of the first
        model: Any = _build(provider)
        assert not model.config.use_cache
        assert provider.export_files()["config.json"]["use_cache"] is True
    assert config.use_cache is True


@pytest.mark.parametrize(
    ("kind", "entry"), [("GPT2", "resid_pdrop"), ("Qwen3", "attention_dropout")], ids=["modules", "attributes"]
)
def test_dropout_can_be_disabled_and_an_export_keeps_it(kind: str, entry: str) -> None:
    import transformers

    sizes: Any = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, entry: 0.5}
    sizes |= {"intermediate_size": 24, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    expected = transformers.AutoModelForCausalLM
    ids = torch.arange(8)[None]
    for disable_dropout in (True, False):
        provider: Any = hugging_face_model(config, expected, disable_dropout=disable_dropout)
        model: Any = _build(provider)
        plain: Any = expected.from_config(config).eval()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model(ids).logits, plain(ids).logits) == disable_dropout
        assert provider.export_files()["config.json"][entry] == 0.5


LONGROPE = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 20.0, "short_factor": [1.0] * 4}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 20.0},
        {**LONGROPE, "long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": 8},
    ],
)
def test_rows_that_change_the_rotary_frequencies_of_other_rows_are_an_error(rope: dict[str, Any]) -> None:
    model, plain = _llama_of_rope(rope, max_position_embeddings=8 if rope["rope_type"] == "dynamic" else 32)
    assert torch.equal(model(torch.arange(8)[None]).logits, plain(torch.arange(8)[None]).logits)
    with pytest.raises(UserError, match=rf"got a row of 9 positions, .* {rope['rope_type']}; expected at most 8 pos"):
        model(torch.arange(9)[None])
    documents = torch.arange(16)[None], torch.arange(16)[None] % 8  # two in a row of 16
    assert torch.isfinite(model(documents[0], position_ids=documents[1]).logits).all()


def test_equal_factors_of_longrope_take_rows_of_all_lengths() -> None:
    rope = {**LONGROPE, "long_factor": [1.0] * 4, "original_max_position_embeddings": 8}
    model, plain = _llama_of_rope(rope, max_position_embeddings=32)
    ids = torch.arange(24)[None]
    assert torch.equal(model(ids).logits, plain(ids).logits)


def _llama_of_rope(rope: dict[str, Any], **sizes: Any) -> tuple[Any, Any]:
    """Return a model of `hugging_face_model`, and the same one of transformers."""
    import transformers

    sizes |= {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope)
    model: Any = _build(hugging_face_model(config, transformers.AutoModelForCausalLM))
    plain = transformers.AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict())
    return model, plain


def test_older_entries_of_rope_are_an_error_that_names_the_new_one(tmp_path: Path) -> None:
    folder = CASES["llama"].save(tmp_path / "model")
    changes: list[tuple[str, Any]] = [("rope_scaling", {"rope_type": "linear", "factor": 4.0}), ("rope_theta", 5.0)]
    for name, value in changes:
        with pytest.raises(UserError, match=rf"got {name} for LlamaConfig.* Set rope_parameters"):
            hugging_face_model(folder, **{name: value})


def _groups(folder: str) -> set[str]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        provider = hugging_face_model(folder)
        model = provider.build(StageInfo()).to_empty(device="meta")
        provider.parallelize(model, ctx)
        return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def test_each_block_is_an_fsdp_group_unless_a_tied_parameter_leaves_it(tmp_path: Path) -> None:
    groups = run_ranks(_groups, str(CASES["bert"].save(tmp_path)), world_size=2)[0]
    assert groups == {"", "bert.encoder.layer.0", "bert.encoder.layer.1"}


def test_generation_settings_and_configuration_changes_are_applied(tmp_path: Path) -> None:
    folder = CASES["llama"].save(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 77}))
    model: Any = _build(hugging_face_model(folder, attn_implementation="eager", rms_norm_eps=0.25))
    assert model.generation_config.max_new_tokens == 77
    assert model.config._attn_implementation == "eager"
    assert model.model.norm.variance_epsilon == 0.25


def test_models_that_cannot_be_built_are_refused_with_advice(tmp_path: Path) -> None:
    import transformers

    with pytest.raises(UserError, match=r"has no config.json; expected a folder .* `hf download NAME"):
        hugging_face_model(tmp_path / "none")
    folder = CASES["llama"].save(tmp_path / "model")
    with pytest.raises(UserError, match=r"LlamaConfig has no num_heds; .* Correct the names"):
        hugging_face_model(folder, num_heds=3)
    config = transformers.AutoConfig.from_pretrained(folder)
    with pytest.raises(UserError, match=r"got both a configuration and changes to it \(num_labels\)"):
        hugging_face_model(config, num_labels=3)
    config.architectures = ["Unknown"]
    with pytest.raises(UserError, match=r"names Unknown in architectures; .* Pass the class"):
        hugging_face_model(config)
    config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(UserError, match=r"the model is quantized"):
        hugging_face_model(config)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"has no model.safetensors .*; it has pytorch_model.bin. Convert them"):
        hugging_face_model(folder)


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'transformers>=5"):
        hugging_face_model("folder")


def _refusal(folder: str, mesh: dict[str, int]) -> str:
    with MeshConfig(**mesh).build() as ctx:
        provider = hugging_face_model(folder)
        model = provider.build(StageInfo()).to_empty(device="meta")
        with pytest.raises(UserError) as caught:
            provider.parallelize(model, ctx)
        return str(caught.value)


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        (
            "bert",
            {"context_parallel_shard": 2},
            "BertForMaskedLM cannot be split over context-parallel ranks: in bert.embeddings, a part of each row fails",
        ),
        (
            "bert",
            {"tensor_parallel": 2},
            "mesh.tensor_parallel = 2, but BertForMaskedLM has no tensor-parallel plan; expected 1. Shard the",
        ),
        (
            "llama",
            {"tensor_parallel": 4},
            "the tp degree = 4 does not divide dim 0 of model.layers.0.self_attn.k_proj.weight, which is 2 blocks of",
        ),
    ],
    ids=["context", "no plan", "heads"],
)
def test_axes_without_a_plan_are_refused(tmp_path: Path, name: str, mesh: dict[str, int], message: str) -> None:
    folder = str(CASES[name].save(tmp_path))
    for refusal in run_ranks(_refusal, folder, mesh, world_size=prod(mesh.values())):
        assert refusal.startswith(message)


def test_weights_that_leave_a_tensor_without_values_are_refused(tmp_path: Path, ctx: DistributedContext) -> None:
    folder = CASES["roberta"].save(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    headless = {name: tensor for name, tensor in tensors.items() if not name.startswith("classifier")}
    (tmp_path / "other").mkdir()
    save_file(headless, tmp_path / "other" / "model.safetensors")
    trainer = Trainer(
        _config(tmp_path, {}).model_copy(update={"initial_weights": tmp_path / "other"}),
        model=hugging_face_model(folder, new=["classifier.*"]),
        data=_samples("roberta"),
        task=_Squares(),
    )
    with pytest.raises(UserError, match=r"has no values for classifier.dense.bias, .* the build does not set them"):
        trainer.train()
