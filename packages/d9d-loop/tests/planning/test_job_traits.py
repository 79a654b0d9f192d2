"""Traits that the planner reads from the dry run of a job, and the list of traits that it does not model."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from d9d_dist import DistributedContext, StageInfo, UserError
from d9d_loop import Loss, ModelProvider, Task, Trainer, TrainerConfig
from d9d_loop.planning import ClusterPlan, plan_cluster, report, verdict

VOCABULARY, WIDTH, INNER, LENGTH, NUM_LAYERS = 1024, 64, 128, 32, 6
Checkpointing = Literal["none", "selective", "full"]


def _saves_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Policy:
    return Policy.MUST_SAVE if "mm" in str(operator) or "attention" in str(operator) else Policy.PREFER_RECOMPUTE


class Layer(nn.Module):
    def __init__(self, *, has_attention: bool = True, rank: int = 0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False))
        self.has_attention, self.rank, self.checkpointing = has_attention, rank, "none"

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing == "none":
            return self.run(x)
        if self.checkpointing == "full":
            return checkpoint(self.run, x, use_reentrant=False)
        contexts = lambda: create_selective_checkpoint_contexts(_saves_products)  # noqa: E731
        return checkpoint(self.run, x, use_reentrant=False, context_fn=contexts)

    def run(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True) if self.has_attention else q + k + v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x)) + (self.adapter(x) if self.rank else 0)


class Decoder(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Provider(ModelProvider):
    def __init__(
        self, *, checkpointing: Checkpointing = "none", every: int = 1, linear_layers: int = 0, rank: int = 0
    ) -> None:
        self.checkpointing, self.every, self.linear_layers, self.rank = checkpointing, every, linear_layers, rank
        self.compiles = False

    def build(self, stage: StageInfo) -> nn.Module:
        period = self.linear_layers + 1
        layers = [Layer(has_attention=i % period == period - 1, rank=self.rank) for i in range(NUM_LAYERS)]
        model = Decoder(layers)
        for index, layer in enumerate(layers):
            layer.checkpointing = self.checkpointing if index % self.every == 0 else "none"
        if self.rank:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("adapter" in name)
        return model

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        if self.compiles:
            for layer in model.get_submodule("layers").children():
                layer.compile(backend="eager")
        super().parallelize(model, ctx)


class NextToken(Task):
    def inputs(self, batch: Any) -> Any:
        return {"tokens": batch["tokens"]}

    def loss(self, outputs: Any, batch: Any) -> Loss:
        loss = F.cross_entropy(outputs.flatten(0, 1), batch["tokens"].flatten(), reduction="sum")
        return Loss(loss, weight=batch["tokens"].numel())


def _plan(folder: Path, provider: Provider, *, search: bool = False, **sections: Any) -> ClusterPlan:
    values = {"steps": 1, "run": {"folder": folder}, "batch": {"global_size": 8}, "rehearsal": False, "export": False}
    config = TrainerConfig.model_validate({**values, **sections})
    data = [{"tokens": torch.zeros(LENGTH, dtype=torch.int64)}] * 8
    trainer = Trainer(config, model=provider, data=data, task=NextToken())
    return plan_cluster(trainer, world_size=4, hardware="h100-dgx", search=search)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ClusterPlan:
    return _plan(tmp_path_factory.mktemp("plain"), Provider())


@pytest.mark.slow("selective-1", "full-1", "full-2")
@pytest.mark.parametrize(
    ("policy", "every"), [("none", 1), ("selective", 1), ("selective", 2), ("full", 1), ("full", 2), ("full", 3)]
)
def test_checkpointing_is_read_from_the_operators_that_run_again(
    policy: Checkpointing, every: int, tmp_path: Path
) -> None:
    layout = _plan(tmp_path, Provider(checkpointing=policy, every=every)).layout
    assert (layout.recompute, layout.recompute_every) == (policy, every)


@pytest.mark.slow
def test_compiled_layers_and_models_have_compiled_pointwise_operators(tmp_path: Path) -> None:
    blocks = Provider()
    blocks.compiles = True
    plans = [_plan(tmp_path, Provider()), _plan(tmp_path, blocks), _plan(tmp_path, Provider(), compile="eager")]
    assert [plan.layout.pointwise for plan in plans] == ["eager", "compiled", "compiled"]


def test_bytes_per_parameter_depend_on_optimizer_and_precision(plain: ClusterPlan, tmp_path: Path) -> None:
    adam = plain.layout
    sgd = _plan(
        tmp_path, Provider(), precision="parameters", optimizer={"kind": "sgd", "learning_rate": 1, "weight_decay": 0}
    )
    assert adam.master_bytes == pytest.approx(8, rel=0.01)
    assert sgd.layout.master_bytes < 5
    assert (adam.weight_bytes, sgd.layout.weight_bytes) == (2, 4)
    assert sgd.timed.not_modeled == ("products in float32 (timed as bfloat16)",)
    assert "not modeled, so the step time may be off: products in float32" in verdict(sgd)
    assert sgd.to_json()["not_modeled"] == sgd.timed.not_modeled


def test_adapters_do_not_change_the_decoder_shape_and_frozen_parameters_are_listed_as_not_modeled(
    plain: ClusterPlan, tmp_path: Path
) -> None:
    adapted = _plan(tmp_path, Provider(rank=16))
    assert plain.timed.not_modeled == ()
    assert adapted.timed.shape == plain.timed.shape
    assert adapted.timed.shape.intermediate_size == INNER
    assert any(text.startswith("frozen parameters, 9") for text in adapted.timed.not_modeled)
    assert adapted.layout.gradient_bytes < 0.1 * plain.layout.gradient_bytes
    assert adapted.time.optimizer < plain.time.optimizer / 2


def test_layers_without_attention_have_exact_memory_but_no_step_time(tmp_path: Path) -> None:
    plan = _plan(tmp_path, Provider(linear_layers=2))
    message = r"no attention in 2 of 3 different layers \(Layer\) in the model"
    assert plan.memory[0].parameters > 0
    assert "no step time and no other layouts" in report(plan)
    assert "seconds" not in plan.to_json()
    with pytest.raises(UserError, match=message):
        _ = plan.tokens_per_second
    with pytest.raises(UserError, match=message):
        _plan(tmp_path, Provider(linear_layers=2), search=True)


def test_the_logits_of_the_whole_microbatch_are_counted(plain: ClusterPlan) -> None:
    assert plain.layout.logit_tokens == plain.layout.tokens_per_microbatch
    assert plain.layout.loss_chunk is None
