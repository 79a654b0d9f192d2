import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from d9d_dist import MeshConfig, UserError, materialize
from d9d_dist.testing import run_ranks
from d9d_peft import Adapter, DoRA, FullTune, LoRA, PeftMethod, Plan, Stack, inject, merge_
from d9d_state import identity_of, load_model_state, save_model_state, scope, sequential


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))


class Model(nn.Module):
    """Two blocks between an embedding and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


METHOD = Stack(LoRA(r"up|blocks\.1\.down", rank=2, alpha=4), FullTune("norm"))
TOKENS = torch.arange(10)


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_trains_only_the_parameters_of_the_plan() -> None:
    model = Model()
    inject(METHOD, model)
    assert trainable(model) == {
        *(f"blocks.{i}.up.adapter.lora_{x}" for i in range(2) for x in "ab"),
        *(f"blocks.1.down.adapter.lora_{x}" for x in "ab"),
        *(f"blocks.{i}.norm.{x}" for i in range(2) for x in ("weight", "bias")),
    }


def test_optimizer_step_changes_only_trainable_parameters() -> None:
    model = Model()
    inject(METHOD, model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    for _ in range(2):  # A has no gradient in the first step, since B starts at zero
        model(TOKENS).square().sum().backward()
        optimizer.step()
        assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
        optimizer.zero_grad()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == trainable(model)
    assert len(optimizer.state) == len(trainable(model))


def test_allocates_nothing_on_meta() -> None:
    with torch.device("meta"):
        model = Model()
    inject(METHOD, model)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_meta_model_is_materialized_and_loaded(tmp_path: Path) -> None:
    original = Model()
    save_model_state(original, tmp_path)
    with torch.device("meta"):
        model = Model()
    mapper = inject(METHOD, model)
    materialize(model, device=torch.device("cpu"), seed=0)
    load_model_state(model, tmp_path, mapper)
    torch.testing.assert_close(model.eval()(TOKENS), original.eval()(TOKENS), rtol=0, atol=0)
    assert model.get_parameter("blocks.0.up.adapter.lora_a").std() > 0
    assert not model.get_parameter("blocks.0.up.adapter.lora_b").any()


def test_new_parameters_are_float32_on_a_16_bit_layer() -> None:
    model = Model().to(torch.bfloat16)
    inject(METHOD, model)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype != torch.bfloat16} == {n for n in dtypes if "lora_" in n}
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}


def test_original_checkpoint_round_trip(tmp_path: Path) -> None:
    original = Model()
    to_disk = scope("", "model.", identity_of(original))
    save_model_state(original, tmp_path / "original", to_disk)

    injected = Model()
    mapper = sequential(to_disk.inverse(), inject(METHOD, injected))
    load_model_state(injected, tmp_path / "original", mapper)
    original.eval()
    injected.eval()
    torch.testing.assert_close(injected(TOKENS), original(TOKENS), rtol=0, atol=0)

    save_model_state(injected, tmp_path / "export", mapper.inverse())
    exported = Model()
    load_model_state(exported, tmp_path / "export", to_disk.inverse())
    torch.testing.assert_close(exported.state_dict(), original.state_dict(), rtol=0, atol=0)


def test_pipeline_stage_loads_its_part_of_the_original_checkpoint(tmp_path: Path) -> None:
    original = Model()
    save_model_state(original, tmp_path, scope("", "model.", identity_of(original)))
    base_mapper = scope("model.", "", identity_of(original))
    stage = nn.ModuleDict({"blocks": nn.ModuleDict({"1": Block()})})
    mapper = inject(LoRA("up"), stage)
    mapper = sequential(base_mapper.restrict(outputs=mapper.inputs), mapper)
    load_model_state(stage, tmp_path, mapper, unused="ignore")
    assert torch.equal(stage.get_parameter("blocks.1.up.weight"), original.get_parameter("blocks.1.up.weight"))


def test_mapper_uses_the_first_name_of_a_tied_tensor() -> None:
    mapper = inject(LoRA("head", rank=2), model := Model())
    assert "embedding.weight" in mapper.inputs
    assert "head.weight" not in mapper.inputs
    assert "head.weight" not in mapper.outputs
    assert {"head.adapter.lora_a", "head.adapter.lora_b"} <= set(mapper.outputs)
    assert model.head.weight is model.embedding.weight


def test_layers_are_not_replaced_and_keep_their_names() -> None:
    model = Model()
    before = dict(model.named_parameters())
    layers = list(model.modules())
    inject(METHOD, model)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert set(layers) <= set(model.modules())


def test_copied_model_has_its_own_adapters() -> None:
    model = Model().eval()
    inject(METHOD, model)
    copied = copy.deepcopy(model)
    nn.init.ones_(copied.get_parameter("blocks.0.up.adapter.lora_b"))
    assert not torch.equal(copied(TOKENS), model(TOKENS))
    copied.load_state_dict(model.state_dict())
    assert torch.equal(copied(TOKENS), model(TOKENS))


@pytest.mark.full
def test_compiles_like_the_model_without_adapters() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    inject(Stack(LoRA("0"), DoRA("1")), model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3)
    torch.testing.assert_close(compiled(x), model(x))


def test_only_adapters_have_optimizer_state() -> None:
    model = Model()
    inject(METHOD, model)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    model(TOKENS).square().sum().backward()
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert sum(tensor.nbytes for tensor in held) == 2 * trained


class Shift(Adapter):
    """Adapter of a custom method: adds a trained constant."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.shift = nn.Parameter(layer.weight.new_empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.shift)

    def forward(self, layer: nn.Module, inner: Callable[..., Tensor], *args: Any) -> Tensor:
        return inner(*args) + self.shift

    @torch.no_grad()
    def merge_(self, layer: nn.Module) -> None:
        layer.get_parameter("bias").add_(self.shift)
        self.shift.zero_()


class Shifts:
    def plan(self, model: nn.Module) -> Plan:
        layers = {name: module for name, module in model.named_modules() if name.endswith("up")}
        adapters = {name: Shift(layer) for name, layer in layers.items() if isinstance(layer, nn.Linear)}
        return Plan(claimed=frozenset(f"{name}.bias" for name in adapters), adapters=adapters)


def test_custom_method_is_injected_stacked_and_merged() -> None:
    model = Model().eval()
    before = model(TOKENS)
    inject(Stack(Shifts(), LoRA("down")), model)
    torch.testing.assert_close(model(TOKENS), before)
    nn.init.ones_(model.get_parameter("blocks.0.up.adapter.shift"))
    shifted = model(TOKENS)
    assert not torch.equal(shifted, before)
    merge_(model)
    assert not model.get_parameter("blocks.0.up.adapter.shift").any()
    torch.testing.assert_close(model(TOKENS), shifted)


def test_a_pipeline_stage_may_match_no_target() -> None:
    stage = nn.ModuleDict({"blocks": nn.ModuleDict({"1": Block()})})
    inject(Stack(LoRA(r"blocks\.0"), LoRA("down"), FullTune("head")), stage, is_part=True)
    assert trainable(stage) == {f"blocks.1.down.adapter.lora_{x}" for x in "ab"}
    inject(LoRA("head"), frozen := Block(), is_part=True)
    assert not trainable(frozen)


def test_error_of_a_stack_names_all_targets_without_matches() -> None:
    with pytest.raises(UserError, match=r"LoRA got the pattern 'q', .* FullTune got the target 'absent'"):
        inject(Stack(LoRA("q"), LoRA("up"), FullTune("absent")), Model())


def test_refuses_a_second_injection() -> None:
    model = Model()
    inject(LoRA("up"), model)
    with pytest.raises(
        UserError, match=r"blocks\.0\.up already has an adapter of this name; .* with a Stack of all methods"
    ):
        inject(LoRA("down"), model)


def test_refuses_swapped_arguments() -> None:
    swapped: Any = (Model(), LoRA("up"))
    with pytest.raises(UserError, match=r"inject\(\) got a Model as its method; expected inject\(method, model\)"):
        inject(*swapped)


def sharded() -> None:
    with MeshConfig().build() as ctx:
        model = nn.Sequential(nn.Linear(2, 2))
        fully_shard(model, mesh=ctx.mesh_for("flat"))
        with pytest.raises(UserError, match=r"0 is already parallelized; expected a model before parallelization"):
            inject(LoRA("0"), model)


def test_refuses_a_parallelized_model() -> None:
    run_ranks(sharded, world_size=1)


def test_module_with_two_names_gets_one_adapter() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model.append(model[0])
    mapper = inject(LoRA("0|2", rank=1), model)
    assert model[0] is model[2]
    assert set(mapper.inputs) == {"0.weight", "0.bias"}
    assert set(mapper.outputs) == {"0.weight", "0.bias", "0.adapter.lora_a", "0.adapter.lora_b"}


@pytest.mark.parametrize(
    "method", [LoRA("absent"), Stack(LoRA("up"), FullTune("absent")), Stack(LoRA("up"), LoRA("up"))]
)
def test_failed_injection_does_not_change_the_model(method: PeftMethod) -> None:
    model = Model()
    names = list(model.state_dict())
    with pytest.raises(UserError):
        inject(method, model)
    assert list(model.state_dict()) == names
    assert all(parameter.requires_grad for parameter in model.parameters())
