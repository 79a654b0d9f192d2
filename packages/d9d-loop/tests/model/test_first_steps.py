"""State in attributes that depends on the rank, and parameters that a step makes, are refused."""

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_loop.model.first_steps import FirstSteps


class _Keeps(nn.Module):
    """Keeps values of the batch in an attribute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.how, self.calls, self.mean, self.history = how, 0, 0.0, list[Any]()
        self.queue = torch.zeros(2)

    def forward(self, x: Tensor) -> None:
        self.calls = 1
        match self.how:
            case "number":
                self.mean = 0.9 * self.mean + x.mean().item()
            case "tensor":
                self.queue = torch.cat([x.mean()[None], self.queue])[:2]
            case "list":
                self.history.append(x.mean())
            case "inspected":
                self.mean = x.mean().item()
                self.queue = x.detach() + self.mean
            case "equal":
                self.mean += self.layer.weight.sum().item()


def _messages(how: str) -> tuple[int, str, str]:
    """Return the number of checked steps, the message, and what was printed."""
    printed = io.StringIO()
    with MeshConfig(data_parallel_replicate=2).build() as ctx, contextlib.redirect_stdout(printed):
        torch.manual_seed(1)
        model = nn.Sequential(_Keeps(how))
        kind, checks = type(model[0]), FirstSteps(model, ctx)
        message, step = "", 0
        try:
            for step in range(1, 4):
                model(torch.full((2,), float(ctx.rank + step)))
                checks.check(1)
        except UserError as error:
            message = str(error)
        assert type(model[0]) is kind
    return step, message, printed.getvalue()


@pytest.mark.parametrize(
    ("how", "refused", "listed"),
    [
        ("number", "0.mean: the values differ between ranks after the first step", ""),
        ("tensor", "0.queue: the values differ between ranks after the first step", ""),
        ("list", "", "d9d: forward updates 0.history from each rank's own part of the batch"),
        ("inspected", "", "d9d: forward changes 0.mean, which checkpoints do not contain. If forward also reads it"),
        ("equal", "", "d9d: forward changes 0.mean, which checkpoints do not contain. If forward also reads it"),
    ],
)
def test_attributes_that_depend_on_the_rank_are_refused_if_forward_reads_them(
    how: str, refused: str, listed: str
) -> None:
    for rank, (step, message, printed) in enumerate(run_ranks(_messages, how, world_size=2)):
        assert step == (2 if refused else 3)
        assert message.startswith(refused)
        assert bool(message) == bool(refused)
        assert printed.startswith(listed if rank == 0 else "")
        assert bool(printed) == bool(listed and rank == 0)


def test_parameters_that_a_step_makes_or_replaces_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with MeshConfig().build() as ctx:
        checks = FirstSteps(model, ctx)
        model[0].gain = nn.Parameter(torch.ones(2))
        model[1].weight = nn.Parameter(torch.ones(2, 2))
        model[1].register_parameter("bias", None)
        with pytest.raises(
            UserError,
            match=r"the first step created, replaced or deleted the parameters 0\.gain, 1\.weight, 1\.bias; exp",
        ):
            checks.check(1)


class _Draws(nn.Module):
    """Draws from its own generator, anneals a number, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.rate, self.size = 1.0, 0.8, 0
        self.generator = torch.Generator()
        self.calls: Tensor
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.size = len(x)
        self.calls += 1
        self.temperature *= self.rate
        return x * torch.rand((), generator=self.generator) * self.temperature


def test_numbers_and_generators_that_checkpoints_do_not_contain_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(_Draws(), nn.Linear(2, 2))
    with MeshConfig().build() as ctx:
        checks = FirstSteps(model, ctx)
        for step in range(1, 4):
            model(torch.ones(2, 2))
            checks.check(step)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("d9d: forward changes 0.generator, 0.temperature, which checkpoints do not contain.")
