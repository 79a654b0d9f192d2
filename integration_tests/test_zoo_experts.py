"""Mixtures of experts of `transformers` train with sharded experts as on one rank: a sample, compositions and bugs.

`test_compared_types.py` compares all.
"""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from zoo_jobs import context_differences

import d9d_moe.fused_experts
from d9d_dist import GradientSync, MeshConfig, UserError
from d9d_dist.testing import assert_trees_close, full_gradients, full_parameters, run_ranks
from d9d_loop import GradientsReady, Loss, ModelReady, StepDone, Task, Trainer, TrainerConfig, hugging_face_model
from d9d_loop.jobs import TextJobConfig, text_trainer
from d9d_loop.jobs.adapted_model import AdaptedModel
from d9d_loop.jobs.job_config import AdapterConfig
from d9d_metrics import read_metrics
from d9d_state.region_reader import RegionReader

_SAMPLE = ("gpt_oss",)
"""Experts with biases and transposed weights."""

_MESHES: Mapping[str, dict[str, int]] = {
    "sharded": {"data_parallel_shard": 4, "expert_parallel": 2},
    "replicas": {"data_parallel_replicate": 2, "data_parallel_shard": 2, "expert_parallel": 2},
    "all ranks": {"data_parallel_shard": 4, "expert_parallel": 4},
    "context": {"data_parallel_shard": 2, "context_parallel_shard": 2, "expert_parallel": 4},
    "tensor": {"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 4},
}


def _differences(types: tuple[str, ...], mesh: Mapping[str, int], mutant: str | None = None) -> dict[str, str]:
    names = [f"experts:{name}" for name in types]
    num_ranks = prod(size for axis, size in mesh.items() if axis != "expert_parallel")
    return run_ranks(_with_mutant, names, mesh, mutant, world_size=num_ranks, timeout=1800)[0]


def _with_mutant(names: list[str], mesh: Mapping[str, int], mutant: str | None) -> dict[str, str]:
    with _mutant(mutant):
        return context_differences(names, mesh)


@contextmanager
def _mutant(name: str | None) -> Generator[None]:
    """Apply a bug: the outputs of experts doubled, a dropped token, or the weights of another expert."""
    apply = d9d_moe.fused_experts.apply_fused_experts

    def wrong(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
        match name:
            case "doubled":
                return 2 * apply(experts, rows, counts)
            case "dropped token":
                return apply(experts, rows, counts) * (torch.arange(len(rows)) > 0).unsqueeze(1)
            case _:
                return apply(experts, rows.flip(0), counts.flip(0)).flip(0)

    with mock.patch.object(d9d_moe.fused_experts, "apply_fused_experts", apply if name is None else wrong):
        yield


def test_a_sample_of_experts_trains_on_two_ranks_as_on_one() -> None:
    assert _differences(_SAMPLE, {"data_parallel_shard": 2, "expert_parallel": 2}) == {}


@pytest.mark.full
@pytest.mark.parametrize("mesh", _MESHES)
def test_expert_parallelism_composes(mesh: str) -> None:
    dropping = ("zaya",) if mesh != "tensor" else ()  # its router drops choices; it has no tensor-parallel plan
    assert _differences((*_SAMPLE, "nemotron_h", "qwen2_moe", "deepseek_v3", *dropping), _MESHES[mesh]) == {}


@pytest.mark.slow("dropped token", "another expert")
@pytest.mark.parametrize("bug", ["doubled", "dropped token", "another expert"])
def test_a_mutant_is_found(bug: str) -> None:
    found = _differences(_SAMPLE[:1], {"data_parallel_shard": 2, "expert_parallel": 2}, bug)
    assert "bound" in found[f"experts:{_SAMPLE[0]}"]


def _mixtral(**changes: Any) -> Any:
    """Return a Mixtral model in float64 with equal values on all ranks."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    given = {"vocab_size": 16, "num_hidden_layers": 1, "num_local_experts": 4, **sizes, **changes}
    config = MixtralConfig.from_dict(given)
    torch.manual_seed(1)
    config._experts_implementation = "eager"
    return MixtralForCausalLM(config).double()


class _Squares(Task):
    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"input_ids": batch["input_ids"]}

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum(outputs.logits.square(), outputs.logits.numel())


def _train(
    folder: str, mesh: dict[str, int], adapter: dict[str, Any] | None = None, lr: float = 0.1, **settings: Any
) -> dict[str, Any]:
    """Train for two steps; return the losses, gradients and built values, and the stored experts that were read."""
    seen: dict[str, Any] = {"losses": [], "gradients": [], "read": set()}
    read_into = RegionReader.read_into

    def read(self: RegionReader, name: str, *args: Any) -> None:
        seen["read"].add(name)
        read_into(self, name, *args)

    model: Any = hugging_face_model(Path(folder) / "model", experts_implementation="eager")
    if adapter is not None:
        model = AdaptedModel(model, AdapterConfig(rank=2, **adapter))
    config = {
        "steps": 2,
        "batch": {"global_size": 4},
        "run": {"folder": Path(folder) / f"run{len(mesh)}"},
        "mesh": mesh,
    }
    trainer = Trainer(
        TrainerConfig.model_validate({**config, "trackers": (), "export": adapter is None, **settings}),
        model=model,
        data=[{"input_ids": torch.arange(5) + row} for row in range(8)],
        task=_Squares(),
        optimizer=lambda model: torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=lr),
        lr_schedule=lambda step: 1.0,
    )
    trainer.events.on(ModelReady, lambda event: seen.update(built=full_parameters(event.model)))
    trainer.events.on(GradientsReady, lambda event: seen["gradients"].append(full_gradients(event.model)))
    trainer.events.on(StepDone, lambda event: seen["losses"].append(event.loss.item()))
    with mock.patch.object(RegionReader, "read_into", read):
        trainer.train()
    return seen


_TWO_RANKS = {"data_parallel_shard": 2, "expert_parallel": 2}


def test_a_rank_reads_only_its_experts_and_the_export_equals_the_folder(tmp_path: Path) -> None:
    _mixtral().save_pretrained(tmp_path / "model")
    seen = run_ranks(_train, str(tmp_path), _TWO_RANKS, None, 0.0, world_size=2)
    for rank, each in enumerate(seen):
        experts = {int(name.split(".experts.")[1][0]) for name in each["read"] if ".experts." in name}
        assert experts == {2 * rank, 2 * rank + 1}
    got, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("run2/run/export", "model"))
    assert_trees_close(got, expected, rtol=0, atol=0)


_LAYOUTS: Mapping[str, tuple[dict[str, int], dict[str, Any] | None, dict[str, Any]]] = {
    "all parameters": (_TWO_RANKS, None, {}),
    "lora": (_TWO_RANKS, {}, {}),
    "nf4": (_TWO_RANKS, {"base": "nf4", "block_size": 4}, {}),
    "compiled": (_TWO_RANKS, None, {"compile": "aot_eager"}),
    "pipeline": ({"pipeline_parallel": 2, **_TWO_RANKS}, None, {}),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_folder_trains_with_sharded_experts_as_on_one_rank(tmp_path: Path, layout: str) -> None:
    mesh, adapter, settings = _LAYOUTS[layout]
    _mixtral(num_hidden_layers=2).save_pretrained(tmp_path / "model")
    expected = _train(str(tmp_path), {}, adapter)
    num_ranks = 2 * mesh.get("pipeline_parallel", 1)
    seen = run_ranks(_with_settings, str(tmp_path), mesh, adapter, settings, world_size=num_ranks)
    for each in seen:
        assert_trees_close(each["losses"], expected["losses"], rtol=1e-6)  # the router computes in float32
    for steps in zip(*(each["gradients"] for each in seen), expected["gradients"], strict=True):
        *found, whole = steps
        for each in found:
            assert_trees_close(each, {name: whole[name] for name in each}, rtol=1e-6)
        assert {name for each in found for name in each} == whole.keys()  # a pipeline stage has its own


@pytest.mark.full
def test_a_run_with_sharded_experts_resumes_on_other_meshes(tmp_path: Path) -> None:
    _mixtral(num_hidden_layers=2).save_pretrained(tmp_path / "model")
    expected = _train(str(tmp_path), {}, run={"folder": tmp_path / "whole"}, steps=3)
    run = {"folder": tmp_path / "parts"}
    first, _ = run_ranks(_in_run, str(tmp_path), {"data_parallel_shard": 2}, 1, world_size=2)
    second, _ = run_ranks(_in_run, str(tmp_path), _TWO_RANKS, 2, world_size=2)
    third = _train(str(tmp_path), {}, run=run, steps=3)
    losses = first["losses"] + second["losses"] + third["losses"]
    assert losses == pytest.approx(expected["losses"], rel=1e-6)
    assert_trees_close(third["gradients"][-1], expected["gradients"][-1], rtol=1e-6)


def _with_settings(folder: str, mesh: dict[str, int], adapter: Any, settings: dict[str, Any]) -> dict[str, Any]:
    return _train(folder, mesh, adapter, **settings)


def _in_run(folder: str, mesh: dict[str, int], steps: int) -> dict[str, Any]:
    return _train(folder, mesh, run={"folder": f"{folder}/parts"}, steps=steps)


def _pretrain(folder: str, name: str, mesh: dict[str, int]) -> list[Any]:
    config = {
        "job": "pretrain",
        "steps": 2,
        "model": {"folder": f"{folder}/model"},
        "dataset": {"files": [f"{folder}/texts.jsonl"], "length": 8},
        "batch": {"global_size": 4},
        "run": {"folder": folder, "name": name},
        "logging": {"every": 1},
        "mesh": mesh,
    }
    text_trainer(TextJobConfig.model_validate(config)).train()
    steps = read_metrics(Path(folder) / name / "metrics.jsonl")
    return [value for each in steps if "grad_norm" in each for value in (each["loss"], each["grad_norm"])]


@pytest.mark.slow
def test_a_job_on_text_shards_the_experts_of_its_folder(tmp_path: Path) -> None:
    letters = {each: n for n, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _mixtral(vocab_size=256, eos_token_id=1).save_pretrained(tmp_path / "model")
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    texts = [json.dumps({"text": f"text {n} of some letters"}) for n in range(8)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts), encoding="utf-8")
    expected = _pretrain(str(tmp_path), "one", {})
    found, _ = run_ranks(_pretrain, str(tmp_path), "two", _TWO_RANKS, world_size=2)
    assert len(expected) == 4
    assert found == pytest.approx(expected, rel=1e-6)  # the router computes in float32


def _router_losses(mesh: dict[str, int]) -> dict[str, Tensor]:
    """Return the gradients of the mean loss of two halves of a batch; a loss has the router losses of its half."""
    halves = (torch.arange(24).view(4, 6) % 16).chunk(2)
    with MeshConfig(**mesh).build() as ctx:
        model = _mixtral(output_router_logits=True, router_aux_loss_coef=0.5)
        hugging_face_model(model.config, type(model)).parallelize(model, ctx)
        sync = GradientSync(model)
        for half in halves if not mesh else [halves[ctx.rank]]:
            (model(input_ids=half, labels=half).loss / 2).backward()
        sync.finish()
        return full_gradients(model)


def test_router_losses_are_those_of_each_rank() -> None:
    expected = _router_losses({})
    assert expected["model.layers.0.mlp.gate.weight"].any()
    for found in run_ranks(_router_losses, _TWO_RANKS, world_size=2):
        assert_trees_close(found, expected, rtol=1e-6)  # the router computes in float32


def _error(mesh: dict[str, int], num_experts: int) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    with MeshConfig(**mesh).build() as ctx, torch.device("meta"):
        if num_experts:
            model: Any = _mixtral(num_local_experts=num_experts)
        else:
            model = LlamaForCausalLM(LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
        with pytest.raises(UserError) as caught:
            hugging_face_model(model.config, type(model)).parallelize(model, ctx)
        return str(caught.value)


@pytest.mark.parametrize(
    ("num_experts", "message"),
    [
        (0, "mesh.expert_parallel = 2, but LlamaForCausalLM has no experts; expected fused experts with the decorator"),
        (3, "mesh.expert_parallel = 2 does not divide the 3 experts of model.layers.0.mlp.experts. Use a degree"),
    ],
)
def test_experts_that_cannot_be_sharded_are_an_error(num_experts: int, message: str) -> None:
    for error in run_ranks(_error, _TWO_RANKS, num_experts, world_size=2):
        assert error.startswith(message)
