"""Adapter of the Engine to the interface of verl's training engines (`verl.workers.engine.BaseEngine`), in any layout.

verl's workers call these methods on every rank. Register a subclass that builds your model:

    @EngineRegistry.register(model_type="language_model", backend="d9d")
    class D9dEngine(VerlEngine, BaseEngine): ...

Batches are mappings as TensorDicts are: `input_ids` is a jagged nested tensor [B, *], and `micro_batch_size_per_gpu`,
or `max_token_len_per_gpu` with `use_dynamic_bsz`, split it. A loss function gets log-probabilities of whole sequences,
under context parallelism too, and returns a loss and metrics. As for verl's other engines, its losses are summed over
microbatches and averaged over data-parallel ranks.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import ContextSplit, UserError, gather_json
from d9d_loop import Engine, EngineConfig, Loss, ModelProvider, Task
from d9d_loop.engine.engine import Reference
from d9d_modules import IGNORED_LABEL
from d9d_pipeline import Inputs

Data: TypeAlias = Mapping[str, Any]
LossFunction: TypeAlias = Callable[..., tuple[Tensor, Mapping[str, Any]]]


class Scores(Task):
    """Log-probabilities of packed sequences; `loss` is passed to the engine in each call."""

    def inputs(self, batch: Data) -> Inputs:
        names = {"labels": "labels", "position_ids": "position_ids", "document_ids_BL": "documents"}
        return Inputs(batch["input_ids"], **{name: batch[key] for name, key in names.items()}, scores=True)

    def split_sequence(self, batch: Data, split: ContextSplit) -> Data:
        return split.split(batch)


class VerlEngine:
    """Training engine with the methods of verl's `BaseEngine`. Collective methods: see `Engine`.

    Args:
        config: Configuration of the engine, with the run folder of checkpoints.
        model: Model provider.
        learning_rates: Factor of the learning rates after n calls of `lr_scheduler_step`.
        offloads: True to keep parameters and optimizer state in host memory outside of `train_mode` and `eval_mode`.
        reference: Reference of the engine, for `disable_adapter`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelProvider,
        *,
        learning_rates: Callable[[int], float] = lambda _: 1.0,
        offloads: bool = False,
        reference: Reference | None = None,
    ) -> None:
        self.config, self.model, self.learning_rates, self.offloads = config, model, learning_rates, offloads
        self.reference, self.num_lr_steps, self.is_pending = reference, 0, False
        self._open = ExitStack()

    def initialize(self) -> None:
        opened = Engine.open(self.config, model=self.model, task=Scores(), reference=self.reference)
        self.engine = self._open.enter_context(opened)
        self.ctx = self.engine.ctx
        self._split = ContextSplit(self.ctx.mesh_for("batch")["cp"])
        if self.offloads:
            self.engine.offload()

    def close(self) -> None:
        """Close the engine; verl has no such call."""
        self._open.close()

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.offloads

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.offloads

    @contextmanager
    def train_mode(self, **_: Any) -> Generator[None]:
        if self.offloads:
            self.engine.onload()
        try:
            yield
        finally:
            if self.offloads:
                self.engine.offload()

    eval_mode = train_mode  # `Engine.score` evaluates; model and optimizer move together

    def disable_adapter(self) -> AbstractContextManager[None]:
        return self.engine.reference()

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        if not model == optimizer == grad:
            raise UserError(f"got to({device!r}) of a part of the state; expected model, optimizer and grad together.")
        if model:
            (self.engine.offload if device == "cpu" else self.engine.onload)()

    def optimizer_zero_grad(self) -> None:
        if self.is_pending:
            raise UserError("got optimizer_zero_grad() after a backward pass; expected optimizer_step() before it.")

    def optimizer_step(self) -> float:
        self.is_pending = False
        return self.engine.step().grad_norm.item()

    def lr_scheduler_step(self) -> float:
        self.num_lr_steps += 1
        self.engine.set_learning_rates(self.learning_rates(self.num_lr_steps))
        return self.engine.optimizer.param_groups[0]["lr"]

    def train_batch(self, data: Data, loss_function: LossFunction) -> dict[str, Any]:
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function)
        grad_norm = self.optimizer_step()
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"]["grad_norm"] = grad_norm
        return outputs

    def infer_batch(self, data: Data, loss_function: LossFunction | None = None) -> dict[str, Any]:
        return self.forward_backward_batch(data, loss_function, forward_only=True)

    def forward_backward_batch(
        self, data: Data, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Return `model_output`, `loss` and `metrics` on the ranks of `is_mp_src_rank_with_outputs`, else nothing."""
        if float(data.get("temperature", 1.0)) != 1.0 or (data.get("calculate_entropy") and not forward_only):
            raise UserError("got a temperature, or calculate_entropy in training; expected 1.0, and no entropy bonus.")
        parts = microbatches(data)
        batches = [self._packed(part["input_ids"].unbind(), number) for number, part in enumerate(parts)]
        found: list[tuple[Tensor, Mapping[str, Any]]] = []

        def call(scores: Mapping[str, Tensor], number: int) -> Tensor:
            nested = {name: jagged(value[0], parts[number]) for name, value in scores.items()}
            group = self.get_data_parallel_group()
            found.append(loss_function(model_output=nested, data=parts[number], dp_group=group))
            return found[-1][0]

        def loss(outputs: Mapping[str, Tensor], batch: Data) -> Loss:
            if "auxiliary_losses" in outputs:
                raise UserError("the model has router losses, whose weight verl does not know; expected none.")
            mine, cp_size = {"log_probs": outputs["log_probs"]}, self._split.mesh.size()
            total = call(self._split.join(mine, gradient="partial"), batch["number"])
            # The weights of a step sum to the data-parallel size.
            return Loss(total / cp_size, weight=1.0 / (len(parts) * cp_size), tokens=mine)

        if forward_only:
            scores = self.engine.score(batches)
            if loss_function is not None:
                for number, each in enumerate(scores):
                    call(each, number)
        else:
            scores, self.is_pending = self.engine.forward_backward(batches, loss), True
        if not self.is_mp_src_rank_with_outputs():
            return {}
        whole = {
            name: [jagged(each[name][0], part) for each, part in zip(scores, parts, strict=True)] for name in scores[0]
        }
        return {
            "model_output": {
                name: jagged(torch.cat([v.values() for v in values]), data) for name, values in whole.items()
            },
            "loss": [total.item() for total, _ in found],
            "metrics": {name: [metrics[name] for _, metrics in found] for name in (found[0][1] if found else ())},
        }

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Return all weights under their names on disk, on every rank: pipeline ranks take turns. Collective."""
        return self._all_weights(), None

    def _all_weights(self) -> Iterator[tuple[str, Tensor]]:
        group, own = self.ctx.group_for("regular", "pp"), iter(self.engine.weights())
        while True:
            item = next(own, None)
            known = None if item is None else [item[0], list(item[1].shape), str(item[1].dtype).removeprefix("torch.")]
            turns = gather_json(known, group)
            if not any(turns):
                return
            for source, turn in enumerate(turns):
                if turn is None:
                    continue
                name, shape, dtype = turn
                if source == group.rank() and item is not None:
                    tensor = item[1].contiguous()
                else:
                    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.ctx.device)
                if group.size() > 1:
                    dist.broadcast(tensor, group=group, group_src=source)
                yield name, tensor

    def get_data_parallel_size(self) -> int:
        return self.ctx.size("batch", "dp")

    def get_data_parallel_rank(self) -> int:
        return self.ctx.coordinate("batch", "dp")

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.ctx.group_for("batch", "dp")

    def is_mp_src_rank_with_outputs(self) -> bool:
        is_first = self.ctx.coordinate("batch", "cp") == self.ctx.coordinate("batch", "tp") == 0
        return is_first and self.engine.pipeline.has_last_stage

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Save to the run folder of the configuration, and write to `local_path` which step it is."""
        if hdfs_path is not None or max_ckpt_to_keep not in {None, self.config.keep_last}:
            raise UserError("got hdfs_path or max_ckpt_to_keep; expected keep_last of the engine's configuration.")
        self.engine.save({"global_step": global_step, "num_lr_steps": self.num_lr_steps})
        if self.ctx.is_main_process:
            Path(local_path).mkdir(parents=True, exist_ok=True)
            (Path(local_path) / "d9d.json").write_text(json.dumps({"num_steps": self.engine.num_steps}))

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load the newest checkpoint of the run folder, which must be that of `local_path`."""
        if hdfs_path is not None or del_local_after_load:
            raise UserError(
                "got hdfs_path or del_local_after_load; expected neither: the run folder keeps checkpoints."
            )
        expected = json.loads((Path(local_path) / "d9d.json").read_text())["num_steps"]
        state = self.engine.load()
        if not isinstance(state, dict) or self.engine.num_steps != expected:
            raise UserError(f"the newest checkpoint is that of step {self.engine.num_steps}; expected step {expected}.")
        self.num_lr_steps = int(str(state["num_lr_steps"]))
        self.engine.set_learning_rates(self.learning_rates(self.num_lr_steps))

    def _packed(self, sequences: tuple[Tensor, ...], number: int) -> dict[str, Any]:
        """Return one row of whole sequences, padded for the split over context- and tensor-parallel ranks."""
        length = sum(map(len, sequences))
        padding = -length % (2 * self._split.mesh.size() * self.ctx.size("batch", "tp"))
        end = sequences[0].new_full((1,), IGNORED_LABEL)  # the last token of a sequence predicts none
        parts = {
            "input_ids": [*sequences, end.new_zeros(padding)],
            "labels": [*(torch.cat((each[1:], end)) for each in sequences), end.expand(padding)],
            "position_ids": [*(torch.arange(len(each)) for each in sequences), torch.arange(padding)],
            "documents": [torch.full((len(each),), index) for index, each in enumerate((*sequences, range(padding)))],
        }
        return {"number": number, **{name: torch.cat(values).unsqueeze(0) for name, values in parts.items()}}


def jagged(values: Tensor, like: Data) -> Tensor:
    """Return a row of packed values [L] as a nested tensor of the sequences of a batch; padding is cut off."""
    offsets = torch.tensor([0, *map(len, like["input_ids"].unbind())], device=values.device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values[: int(offsets[-1])], offsets)


def microbatches(data: Data) -> list[dict[str, Any]]:
    """Split a batch in the order of its rows: equally many rows, or up to a number of tokens."""
    lengths = [len(each) for each in data["input_ids"].unbind()]
    starts, tokens = [0], 0
    for row, length in enumerate(lengths):
        tokens += length
        if data.get("use_dynamic_bsz"):
            is_full = tokens > data["max_token_len_per_gpu"]
        else:
            is_full = row - starts[-1] == data["micro_batch_size_per_gpu"]
        if is_full and row > 0:
            starts.append(row)
            tokens = length
    ends = [*starts[1:], len(lengths)]
    return [
        {name: rows_of(value, start, end) for name, value in data.items()}
        for start, end in zip(starts, ends, strict=True)
    ]


def rows_of(value: Any, start: int, end: int) -> Any:
    """Return some rows of a tensor; any other value is that of the whole batch."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if not value.is_nested:
        return value[start:end]
    rows = value.unbind()[start:end]
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
