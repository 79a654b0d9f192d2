"""Run the examples as jobs in warm ranks, as `python` and `torchrun` do, without the import time."""

import importlib
import json
import shutil
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from d9d_dist.testing import run_ranks
from d9d_loop import cli_main

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

TINY_MODEL = {
    "model.hidden_size": "32",
    "model.num_layers": "2",
    "model.head_dim": "16",
    "model.num_heads": "2",
    "model.num_kv_heads": "1",
    "model.intermediate_size": "48",
    "text.length": "32",
    "text.pattern": "json/*.py",
    "text.tokens": str(EXAMPLES.parent / ".cache" / "tokens"),
    "batch.global_size": "8",
    "evaluation.num_samples": "11",
    "resilience.health.memory_mib": "1",
    "resilience.health.message_mib": "1",
    "resilience.health.matrix_size": "32",
}
"""Overrides for a main job of one second; the last ones shorten its start."""

_NEW_TOKENS = 40
"""How much a trained model writes: more than fits into the context of `TINY_MODEL`, which then moves on."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code and output of a script."""

    code: int
    output: str
    errors: str

    @property
    def summary(self) -> dict[str, Any]:
        """The JSON object on the last line of the output."""
        return json.loads(self.output.splitlines()[-1])


def curve_rounding(num_steps: int, *, num_operators: int = 200) -> float:
    """Return the relative rounding of a float32 curve that another order of sums may change.

    Roundings of the operators in sequence add up like a random walk, to their number's square root times an eps. The
    weights carry those of each step to all later ones.
    """
    return num_steps * num_operators**0.5 * torch.finfo(torch.float32).eps


def assert_same_export(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """Assert that two exports have the same weights, except for rounding that the optimizer amplifies."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Use a default dtype for the body."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def script(name: str, arguments: Sequence[str], double: bool = False) -> Ended:
    """Run an example's `main` in this process, as `python examples/name.py ARGUMENTS` does; it generates less text.

    With `double`, models are in float64: layouts then differ by so little rounding that curves agree to 1e-9.
    """
    module = importlib.import_module(name)
    output, errors = StringIO(), StringIO()
    before, sys.argv = sys.argv, [f"{name}.py", *arguments]
    code = 0
    try:
        dtype = torch.float64 if double else torch.get_default_dtype()
        with (
            redirect_stdout(output),
            redirect_stderr(errors),
            _shorter_text(module),
            default_dtype(dtype),
            mock.patch.object(sys.modules[cli_main.__module__], "_SECONDS_FOR_FIRST", 0.1),  # no launcher ends ranks
            cli_main(),
        ):
            module.main()
    except SystemExit as leave:
        code = int(leave.code or 0)
    finally:
        sys.argv = before
    return Ended(code, output.getvalue(), errors.getvalue())


def _shorter_text(module: ModuleType) -> AbstractContextManager[object]:
    """Generate fewer tokens: each is a forward pass on all ranks, and two hundred would dominate a tiny job."""
    if "generate" not in vars(module):
        return nullcontext()
    generate = vars(module)["generate"]

    def fewer(*args: Any, max_new_tokens: int, **kwargs: Any) -> object:
        return generate(*args, max_new_tokens=min(max_new_tokens, _NEW_TOKENS), **kwargs)

    return mock.patch.object(module, "generate", fewer)


def options(*parts: Mapping[str, Any], **more: Any) -> list[str]:
    """Return overrides as command-line arguments; in `more`, two underscores mean a dot."""
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(part)
    merged.update({name.replace("__", "."): value for name, value in more.items()})
    return [word for name, value in merged.items() for word in (f"--{name}", str(value))]


def on_ranks(
    name: str, arguments: Sequence[str], *, world_size: int = 1, double: bool = False, timeout: float = 300
) -> list[Ended]:
    """Run an example on every rank of a job; see `script`."""
    return run_ranks(script, name, list(arguments), double, world_size=world_size, timeout=timeout)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of `metrics.jsonl` without times and throughput, which differ between runs."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    volatile = {"time", "tokens_per_second", "flops_per_second", "peak_memory_gib", "config"}
    kept = [{k: v for k, v in json.loads(line).items() if k not in volatile} for line in lines]
    return [record for record in kept if record]


def curve(run_dir: Path, name: str) -> list[float]:
    """Return the values of a name over steps."""
    return [record[name] for record in records(run_dir) if name in record]


def copy_run(source: Path, target: Path) -> Path:
    """Copy a run folder, to resume the run twice."""
    return Path(shutil.copytree(source, target))
