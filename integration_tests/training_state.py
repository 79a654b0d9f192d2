"""What each call of an engine must keep, restore or return, for every kind of state that training changes.

The model has parameters, expert biases and loads (buffers), and tokens per expert (buffers that checkpoints omit).
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from moe_job import PARAMS, TinyDeepseek
from torch import Tensor, nn

import d9d_peft
from d9d_dist import DistributedContext, StageInfo, UserError, local_tensor
from d9d_loop import Engine, EngineConfig, ModelProvider
from d9d_loop.tasks import NextTokenTask
from d9d_modules import generate
from d9d_moe import balance_experts

State = dict[str, Any]
TASK = NextTokenTask()
RATE = 1e-2
LENGTHS = (3, 5, 2, 6, 4, 7)


def row(length: int, padded: int, seed: int) -> dict[str, Tensor]:
    """Return a packed row with one document and padding."""
    tokens = torch.randint(1, PARAMS.vocab_size, (length + 1,), generator=torch.Generator().manual_seed(seed))
    padding = (0, padded - length)
    return {
        "input_ids": torch.nn.functional.pad(tokens[:-1], padding),
        "labels": torch.nn.functional.pad(tokens[1:], padding, value=-100),
        "documents": torch.nn.functional.pad(torch.zeros(length, dtype=torch.int64), padding, value=1),
        "position_ids": torch.nn.functional.pad(torch.arange(length), padding),
    }


def batch_of(rows: list[int], padded: int = 8) -> dict[str, Tensor]:
    """Return a batch of rows by number."""
    found = [row(LENGTHS[number], padded, number) for number in rows]
    return {key: torch.stack([each[key] for each in found]) for key in found[0]}


def opened(mesh: Mapping[str, Any], **options: Any) -> AbstractContextManager[Engine]:
    """Open an engine of the model in a layout."""
    config = EngineConfig.model_validate(
        {
            "run": {"folder": Path(tempfile.gettempdir()) / "d9d-state", **options.pop("run", {})},
            "mesh": dict(mesh),
            "precision": "parameters",
            "health": {"enabled": False},
            "optimizer": {"learning_rate": RATE},
            **options.pop("settings", {}),
        }
    )
    return Engine.open(config, model=options.pop("model", TinyDeepseek()), task=TASK, **options)


def state_of(engine: Engine) -> State:
    """Return this rank's state by kind."""
    buffers = dict(engine.model.named_buffers())
    saved = {name for name in engine.model.state_dict() if name in buffers}
    return {
        "parameters": {name: local_tensor(each.detach()).clone() for name, each in engine.model.named_parameters()},
        "buffers": {name: buffers[name].clone() for name in saved},
        "counters": {name: each.clone() for name, each in buffers.items() if name not in saved},
        "random": torch.get_rng_state(),
        "rates": [group["lr"] for group in engine.optimizer.param_groups],
    }


KINDS = ("parameters", "buffers", "counters", "random", "rates")


def differing(now: State, then: State, kinds: tuple[str, ...] = KINDS) -> Iterator[str]:
    """Yield the kinds of state that differ."""
    for kind in kinds:
        a, b = now[kind], then[kind]
        if isinstance(a, dict):
            if not all(torch.equal(a[name], b[name]) for name in a):
                yield kind
        elif not (torch.equal(a, b) if isinstance(a, Tensor) else a == b):
            yield kind


def own_batches(ctx: DistributedContext) -> list[dict[str, Tensor]]:
    """Return this rank's batches: as many on each data-parallel rank."""
    mine = range(ctx.coordinate("batch", "dp"), 6, ctx.size("batch", "dp"))
    return [batch_of([number]) for number in mine]


def train(engine: Engine, learning_rate: float | None = None) -> None:
    """Take a step, and balance the experts with its tokens."""
    engine.forward_backward(own_batches(engine.ctx), TASK.loss)
    torch.rand(1)
    engine.step(learning_rate)
    balance_experts(engine.model, rate=0.3)


def nan_loss(outputs: Tensor, batch: Any) -> Any:
    """Return a loss that makes the step bad, and spoils the buffers as a forward could."""
    loss = TASK.loss(outputs, batch)
    return type(loss)(loss.total * torch.nan, loss.weight)


def problems(mesh: Mapping[str, Any], folder: Path) -> list[str]:
    """Return what was found wrong on this rank: "kind after call"."""
    found: list[str] = []
    with opened(mesh, run={"folder": folder}, reference="initial") as engine:
        batches, first = own_batches(engine.ctx), state_of(engine)
        first_weights = {name: tensor.clone() for name, tensor in engine.weights()}
        first_scores = engine.score(batches)
        train(engine, 0.02)
        engine.forward_backward(batches, TASK.loss)  # half a step, whose gradients and counts stay
        half = state_of(engine)
        found += [f"{kind} did not change" for kind in KINDS[:4] if kind not in set(differing(half, first))]

        def check(call: str, *kinds: str, then: State = half) -> None:
            found.extend(f"{kind} after {call}" for kind in differing(state_of(engine), then, kinds or KINDS))

        for call, run in _calls(engine, batches).items():
            run()
            check(call)
        with engine.reference():
            check("entering reference()", "parameters", "buffers", then=first)
            found += [
                f"{name} in reference()" for name, each in engine.weights() if not each.equal(first_weights[name])
            ]
            scores = engine.score(batches)
        found += ["scores of the reference"] * (not _same(scores, first_scores))
        check("reference()")
        with engine.offloaded():
            pass
        check("offloaded()")
        engine.load()  # no checkpoint: only the half step is undone
        check("load() without a checkpoint", "parameters", "rates")
        engine.forward_backward(batches, nan_loss)
        before = state_of(engine)
        _spoil(engine)
        assert not engine.step().taken
        found += [
            f"{kind} after a skipped step" for kind in differing(state_of(engine), before, ("parameters", "rates"))
        ]
        found += ["NaN after a skipped step"] * any(each.isnan().any() for each in state_of(engine)["buffers"].values())
        found += ["counters after a skipped step"] * (_counted(engine) > 0)
        for rate in (RATE, 0.02):  # checkpoints omit learning rates that equal the initial ones
            train(engine, rate)
            engine.save({"prompts": 7})
            saved = state_of(engine)
            train(engine, 0.5)
            engine.forward_backward(batches, TASK.loss)
            engine.step()  # its tokens per expert are not used
            engine.forward_backward(batches, TASK.loss)
            found += ["the value of load()"] * (engine.load() != {"prompts": 7})
            check("load()", then=saved)
    with opened(mesh, run={"folder": folder}) as engine:
        found += ["the value of load() in a new process"] * (engine.load() != {"prompts": 7})
        check("load() in a new process", then=saved)
    return found


def _calls(engine: Engine, batches: list[Any]) -> dict[str, Callable[[], object]]:
    prompts, model = batches[0]["input_ids"][:, :2], engine.for_generation()
    draws = torch.Generator().manual_seed(1)  # not those of the training
    return {
        "score()": lambda: engine.score(batches),
        "weights()": lambda: list(engine.weights()),
        "weights(shards=True)": lambda: list(engine.weights(shards=True)),
        "generate()": lambda: generate(model, prompts, max_new_tokens=2, max_context=16, generator=draws),
        "evaluation_weights()": lambda: _enter(engine.evaluation_weights()),
    }


def _enter(context: AbstractContextManager[object]) -> None:
    with context:
        pass


def _spoil(engine: Engine) -> None:
    """Write to buffers as the forward of a bad step does."""
    for buffer in engine.model.buffers():
        buffer.add_(torch.nan if buffer.is_floating_point() else 1)


def _counted(engine: Engine) -> int:
    return sum(int(each.sum()) for each in state_of(engine)["counters"].values())


def _same(scores: Any, others: Any) -> bool:
    return all(torch.equal(a["log_probs"], b["log_probs"]) for a, b in zip(scores, others, strict=True))


def tokens_per_expert(mesh: Mapping[str, Any], splits: list[list[list[int]]], padded: int) -> tuple[float, State]:
    """Return the loss and the tokens per expert of a step; `splits` has the rows of each batch, by rank."""
    with opened(mesh) as engine:
        mine = splits[engine.ctx.coordinate("batch", "dp")]
        engine.forward_backward([batch_of(rows, padded) for rows in mine], TASK.loss)
        counts = balance_experts(engine.model, rate=0.0)
        return engine.step().loss.item(), counts


def reference_of_adapters(mesh: Mapping[str, Any]) -> bool:
    """Return True if a reference without adapters keeps the initial buffers."""
    with opened(mesh, model=Adapted(), reference=d9d_peft.adapters_off) as engine:
        batches = own_batches(engine.ctx)
        first = engine.score(batches)
        for _ in range(2):
            train(engine)
        with engine.reference():
            return _same(engine.score(batches), first)


class Adapted(ModelProvider):
    """The model with adapters."""

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        TinyDeepseek().parallelize(model, ctx)

    def build(self, stage: StageInfo) -> nn.Module:
        model = TinyDeepseek().build(stage)
        d9d_peft.inject(d9d_peft.LoRA(r"q_up|q_down|attention", rank=2, alpha=4), model, is_part=stage.count > 1)
        return model


def with_bug(bug: Callable[[], AbstractContextManager[object]], run: Callable[..., Any], *args: Any) -> Any:
    """Run a function with a deliberate bug."""
    with bug():
        return run(*args)


def sampled(mesh: Mapping[str, Any]) -> tuple[Tensor, Tensor, str]:
    """Return two samples without seeds of rows, and the message about prompts that differ between ranks."""
    prompts = torch.tensor([[1, 2], [3, 4]])
    with opened(mesh) as engine:
        torch.manual_seed(engine.ctx.rank)  # as in a loop in which ranks draw other random numbers
        model = engine.for_generation()
        first, second = (
            generate(model, prompts, max_new_tokens=6, max_context=16, stop_tokens=[9]).token_ids for _ in range(2)
        )
        try:
            generate(model, prompts + engine.ctx.rank, max_new_tokens=2, max_context=16)
        except UserError as error:
            return first, second, str(error)
    return first, second, ""


def generated_to_a_stop(mesh: Mapping[str, Any], prompts: Tensor, stop_tokens: list[int]) -> list[int]:
    """Return the greedy tokens of this data-parallel rank's prompt, one of `prompts`, up to a stop token."""
    with opened(mesh) as engine:
        own = prompts[[engine.ctx.coordinate("batch", "dp")]]
        found = generate(
            engine.for_generation(), own, max_new_tokens=6, max_context=16, temperature=0, stop_tokens=stop_tokens
        )
        return found.token_ids[found.mask].tolist()
