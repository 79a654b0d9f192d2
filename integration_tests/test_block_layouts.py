"""Blocks on real ranks: models of two lists, and adapters, in shards, pipelines and with recomputed blocks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from zoo_compositions import Composition, difference, write_plain

from d9d_dist.testing import full_parameters, run_ranks
from d9d_loop import Finished, Loss, ModelReady, StepDone, Task, Trainer, TrainerConfig, hugging_face_model
from d9d_loop.jobs.adapted_model import AdaptedModel
from d9d_loop.jobs.job_config import AdapterConfig

_RANK, _ALPHA, _RATE, _STEPS = 2, 6.0, 0.5, 3
_IDS = (7 * torch.arange(48) % 31).view(8, 6)


@pytest.mark.full
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_model_of_two_lists_trains_as_in_a_plain_loop(name: str, tmp_path: Path) -> None:
    assert run_ranks(write_plain, name, str(tmp_path), world_size=1) == [""]
    for mesh in ({"data_parallel_shard": 2}, {"data_parallel_replicate": 2, "data_parallel_shard": 2}):
        composition = Composition(mesh, None)
        assert not difference(name, composition, str(tmp_path), activation_checkpointing="blocks")


class _Squares(Task):
    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"input_ids": batch["input_ids"]}

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum(outputs.logits.square(), len(outputs.logits))


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
    }
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=False, **sizes)).double()


def _train_adapters(folder: str, mesh: Mapping[str, int], settings: dict[str, Any]) -> dict[str, Any]:
    """Train adapters; return the losses, and the parameters of this rank before and after."""
    seen: dict[str, Any] = {"losses": []}
    adapter = AdapterConfig(rank=_RANK, alpha=_ALPHA, target=r"self_attn\.[qv]_proj|mlp\.\w+")
    config: dict[str, Any] = {
        "steps": _STEPS,
        "batch": {"global_size": 8, "microbatch_size": 2},
        "run": {"folder": f"{folder}/{'-'.join(mesh)}"},
        "mesh": mesh,
        "trackers": (),
        "export": False,
        "data": {"shuffle": False},
        "gradients": {"max_norm": None},
    }
    trainer = Trainer(
        TrainerConfig.model_validate(config | settings),
        model=AdaptedModel(hugging_face_model(Path(folder) / "model"), adapter),
        data=[{"input_ids": row} for row in _IDS] * _STEPS,
        task=_Squares(),
        optimizer=lambda model: torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=_RATE),
        lr_schedule=lambda step: 1.0,
    )
    trainer.events.on(ModelReady, lambda event: seen.update(built=full_parameters(event.model)))
    trainer.events.on(StepDone, lambda event: seen["losses"].append(event.loss.item()))
    trainer.events.on(Finished, lambda event: seen.update(trained=full_parameters(event.model)))
    trainer.train()
    return seen


def _plain_adapters(built: Mapping[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Train the factors of a plain model, whose weights are W + alpha / rank B A."""
    model = _llama()
    factors = {name: each.clone().requires_grad_() for name, each in built.items() if "lora" in name}
    losses = []
    for _ in range(_STEPS):
        weights = dict(model.named_parameters())
        for name in [each for each in factors if each.endswith(".lora_a")]:
            up, layer = factors[name.replace("lora_a", "lora_b")], name.removesuffix(".adapter.lora_a")
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + _ALPHA / _RANK * up @ factors[name]
        loss = functional_call(model, weights, kwargs={"input_ids": _IDS}).logits.square().sum() / len(_IDS)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, [*factors.values()])
        with torch.no_grad():
            for factor, gradient in zip(factors.values(), gradients, strict=True):
                factor.sub_(_RATE * gradient)
    return losses, {name: each.detach() for name, each in factors.items()}


@pytest.mark.slow
def test_adapters_of_blocks_train_as_in_a_plain_loop(tmp_path: Path) -> None:
    _llama().save_pretrained(tmp_path / "model")
    recomputed = {"activation_checkpointing": "blocks"}
    layouts: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
        ({"data_parallel_shard": 2}, recomputed),
        ({"pipeline_parallel": 2}, {**recomputed, "pipeline": {"schedule": "interleaved_1f1b"}}),
        ({"pipeline_parallel": 2, "data_parallel_shard": 2}, {"pipeline": {"schedule": "zb1p"}}),
    )
    for mesh, settings in layouts:
        seen = run_ranks(_train_adapters, str(tmp_path), mesh, settings, world_size=2 ** len(mesh))
        built = {name: each for rank in seen for name, each in rank["built"].items()}
        losses, factors = _plain_adapters(built)
        for rank in seen:
            assert rank["losses"] == pytest.approx(losses, rel=1e-9)
            for name in factors.keys() & rank["trained"].keys():
                torch.testing.assert_close(rank["trained"][name], factors[name], rtol=1e-7, atol=1e-10)
        assert losses[0] > 1.001 * losses[-1]
