"""Decoders of `transformers` in layouts of other libraries, compared with one process of these in float64."""

import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from zoo import Batch, entry, loss_of, without_random
from zoo_jobs import LEARNING_RATE, AllFloat64, compare_values, cpu_seconds, float64_by_default

from d9d_dist.testing import RankError, full_gradients, run_ranks

_SECONDS = 60


def distributed_config_outcomes(types: Sequence[str], folder: str, sizes: Mapping[str, Any]) -> dict[str, str]:
    """Train types on two ranks of `DistributedConfig`; return `equal`, a difference, or `crash: ` with the reason."""
    found: dict[str, str] = {}
    for name in types:
        try:
            found[name], _ = run_ranks(_outcome, name, folder, sizes, world_size=2, timeout=4 * _SECONDS)
        except RankError as error:
            found[name] = f"crash: {str(error).splitlines()[0]}"
    return found


def _outcome(name: str, folder: str, sizes: Mapping[str, Any]) -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=_SECONDS))
    try:
        return _difference(name, Path(folder) / name, sizes)
    finally:
        dist.destroy_process_group()


def _difference(name: str, folder: Path, sizes: Mapping[str, Any]) -> str:
    """Return the first difference of a type. Collective."""
    from transformers import DistributedConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            animal = entry(f"decoders:{name}")
            if dist.get_rank() == 0:
                torch.manual_seed(5)
                animal.module().save_pretrained(folder)  # ty: ignore[not-callable]
            dist.barrier()
            with cpu_seconds(40):
                batch, kind = animal.batch(), type(animal.build())
                expected = _values(_load(kind, folder), batch, has_gradients="pp_size" not in sizes)
        except Exception as error:
            return f"not built: {type(error).__name__}: {error}"[:300]
        try:
            model = _load(kind, folder, distributed_config=DistributedConfig(**sizes))
            rows = {key: each.chunk(2)[dist.get_rank()] for key, each in batch.items()}
            actual = _values(model, rows if "fsdp_size" in sizes else batch, has_gradients="pp_size" not in sizes)
            if "fsdp_size" in sizes:
                dist.all_reduce(actual["losses"])
                actual["losses"] /= 2
        except Exception as error:
            kind = "error" if "was requested, but" in str(error) else "crash"
            return f"{kind}: {type(error).__name__}: {error}"[:300]
    return next(compare_values("", actual, expected, 0.0), "equal").strip()


def _load(kind: Any, folder: Path, **options: Any) -> Any:
    model = kind.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager", **options)
    return without_random(model.train())


def _values(model: Any, batch: Batch, *, has_gradients: bool) -> dict[str, Tensor]:
    """Return the gradients of the mean loss, and the losses before and after a step; or only the logits."""
    with float64_by_default(), AllFloat64():
        if not has_gradients:
            with torch.no_grad():
                return {"logits": model(**batch).logits}
        gradients: dict[str, Tensor] = {}
        losses = []
        for _ in range(2):
            rows = len(batch["input_ids"])
            loss = loss_of([model(**batch).logits], rows) / rows
            losses.append(loss.detach())
            if gradients:
                break
            loss.backward()
            gradients = full_gradients(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(LEARNING_RATE * parameter.grad)
        return {**gradients, "losses": torch.stack(losses)}
