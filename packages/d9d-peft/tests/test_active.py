from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import (
    ColumnParallel,
    MeshConfig,
    RowParallel,
    UserError,
    full_tensor,
    parallelize_hsdp,
    parallelize_tensor,
)
from d9d_dist.testing import run_ranks
from d9d_dist.values.recomputation import recompute
from d9d_moe import GroupedLinear
from d9d_peft import (
    DoRA,
    FullTune,
    LoRA,
    PeftMethod,
    Stack,
    adapters_off,
    inject,
    load_adapters,
    merge_,
    original_weights,
    save_adapters,
    use_adapter,
)

METHODS: dict[str, PeftMethod] = {
    "LoRA": LoRA("0|2", rank=3, alpha=6),
    "DoRA": DoRA("0|2", rank=3, alpha=6),
    "both": Stack(LoRA("0", rank=3, alpha=6), DoRA("2", rank=2)),
}
X = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)


def base() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).double()


def change_adapters(model: nn.Module) -> None:
    """Give all adapters an effect, equal on every call."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "adapter" in name:
            nn.init.normal_(parameter)


def adapted(method: PeftMethod) -> nn.Sequential:
    model = base()
    inject(method, model)
    change_adapters(model)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_without_adapters_the_model_is_the_base_model(method: str) -> None:
    model = adapted(METHODS[method])
    before = model(X)
    with adapters_off(model):
        assert torch.equal(model(X), base()(X))
    assert torch.equal(model(X), before)
    assert not torch.equal(before, base()(X))


def test_grouped_experts_compute_without_adapters() -> None:
    grouped = GroupedLinear(3, 6, 5, init_std=0.5).double()
    x, counts = torch.randn(7, 6, dtype=torch.float64), torch.tensor([3, 0, 4])
    expected = grouped(x, counts)
    inject(LoRA(GroupedLinear), grouped)
    change_adapters(grouped)
    assert not torch.equal(grouped(x, counts), expected)
    with adapters_off(grouped):
        assert torch.equal(grouped(x, counts), expected)


def test_an_error_inside_the_context_restores_the_adapters() -> None:
    model = adapted(METHODS["LoRA"])
    before = model(X)
    with pytest.raises(RuntimeError, match="stop"), adapters_off(model):
        raise RuntimeError("stop")
    assert torch.equal(model(X), before)


def test_reference_and_trained_model_in_one_loss() -> None:
    model = adapted(METHODS["LoRA"])
    with torch.no_grad(), adapters_off(model):
        reference = model(X)
    (model(X) - reference).square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == {f"{i}.adapter.lora_{x}" for i in (0, 2) for x in "ab"}
    model.zero_grad()
    (model(X) - base()(X).detach()).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_compiled_layers_compute_without_adapters() -> None:
    model = adapted(METHODS["LoRA"])
    before = model(X)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(X), before, rtol=1e-12, atol=1e-12)
    with adapters_off(model):
        torch.testing.assert_close(compiled(X), base()(X), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(compiled(X), before, rtol=1e-12, atol=1e-12)


def test_fully_tuned_parameters_need_their_original_values() -> None:
    model = base()
    inject(Stack(LoRA("0"), FullTune("2")), model)
    originals = original_weights(model)
    assert originals.keys() == {"2.weight", "2.bias"}
    change_adapters(model)
    with torch.no_grad():
        model.get_parameter("2.weight").add_(1.0)
    before = model(X)
    message = r"adapters_off got originals of none; expected originals of .*: 2\.weight, 2\.bias\. Pass originals="
    with pytest.raises(UserError, match=message), adapters_off(model):
        pass
    with adapters_off(model, originals):
        assert torch.equal(model(X), base()(X))
    assert torch.equal(model(X), before)


def test_the_reference_has_the_original_running_statistics_of_tuned_modules() -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12)).double()
    inject(Stack(LoRA("0"), FullTune("1")), model)
    originals, expected = original_weights(model), model.eval()(X).detach()
    model.train()(X).square().sum().backward()
    trained = model.eval()(X)
    assert not torch.allclose(trained, expected)
    with adapters_off(model, originals):
        assert torch.equal(model(X), expected)
        model.train()(X)
    assert torch.equal(model.eval()(X), trained)


class _Grows(nn.Linear):
    """Layer with a cache that grows with the batch, and with another one that the first forward makes."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("rows", torch.ones(1, 1), persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as that of nn.Linear
        self.rows = torch.ones(len(input), 1, dtype=input.dtype)
        self.register_buffer("columns", torch.ones(input.shape[1], dtype=input.dtype), persistent=False)
        return super().forward(input) * self.rows


def test_caches_are_not_part_of_the_originals() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Grows(), nn.Linear(8, 4)).double()
    inject(Stack(LoRA("1"), FullTune("0")), model)
    originals, expected = original_weights(model), model(X).detach()
    with torch.no_grad():
        model.get_parameter("0.weight").add_(1.0)
    with adapters_off(model, originals):
        assert torch.equal(model(X), expected)


def test_recomputed_layers_compute_with_the_adapters_of_their_forward() -> None:
    gradients: list[list[Tensor]] = []
    for recomputes in (True, False):
        model = base()
        for adapter in ("default", "reward"):
            inject(LoRA("0|2", rank=2), model, adapter=adapter)
        change_adapters(model)
        if recomputes:
            recompute(model)
        with use_adapter(model, "reward"):
            loss = model(X).square().sum()
        loss.backward()
        gradients.append([each.grad for each in model.parameters() if each.grad is not None])
    assert len(gradients[0]) == 4
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_originals_of_a_model_without_tuned_parameters_are_refused() -> None:
    with pytest.raises(UserError, match=r"got originals of 0\.weight; expected originals of .*: none"):
        adapters_off(adapted(METHODS["LoRA"]), {"0.weight": X}).__enter__()


def _sharded(mesh: dict[str, int]) -> dict[str, Any]:
    with MeshConfig(**mesh).build() as ctx:
        model = _tuned()
        dense = ctx.mesh_for("dense")
        parallelize_tensor(model, dense["tp"], {"0": ColumnParallel(), "2": RowParallel()})
        data = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
        parallelize_hsdp(model[0], data, shard_axis="dp_cp_shard")
        parallelize_hsdp(model, data, shard_axis="dp_cp_shard")  # the root keeps 2.weight gathered after forward
        originals = original_weights(model)
        with torch.no_grad():
            for name in originals:
                model.get_parameter(name).add_(1.0)
            outputs = {"changed": model(X)}
            with adapters_off(model, originals):
                outputs["off"] = model(X)
            outputs["on again"] = model(X)
        return {**outputs, "weight": full_tensor(model.get_parameter("2.weight"))}


def _tuned() -> nn.Sequential:
    model = base()
    inject(Stack(LoRA("0"), FullTune("2")), model)
    change_adapters(model)
    return model


@pytest.mark.parametrize("mesh", [{"data_parallel_shard": 2}, {"tensor_parallel": 2}])
def test_sharded_models_compute_without_adapters(mesh: dict[str, int]) -> None:
    for found in run_ranks(_sharded, mesh, world_size=2):
        torch.testing.assert_close(found["off"], base()(X), rtol=1e-12, atol=1e-12)
        assert torch.equal(found["on again"], found["changed"])
        torch.testing.assert_close(found["weight"], base().get_parameter("2.weight") + 1, rtol=1e-12, atol=1e-12)


def several() -> nn.Sequential:
    model = base()
    inject(LoRA("0", rank=2), model)
    inject(DoRA("0|2", rank=3), model, adapter="reward", trainable=False)
    change_adapters(model)
    return model


def test_named_adapters_are_active_only_inside_use_adapter() -> None:
    model = several()
    first = model(X)
    alone = base()
    inject(DoRA("0|2", rank=3), alone)
    alone.load_state_dict(_only(model, "adapter_reward"))
    with use_adapter(model, "reward"):
        assert torch.equal(model(X), alone(X))
    assert torch.equal(model(X), first)
    with adapters_off(model):
        assert torch.equal(model(X), base()(X))


def _only(model: nn.Module, child: str) -> dict[str, Tensor]:
    """Return the state of a model with the adapters of one name, as if they were the only ones."""
    return {
        name.replace(f".{child}.", ".adapter."): tensor
        for name, tensor in model.state_dict().items()
        if "adapter" not in name or f".{child}." in name
    }


def test_only_the_trainable_adapters_are_trained() -> None:
    model = several()
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        "0.adapter.lora_a",
        "0.adapter.lora_b",
    }
    model(X).sum().backward()
    assert model.get_parameter("0.adapter.lora_a").grad is not None


def test_adapters_are_saved_and_loaded_by_name(tmp_path: Path) -> None:
    model = several()
    save_adapters(model, tmp_path / "policy")
    save_adapters(model, tmp_path / "reward", adapter="reward")
    other = base()
    inject(LoRA("0", rank=2), other, adapter="policy")
    inject(DoRA("0|2", rank=3), other, adapter="critic")
    load_adapters(other, tmp_path / "policy", adapter="policy")
    load_adapters(other, tmp_path / "reward", adapter="critic")
    assert torch.equal(other(X), model(X))
    with use_adapter(other, "critic"), use_adapter(model, "reward"):
        assert torch.equal(other(X), model(X))
    with pytest.raises(UserError, match=r"got a model without adapters; expected a model after inject\(\)"):
        save_adapters(other, tmp_path / "none")
    with pytest.raises(UserError, match=r"got a model without adapters named 'reward'; expected a model after"):
        save_adapters(other, tmp_path / "none", adapter="reward")


def test_one_of_several_adapters_is_merged() -> None:
    model = several()
    with use_adapter(model, "reward"):
        expected = model(X)
    merge_(model, adapter="reward")
    with adapters_off(model):
        torch.testing.assert_close(model(X), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(UserError, match="merge_ got a model without adapters named 'critic'"):
        merge_(model, adapter="critic")


def test_unknown_duplicate_and_invalid_adapter_names_are_refused() -> None:
    model = several()
    with pytest.raises(UserError, match=r"use_adapter got the name 'critic'; .* are .* adapter, adapter_reward\."):
        use_adapter(model, "critic").__enter__()
    with pytest.raises(UserError, match=r"0 already has an adapter of this name; .* adapter='second'"):
        inject(LoRA("0"), model, adapter="reward")
    with pytest.raises(UserError, match=r"inject got adapter = 'a\.b'; expected a Python identifier"):
        inject(LoRA("0"), model, adapter="a.b")


def test_further_adapters_do_not_share_trained_weights() -> None:
    message = r"inject got adapter = 'second' and parameters that are trained without an adapter: 2\.bias, 2\.weight; "
    model = base()
    inject(LoRA("0"), model)
    with pytest.raises(UserError, match=message):
        inject(FullTune("2"), model, adapter="second")
    tuned = base()
    inject(Stack(LoRA("0"), FullTune("2")), tuned)
    with pytest.raises(UserError, match=message):
        inject(LoRA("2"), tuned, adapter="second")
