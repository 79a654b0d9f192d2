from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_cases import CASES, Case
from safetensors.torch import load_file
from torch import nn

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import assert_trees_close, full_gradients, full_parameters, run_ranks
from d9d_loop import (
    Finished,
    GradientsReady,
    Loss,
    StepDone,
    Task,
    Trainer,
    TrainerConfig,
    hugging_face_model,
    validate_config,
)
from d9d_loop.model import _hugging_face_stage as stages
from d9d_loop.model import _skipped_draws
from d9d_loop.model.built_model import build_model

Batch = dict[str, torch.Tensor]
_NUM_SAMPLES, _STEPS, _RATE = 4, 2, 0.1
_QUIET = {
    "trackers": (),
    "rehearsal": False,
    "logging": {"progress": False, "draw_lr_schedule": False},
    "resilience": {"watchdog": {"enabled": False}, "health": {"enabled": False}},
    "gradients": {"max_norm": None},
}


def _case(name: str, num_layers: int) -> Case:
    case = CASES[name]
    key = "n_layer" if "n_layer" in case.config else "num_hidden_layers"
    return replace(case, config={**case.config, key: num_layers})


def _batch(name: str) -> Batch:
    samples = CASES[name].samples(_NUM_SAMPLES)
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def _loss(outputs: Any) -> torch.Tensor:
    logits = outputs.logits
    return (logits.square() + logits * torch.arange(logits.shape[-1])).flatten(1).mean(1).sum()


class _Squares(Task):
    def inputs(self, batch: Batch) -> Mapping[str, Any]:
        return batch

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        return Loss(_loss(outputs), weight=len(outputs.logits))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_RATE)


def _load(name: str, folder: Path) -> Any:
    import transformers

    model_class = getattr(transformers, CASES[name].model_class)
    return model_class.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").train()


def _plain(name: str, folder: Path) -> tuple[list[float], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Train in a plain loop; return the losses, the gradients of each step, and the trained parameters."""
    model, losses, gradients = _load(name, folder), [], []
    optimizer = _sgd(model)
    for _ in range(_STEPS):
        loss = _loss(model(**_batch(name))) / _NUM_SAMPLES
        loss.backward()
        losses.append(loss.item())
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, full_parameters(model)


def _train(folder: str, name: str, mesh: Mapping[str, int], pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """Train in stages; return the losses, and the gradients and parameters of this rank's stages."""
    seen: dict[str, Any] = {"losses": [], "gradients": []}
    values = {"steps": _STEPS, "batch": {"global_size": _NUM_SAMPLES, "microbatch_size": 1}, "mesh": mesh}
    run = {"run": {"folder": str(Path(folder) / "run")}, "pipeline": {"schedule": pipeline}}
    trainer = Trainer(
        validate_config(TrainerConfig, {**_QUIET, **values, **run}),
        model=hugging_face_model(Path(folder) / "model", dtype=torch.float64, experts_implementation="eager"),
        data=CASES[name].samples(_NUM_SAMPLES),
        task=_Squares(),
        optimizer=_sgd,
        lr_schedule=lambda step: 1.0,
    )
    trainer.events.on(GradientsReady, lambda event: seen["gradients"].append(full_gradients(event.model)))
    trainer.events.on(StepDone, lambda event: seen["losses"].append(event.loss.item()))
    trainer.events.on(Finished, lambda event: seen.update(trained=full_parameters(event.model)))
    seen["export"] = str(trainer.train().export_dir)
    return seen


def _check(folder: Path, name: str, ranks: list[dict[str, Any]]) -> None:
    losses, gradients, trained = _plain(name, folder / "model")
    rtol = 10 * torch.finfo(torch.float32).eps if CASES[name].rounds_to_float32 else 1e-9
    assert_trees_close(ranks[-1]["losses"], losses, rtol=rtol)
    for step, expected in enumerate(gradients):
        got = {key: value for rank in ranks for key, value in rank["gradients"][step].items()}
        assert_trees_close(got, expected, rtol=rtol)
    got = {key: value for rank in ranks for key, value in rank["trained"].items()}
    assert_trees_close(got, trained, rtol=rtol)
    export = Path(ranks[0]["export"])
    files = {key: value for file in export.glob("*.safetensors") for key, value in load_file(file).items()}
    assert files.keys() == load_file(folder / "model" / "model.safetensors").keys()
    assert_trees_close(full_parameters(_load(name, export)), got, rtol=0, atol=0)


_SAMPLE = ("llama tied", "gpt2", "gemma3")
_DECODERS = ("llama", "qwen3", "gemma2", "phi3", "olmo2", "qwen3 moe", "mixtral", "gpt neox", "deepseek v3")


@pytest.mark.slow("gpt2")
@pytest.mark.parametrize("name", [*_SAMPLE, *(pytest.param(name, marks=pytest.mark.full) for name in _DECODERS)])
def test_three_uneven_stages_train_as_a_plain_loop(tmp_path: Path, name: str) -> None:
    _case(name, 4).save(tmp_path / "model")
    schedule = {"kind": "interleaved_1f1b", "stages_per_rank": 3}
    _check(tmp_path, name, [_train(str(tmp_path), name, {}, schedule)])


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        ({"pipeline_parallel": 2}, "zbv"),
        *(
            pytest.param(mesh, schedule, marks=pytest.mark.full)
            for mesh in ({}, {"data_parallel_shard": 2}, {"tensor_parallel": 2})
            for schedule in ("1f1b", "zb1p")
        ),
    ],
)
def test_stages_on_several_ranks_train_as_a_plain_loop(tmp_path: Path, mesh: dict[str, int], schedule: str) -> None:
    _case("llama tied", 5).save(tmp_path / "model")
    mesh = {"pipeline_parallel": 2, **mesh}
    arguments = str(tmp_path), "llama tied", mesh, {"kind": schedule}
    _check(tmp_path, "llama tied", run_ranks(_train, *arguments, world_size=prod(mesh.values())))


def _logits(folder: Path, inputs: Mapping[str, Any], num_stages: int) -> torch.Tensor:
    """Return the logits of stages that run one after the other."""
    provider = hugging_face_model(folder, from_scratch=True, dtype=torch.float64)
    payload: tuple[Any, ...] = ()
    for index in range(num_stages):
        torch.manual_seed(0)
        payload = (provider.build(StageInfo(index, num_stages))(*payload, **inputs),)
    return payload[0].logits


def _skip_a_block(stage: StageInfo, num_layers: int, **_: Any) -> range:
    return range(3, num_layers) if stage.index else range(2)


def _count_from_zero(forward: Any, *first: Any, **shared: Any) -> Any:
    if first:
        shared["position_ids"] = torch.zeros_like(shared["input_ids"])
    return _FORWARD(forward, *first, **shared)


def _enter_by_embeddings(layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return layer._layer[1].hidden


_FORWARD = stages._StageForward.__call__
_MISTAKES = {
    "none": [],
    "a block is skipped": [(StageInfo, "layers", _skip_a_block)],
    "positions of the second stage": [(stages._StageForward, "__call__", _count_from_zero)],
    "the embedding is scaled twice": [
        (stages._AbsentLayer, "__call__", _enter_by_embeddings),
        (stages._Flow, "replace", lambda flow, index, call: flow._expected.discard(index) or call),
    ],
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_mistakes_of_stages_change_the_logits(tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, inputs = _case("gemma3", 4).save(tmp_path), _batch("gemma3")
    expected = _logits(folder, inputs, 1)
    for owner, name, change in _MISTAKES[mistake]:
        monkeypatch.setattr(owner, name, change)
    assert torch.allclose(_logits(folder, inputs, 2), expected) == (mistake == "none")


def test_models_and_inputs_that_cannot_be_split_are_errors(tmp_path: Path) -> None:
    import transformers

    folder, inputs = _case("llama", 4).save(tmp_path), _batch("llama")
    second: Any = hugging_face_model(folder, from_scratch=True).build(StageInfo(1, 2))
    with pytest.raises(UserError, match=r"got no keyword argument input_ids on pipeline stage 1; expected it on every"):
        second(torch.zeros(1, 7, 16))
    with pytest.raises(UserError, match=r"got output_hidden_states = True in a pipeline, .* expected no outputs of"):
        second(torch.zeros(1, 7, 16), **inputs, output_hidden_states=True)
    with pytest.raises(UserError, match=r"4 layers .* are too few for 5 pipeline stages"):
        hugging_face_model(folder).build(StageInfo(1, 5))
    second.model.layers = second.model.layers[:1]  # as with layerdrop
    with pytest.raises(
        UserError, match=r"did not call the block 2 of model.layers on pipeline stage 1; expected a call"
    ):
        second(torch.zeros(1, 7, 16), **inputs)
    experts = transformers.MixtralConfig(**_case("mixtral", 4).config, output_router_logits=True)
    provider = hugging_face_model(experts, transformers.AutoModelForCausalLM)
    with pytest.raises(
        UserError, match=r"cannot be split before model.layers.2: code outside of the blocks uses values"
    ):
        provider.build(StageInfo(1, 2))
    config = transformers.T5Config(**CASES["t5"].config)
    with pytest.raises(UserError, match=r"T5ForConditionalGeneration on the device meta, which fails with"):
        hugging_face_model(config, transformers.T5ForConditionalGeneration).build(StageInfo(1, 2))


def test_a_stage_of_a_model_with_values_that_are_not_drawn_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_skipped_draws, "_LARGE_BYTES", 0)
    provider = hugging_face_model(_case("llama tied", 4).save(tmp_path), from_scratch=True)
    last = build_model(provider, StageInfo(1, 2), seed=0, keep_values=False)
    assert {name for name in last.tensors if "layers" not in name} >= {"model.embed_tokens.weight", "model.norm.weight"}
    assert all(each.is_meta for each in last.module.parameters())
