"""Unusual calls of an engine are refused, or give correct results."""

from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from opened_engines import BATCHES, TASK, config_of, opened, take_step, values
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_loop import Engine, Loss, ModelProvider
from d9d_state import StateMapper, identity, keep, parallel

CALLS: dict[str, Callable[[Engine], object]] = {
    "forward_backward": lambda engine: engine.forward_backward(BATCHES, TASK.loss),
    "accumulate": lambda engine: engine.accumulate(BATCHES[:1], TASK.loss),
    "step": lambda engine: engine.step(),
    "save": lambda engine: engine.save(),
    "load": lambda engine: engine.load(),
    "reference": lambda engine: engine.reference().__enter__(),
    "evaluation_weights": lambda engine: engine.evaluation_weights().__enter__(),
}


def _read(outputs: Tensor, batch: Any) -> dict[str, Tensor]:
    return {"outputs": outputs}


@pytest.mark.parametrize("call", CALLS)
def test_only_score_can_be_called_inside_reference(call: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with Engine.open(config_of(tmp_path), model=lambda stage: model, task=TASK, reference="initial") as engine:
        take_step(engine)
        before = values(engine)
        with engine.reference():
            with pytest.raises(UserError, match=rf"got {call}\(\) inside reference\(\); expected only score"):
                CALLS[call](engine)
            assert not any(map(torch.equal, values(engine), before)), "the model is still the reference"
        assert all(map(torch.equal, values(engine), before))


@pytest.mark.parametrize("call", [*CALLS, "score", "weights"])
def test_calls_that_need_weights_are_refused_while_offloaded(call: str, tmp_path: Path) -> None:
    calls = {**CALLS, "score": lambda engine: engine.score(BATCHES, _read), "weights": lambda engine: engine.weights()}
    with opened(tmp_path) as engine:
        take_step(engine)
        before = values(engine)
        refused = pytest.raises(UserError, match=rf"got {call}\(\) while the training state is offloaded; call onl")
        with engine.offloaded(), refused:
            calls[call](engine)
        engine.offload()
        with refused:
            calls[call](engine)
        engine.onload()
        assert all(map(torch.equal, values(engine), before))
        take_step(engine)


def test_scores_of_another_model_need_a_function_that_reads_them(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        with pytest.raises(UserError, match=r"forward has no argument `scores`; .* pass `read` to `score`"):
            engine.score(BATCHES)
        assert len(engine.score(BATCHES, _read)) == len(BATCHES)


def test_an_attribute_scores_of_a_task_does_not_read_scores(tmp_path: Path) -> None:
    task = copy(TASK)
    vars(task)["scores"] = [0.5]
    with (
        Engine.open(config_of(tmp_path), model=lambda stage: nn.Linear(3, 2), task=task) as engine,
        pytest.raises(UserError, match="forward has no argument `scores`"),
    ):
        engine.score(BATCHES)


def test_an_optimizer_that_needs_a_closure_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"LBFGS\.step needs the argument closure; expected an optimizer that updates"),
        Engine.open(
            config_of(tmp_path),
            model=lambda stage: nn.Linear(3, 2),
            task=TASK,
            optimizer=lambda model: torch.optim.LBFGS(model.parameters()),
        ),
    ):
        pass


def test_scores_have_no_dropout_and_draw_no_random_numbers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    with Engine.open(config_of(tmp_path), model=lambda stage: model, task=TASK) as engine:
        state = torch.get_rng_state()
        first, second = (engine.score(BATCHES, _read) for _ in range(2))
        assert torch.equal(state, torch.get_rng_state())
        assert engine.model.training
        engine.model.eval()
        for each, again, batch in zip(first, second, BATCHES, strict=True):
            assert torch.equal(each["outputs"], again["outputs"])
            assert torch.equal(each["outputs"], engine.model(batch["x"]).detach())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda outputs, batch: outputs.sum(), r"the loss function returned a Tensor; expected Loss\(total, weight"),
        (lambda outputs, batch: Loss(outputs, 2), r"Loss.total has shape \(1, 2\); expected a 0-dim tensor"),
        (lambda outputs, batch: Loss(outputs.sum(), torch.ones(2)), r"Loss.weight has shape \(2,\); expected a 0-dim"),
    ],
)
def test_a_loss_without_a_scalar_total_and_a_scalar_weight_is_refused(loss: Any, message: str, tmp_path: Path) -> None:
    with opened(tmp_path) as engine, pytest.raises(UserError, match=message):
        engine.forward_backward(BATCHES, loss)


TOKENS: list[tuple[Any, str]] = [
    (torch.ones(1, 2), "got a Tensor as values per token; expected a dict of tensors"),
    (
        {"x": torch.ones(1)},
        r"got a tensor of shape \(1,\) as the values 'x' per token; expected a tensor \[B, L\]. Exp",
    ),
    ({"x": [1.0]}, r"got a list as the values 'x' per token; expected a tensor \[B, L\]"),
]


@pytest.mark.parametrize(("tokens", "message"), TOKENS, ids=["tensor", "row", "list"])
def test_values_that_are_not_per_token_are_an_error(tokens: Any, message: str, tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        with pytest.raises(UserError, match=message):
            engine.score(BATCHES, lambda outputs, batch: tokens)
        with pytest.raises(UserError, match=message):
            engine.forward_backward(BATCHES, lambda outputs, batch: Loss.sum(outputs, 2, tokens=tokens))


def test_a_negative_weight_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        engine.forward_backward(BATCHES, lambda outputs, batch: Loss(outputs.sum(), -1.0))
        with pytest.raises(UserError, match=r"the loss weight of the step is -2.0; expected 0 or more"):
            engine.step()


def test_gradients_of_a_failed_forward_backward_are_not_used(tmp_path: Path) -> None:
    def fail_second(outputs: Tensor, batch: Any) -> Loss:
        if batch is not BATCHES[0] and not torch.equal(batch["x"], BATCHES[0]["x"]):
            raise RuntimeError("no reward")
        return TASK.loss(outputs, batch)

    with opened(tmp_path) as engine:
        with pytest.raises(RuntimeError, match="no reward"):
            engine.forward_backward(BATCHES, fail_second)
        for call in ("forward_backward", "step"):
            with pytest.raises(UserError, match=r"an earlier forward_backward\(\) failed, so some of its microbatches"):
                CALLS[call](engine)


def test_loading_discards_accumulated_gradients(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        take_step(engine)
        engine.save()
        take_step(engine)
        expected = values(engine)
        engine.forward_backward(BATCHES, TASK.loss)
        engine.load()
        with pytest.raises(UserError, match=r"got step\(\) without gradients"):
            engine.step()
        take_step(engine)
        assert all(map(torch.equal, values(engine), expected))


class _WithAdapter(ModelProvider):
    late_init = False

    def build(self, stage: Any) -> nn.Module:
        return nn.Linear(3, 2)

    def state_mapper(self, model: nn.Module) -> StateMapper:
        return parallel(identity("weight"), keep("bias"))


@pytest.mark.parametrize("shards", [False, True])
def test_weights_that_omit_trained_parameters_are_refused(shards: bool, tmp_path: Path) -> None:
    with Engine.open(config_of(tmp_path), model=_WithAdapter(), task=TASK) as engine:
        with pytest.raises(UserError, match=r"omit 1 trained parameters, such as bias, .*; expected all trained"):
            engine.weights(shards=shards)
        assert [each[0] for each in engine.weights(shards=shards, base_only=True)] == ["weight"]
        engine.model.get_parameter("bias").requires_grad_(False)
        assert [each[0] for each in engine.weights(shards=shards)] == ["weight"]


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), "0.1", True])
def test_only_finite_learning_rates_of_at_least_0_are_accepted(rate: float, tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        engine.forward_backward(BATCHES, TASK.loss)
        with pytest.raises(UserError, match=rf"learning_rate = {rate!r}; expected a finite number, 0 or more"):
            engine.step(rate)
        with pytest.raises(UserError, match=rf"factor = {rate!r}; expected a finite number, 0 or more"):
            engine.set_learning_rates(rate)
        before = values(engine)
        assert engine.step(0.0).taken
        assert all(map(torch.equal, values(engine), before))
        engine.forward_backward(BATCHES, TASK.loss)
        assert type(engine.step(torch.tensor(0.5)).learning_rate) is float


@pytest.mark.parametrize("batches", [BATCHES[0], iter(BATCHES)], ids=["dict", "iterator"])
@pytest.mark.parametrize("call", ["forward_backward", "score"])
def test_batches_that_are_not_a_list_are_refused(call: str, batches: Any, tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        calls = {"forward_backward": (engine.forward_backward, TASK.loss), "score": (engine.score, _read)}
        method, function = calls[call]
        with pytest.raises(UserError, match="as batches; expected a list of batches, one for each microbatch"):
            method(batches, function)


@pytest.mark.parametrize("shards", [False, True])
def test_iterating_weights_fails_if_they_change(shards: bool, tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        weights = engine.weights(shards=shards)
        next(weights)
        take_step(engine)
        with pytest.raises(UserError, match=r"the weights changed while weights\(\) was iterated"):
            next(weights)
        weights = engine.weights(shards=shards)
        next(weights)
        with engine.offloaded(), pytest.raises(UserError, match=r"the weights changed while weights\(\) was iterated"):
            next(weights)


def test_an_unknown_reference_is_refused(tmp_path: Path) -> None:
    engine = Engine.open(
        config_of(tmp_path), model=lambda stage: nn.Linear(3, 2), task=TASK, reference=cast("Any", "first")
    )
    with pytest.raises(UserError, match="reference = 'first'; expected None, \"initial\", or a function"), engine:
        pass


def test_a_forward_that_makes_a_parameter_is_refused_after_the_first_step(tmp_path: Path) -> None:
    class Growing(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name of torch)
            if not hasattr(self, "gain"):
                self.gain = nn.Parameter(torch.ones(2))
            return super().forward(input) * self.gain

    with (
        Engine.open(config_of(tmp_path), model=lambda stage: Growing(3, 2), task=TASK) as engine,
        pytest.raises(UserError, match="the first step created, replaced or deleted the parameters gain"),
    ):
        take_step(engine)


def test_a_parameter_that_is_unfrozen_after_the_start_is_an_error(tmp_path: Path) -> None:
    def build(_stage: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        model[0].requires_grad_(False)
        return model

    with Engine.open(config_of(tmp_path), model=build, task=TASK) as engine:
        take_step(engine)
        engine.model.get_parameter("0.bias").requires_grad_(True)
        with pytest.raises(
            UserError, match=r"^0\.bias require gradients, but did not at the start of the training, so"
        ):
            engine.forward_backward(BATCHES, TASK.loss)
        engine.model.get_parameter("0.bias").requires_grad_(False)
        take_step(engine)


def test_a_module_that_is_replaced_after_the_start_is_an_error(tmp_path: Path) -> None:
    with Engine.open(config_of(tmp_path), model=lambda stage: nn.Sequential(nn.Linear(3, 2)), task=TASK) as engine:
        take_step(engine)
        take_step(engine)
        setattr(engine.model, "0", nn.Linear(3, 2))
        with pytest.raises(UserError, match=r"^0\.weight, 0\.bias require gradients, but did not at the start"):
            engine.forward_backward(BATCHES, TASK.loss)


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.used(input)


def test_parameters_without_a_gradient_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine.open(config_of(tmp_path), model=lambda stage: _Unused(), task=TASK) as engine:
        take_step(engine)
        take_step(engine)
    text = capsys.readouterr().out
    assert text.count("d9d: unused.bias, unused.weight got no gradient in the first step, so the loss does not") == 1


def test_active_dropout_beside_a_reference_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attention: Any = nn.Tanh()
    attention.attention_dropout = 0.5  # as models of transformers, which drop in functions
    for layer, expected in ((nn.Dropout(0.5), 1), (nn.Dropout(0.0), 0), (attention, 1)):
        model = nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 2))
        options: Any = {"model": lambda stage, model=model: model, "task": TASK, "reference": "initial"}
        with Engine.open(config_of(tmp_path), **options) as engine:
            for _ in range(2):
                with engine.reference():
                    engine.score(BATCHES, _read)
        assert (
            capsys.readouterr().out.count("d9d: 1 drops values in forward_backward(), but not in score()") == expected
        )
