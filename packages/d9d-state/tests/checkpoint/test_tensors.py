from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from d9d_dist import UserError
from d9d_state import CheckpointStore, check_same_model, model_tensors, optimizer_tensors, prepare_optimizer_for_load
from d9d_state.checkpoint.info import CheckpointInfo


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale + self.frozen).square().sum()


def _step(model: _Model, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).backward()
    optimizer.step()


def _all(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    return {**model_tensors(model), **optimizer_tensors(model, optimizer)}


def _saved(folder: Path, tensors: dict[str, Tensor]) -> tuple[CheckpointStore, CheckpointInfo]:
    store = CheckpointStore(folder)
    store.save(1, tensors)
    info = store.newest()
    assert info is not None
    return store, info


def test_optimizer_tensors_are_named_after_their_parameters() -> None:
    model = _Model()
    optimizer = AdamW(model.parameters())
    _step(model, optimizer)
    assert set(model_tensors(model)) == {
        "model.linear.weight",
        "model.linear.bias",
        "model.scale",
        "model.frozen",
        "model.unused",
        "model.count",
    }
    assert set(optimizer_tensors(model, optimizer)) == {
        f"optimizer.{name}.{key}"
        for name in ("linear.weight", "linear.bias", "scale")
        for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_a_fresh_optimizer_has_no_tensors() -> None:
    model = _Model()
    assert optimizer_tensors(model, AdamW(model.parameters())) == {}


def test_existing_optimizer_state_is_replaced(tmp_path: Path) -> None:
    model = _Model()
    optimizer = AdamW(model.parameters())
    _, info = _saved(tmp_path, _all(model, optimizer))
    _step(model, optimizer)
    prepare_optimizer_for_load(model, optimizer, info)
    assert optimizer_tensors(model, optimizer) == {}


def test_state_has_device_and_placement_of_the_optimizer(tmp_path: Path) -> None:
    model = _Model().to(torch.bfloat16)
    optimizer = AdamW(model.parameters())
    _step(model.float(), optimizer)
    _, info = _saved(tmp_path, {**_all(model, optimizer), "optimizer.unused.table": torch.ones(5, 5)})
    other = _Model().to("meta")
    fresh = AdamW(other.parameters())
    prepare_optimizer_for_load(other, fresh, info)
    state = fresh.state[other.scale]
    assert state["step"].device.type == "cpu"
    assert state["exp_avg"].is_meta
    assert state["exp_avg"].dtype is torch.float32
    assert not fresh.state[other.linear.weight]["exp_avg"].requires_grad
    assert fresh.state[other.unused]["table"].shape == (5, 5)
    fused = AdamW(other.parameters(), capturable=True)
    prepare_optimizer_for_load(other, fused, info)
    assert fused.state[other.scale]["step"].is_meta


def test_parameters_of_another_model_are_refused() -> None:
    model = _Model()
    optimizer = SGD([model.scale, nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="parameter 1 of optimizer group 0, which is not a parameter of the model"):
        optimizer_tensors(model, optimizer)


def test_state_that_is_neither_tensor_nor_number_is_refused() -> None:
    model = _Model()
    optimizer = SGD(model.parameters())
    state: Any = optimizer.state
    state[model.scale]["count"] = 3
    assert optimizer_tensors(model, optimizer) == {}  # numbers are saved by non_tensor_optimizer_state
    state[model.scale]["history"] = [3]
    with pytest.raises(
        ValueError,
        match=r"SGD has state history of type list for scale, which a checkpoint cannot store; expected tensors",
    ):
        optimizer_tensors(model, optimizer)


def test_a_checkpoint_of_this_model_is_accepted_on_meta(tmp_path: Path) -> None:
    _, info = _saved(tmp_path, {**model_tensors(_Model()), "optimizer.x.step": torch.ones(())})
    with torch.device("meta"):
        check_same_model(info, _Model())


def test_trainable_only_omits_frozen_parameters_but_not_buffers(tmp_path: Path) -> None:
    model = _Model()
    kept = model_tensors(model, trainable_only=True)
    assert model_tensors(model).keys() - kept.keys() == {"model.frozen"}
    _, info = _saved(tmp_path, kept)
    check_same_model(info, model, trainable_only=True)
    with pytest.raises(UserError, match=r"\n  the model has frozen, the checkpoint does not\n"):
        check_same_model(info, model)
    model.scale.requires_grad_(False)
    model.frozen.requires_grad_(True)
    message = (
        r"the model has the trainable frozen, the checkpoint does not\n"
        r"  the checkpoint has the trainable scale, the model does not\n"
    )
    with pytest.raises(UserError, match=message):
        check_same_model(info, model, trainable_only=True)


def test_checkpoint_of_different_model_lists_all_differences(tmp_path: Path) -> None:
    other = nn.Module()
    other.register_parameter("scale", nn.Parameter(torch.ones(2)))
    other.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    other.register_parameter("extra", nn.Parameter(torch.ones(2)))
    _, info = _saved(tmp_path, model_tensors(other))
    with pytest.raises(UserError) as caught:
        check_same_model(info, _Model())
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("step-00000001 is a checkpoint of a different model:")
    assert set(lines[1:-1]) == {
        "  the model has linear.weight, the checkpoint does not",
        "  the model has linear.bias, the checkpoint does not",
        "  the model has frozen, the checkpoint does not",
        "  the model has count, the checkpoint does not",
        "  the checkpoint has extra, the model does not",
        "  scale is [2] float32 in the checkpoint, [] float32 in the model",
        "  unused is [2] float64 in the checkpoint, [2] float32 in the model",
    }
    assert lines[-1] == "Use the configuration of the run that saved it, or another run folder."
