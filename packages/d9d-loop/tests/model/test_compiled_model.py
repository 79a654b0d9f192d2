"""Models that break graphs train as without compilation; the lines that run eagerly are named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from d9d_dist import UserError
from d9d_dist.testing import assert_trees_close, full_parameters, run_ranks
from d9d_loop import Finished, Loss, Task, Trainer, TrainerConfig
from d9d_loop.model.compiled_model import compile_stages


class _Sum(Task):
    def inputs(self, batch: Tensor) -> dict[str, Tensor]:
        return {"x": batch}

    def loss(self, outputs: Tensor, batch: Tensor) -> Loss:
        return Loss(outputs.square().sum(), weight=len(batch))


class _Breaking(nn.Module):
    """A branch on values, a print, and a computation in NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if x.sum().item() > -1e9:
            x = self.second(x)
        print("forward of", len(x))
        scale = float(np.median(x.detach().numpy()))
        return self.third(x) + 0 * scale


class _Changing(nn.Module):
    """A checkpointed forward that changes an attribute and restores it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_running = nn.Linear(4, 4, dtype=torch.float64), False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x: Tensor) -> Tensor:
        self.is_running = True
        y = torch.tanh(self.layer(x)).square()
        self.is_running = False
        return y


class _Slicing(nn.Module):
    """A slice of a weight that passes a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.layer.weight[:2]
        torch._dynamo.graph_break()
        return nn.functional.linear(x, rows) + self.layer(x)[:, :2]


def _train(
    folder: Path,
    compile: str | None,  # noqa: A002
    num_ranks: int,
    model: type[nn.Module] = _Breaking,
    *,
    dtype: torch.dtype = torch.float64,
    num_samples: int = 16,
    **sections: Any,
) -> tuple[dict[str, Tensor], int]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = TrainerConfig.model_validate(
        {
            "steps": 2,
            "batch": {"global_size": 8},
            "mesh": {"data_parallel_shard": num_ranks},
            "run": {"folder": folder},
            "trackers": (),
            "export": False,
            "rehearsal": False,
            "compile": compile,
            **sections,
        }
    )
    data = list(torch.randn(num_samples, 4, dtype=dtype, generator=torch.Generator().manual_seed(0)))
    trainer = Trainer(config, model=lambda stage: model(), data=data, task=_Sum())
    trained: dict[str, Tensor] = {}
    trainer.events.on(Finished, lambda event: trained.update(full_parameters(event.model)))
    trainer.train()
    return trained, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.full
def test_graph_breaks_are_printed_with_their_line_and_do_not_change_results(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    eager, num_graphs = _train(tmp_path / "eager", None, 1)
    assert num_graphs == 0
    compiled, num_graphs = _train(tmp_path / "compiled", "aot_eager", 1)
    assert num_graphs >= 3
    assert_trees_close(compiled, eager, rtol=1e-12)
    _, _, report = capfd.readouterr().out.partition("d9d: torch.compile runs these lines of the model eagerly:\n")
    assert "test_compiled_model.py" in report
    assert "if x.sum().item() > -1e9:" in report
    assert 'print("forward of", len(x))' in report
    for trained, num_graphs in run_ranks(_train, tmp_path / "two", "aot_eager", 2, world_size=2):
        assert num_graphs >= 3
        assert_trees_close(trained, eager, rtol=1e-12)


@pytest.mark.full
def test_a_checkpointed_module_that_changes_itself_is_one_graph(tmp_path: Path) -> None:
    eager, _ = _train(tmp_path / "eager", None, 1, _Changing)
    compiled, num_graphs = _train(tmp_path / "compiled", "aot_eager", 1, _Changing)
    assert num_graphs == 1
    assert_trees_close(compiled, eager, rtol=1e-12)


def test_gradients_of_another_dtype_break_no_graph(tmp_path: Path) -> None:
    """The last microbatch is shorter, so that forward is compiled again while the step has gradients in float32."""
    options: dict[str, Any] = {"model": _Slicing, "dtype": torch.float32, "num_samples": 14, "precision": "bfloat16"}
    options |= {"steps": None, "epochs": 1, "batch": {"global_size": 8, "microbatch_size": 4}}
    eager, _ = _train(tmp_path / "eager", None, 1, **options)
    compiled, num_graphs = _train(tmp_path / "compiled", "aot_eager", 1, **options)
    assert num_graphs == 3  # before the break, and after it for each length
    assert_trees_close(compiled, eager, rtol=0.0)


def test_unknown_backends_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"compile = 'induktor' is not a backend of torch\.compile; expected one of .*inductor"
    ):
        _train(tmp_path, "induktor", 1)


class _Writing(nn.Module):
    """Writes to one buffer in place, and assigns a new tensor to another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale: Tensor
        self.mean: Tensor
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)) * self.scale.clone()
        with torch.no_grad():
            if self.training:
                self.scale.mul_(0.5)
                self.mean = self.mean * 0.9 + 0.1 * y.mean(0)
        return y


def test_a_line_names_the_buffers_that_compiled_code_writes(capsys: pytest.CaptureFixture[str]) -> None:
    stage = _Writing()
    compile_stages([stage], "aot_eager")
    with torch.no_grad():
        stage.eval()(torch.randn(3, 4))
    assert "compiled code writes" not in capsys.readouterr().out
    for _ in range(2):
        stage.train()(torch.randn(3, 4)).sum().backward()
    assert capsys.readouterr().out.count("d9d: compiled code writes to scale in place. If forward also reads it") == 1
