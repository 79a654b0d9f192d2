from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import UserError, materialize
from d9d_peft import FullTune, LoRA, PeftMethod, Stack, first_names, inject
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
    """Two blocks between an embedding and a head that share one weight."""

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


def test_trains_what_the_method_says_and_nothing_else() -> None:
    model = Model()
    inject(METHOD, model)
    assert trainable(model) == {
        *(f"blocks.{i}.up.lora_{x}" for i in range(2) for x in "ab"),
        *(f"blocks.1.down.lora_{x}" for x in "ab"),
        *(f"blocks.{i}.norm.{x}" for i in range(2) for x in ("weight", "bias")),
    }


def test_an_optimizer_step_changes_the_trainable_parameters_only() -> None:
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


def test_a_model_of_meta_is_materialised_and_loaded(tmp_path: Path) -> None:
    original = Model()
    save_model_state(original, tmp_path)
    with torch.device("meta"):
        model = Model()
    mapper = inject(METHOD, model)
    materialize(model, device=torch.device("cpu"), seed=0)
    load_model_state(model, tmp_path, mapper)
    torch.testing.assert_close(model.eval()(TOKENS), original.eval()(TOKENS), rtol=0, atol=0)
    assert model.get_parameter("blocks.0.up.lora_a").std() > 0
    assert not model.get_parameter("blocks.0.up.lora_b").any()


def test_new_parameters_take_dtype_and_device_from_the_layer() -> None:
    model = Model().to(torch.bfloat16)
    inject(METHOD, model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_loads_the_original_checkpoint_and_exports_it_again(tmp_path: Path) -> None:
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


def test_a_pipeline_stage_loads_its_part_of_the_original_checkpoint(tmp_path: Path) -> None:
    original = Model()
    save_model_state(original, tmp_path, scope("", "model.", identity_of(original)))
    base_mapper = scope("model.", "", identity_of(original))
    stage = nn.ModuleDict({"blocks": nn.ModuleDict({"1": Block()})})
    mapper = inject(LoRA("up"), stage)
    mapper = sequential(base_mapper.restrict(outputs=mapper.inputs), mapper)
    load_model_state(stage, tmp_path, mapper, unused="ignore")
    assert torch.equal(stage.get_parameter("blocks.1.up.base.weight"), original.get_parameter("blocks.1.up.weight"))


def test_a_tied_tensor_goes_by_its_first_name() -> None:
    mapper = inject(LoRA("head", rank=2), model := Model())
    assert "embedding.weight" in mapper.inputs
    assert "head.weight" not in mapper.inputs
    assert "head.base.weight" not in mapper.outputs
    assert {"head.lora_a", "head.lora_b"} <= set(mapper.outputs)
    assert model.get_parameter("head.base.weight") is model.embedding.weight
    assert first_names(model)["head.base.weight"] == "embedding.weight"


def test_a_module_of_two_names_stays_one() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model.append(model[0])
    mapper = inject(LoRA("0|2", rank=1), model)
    assert model[0] is model[2]
    assert set(mapper.inputs) == {"0.weight", "0.bias"}
    assert set(mapper.outputs) == {"0.base.weight", "0.base.bias", "0.lora_a", "0.lora_b"}


@pytest.mark.parametrize(
    "method", [LoRA("absent"), Stack(LoRA("up"), FullTune("absent")), Stack(LoRA("up"), LoRA("up"))]
)
def test_a_method_that_does_not_fit_changes_nothing(method: PeftMethod) -> None:
    model = Model()
    names = list(model.state_dict())
    with pytest.raises(UserError):
        inject(method, model)
    assert list(model.state_dict()) == names
    assert all(parameter.requires_grad for parameter in model.parameters())
