"""Adapter of the Engine to the interface of verl's training engines (`verl.workers.engine.BaseEngine`), in any layout.

verl's workers call these methods on every rank. Register a subclass that builds your model:

    @EngineRegistry.register(model_type="language_model", backend="d9d")
    class D9dEngine(VerlEngine, BaseEngine): ...

A batch is a mapping, such as a TensorDict: `input_ids` is a jagged nested tensor, and `micro_batch_size_per_gpu`, or
`max_token_len_per_gpu` with `use_dynamic_bsz`, splits it. A loss function gets whole sequences, under context
parallelism too. As in verl's own engines, its losses are summed over microbatches, and averaged over
data-parallel ranks.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from jagged_rows import Data, jagged, microbatches, packed
from torch import Tensor

from d9d_dist import ContextSplit, UserError, gather_json
from d9d_loop import BatchTask, Engine, EngineConfig, Loss, ModelProvider
from d9d_pipeline import Inputs, broadcast_tree

LossFunction: TypeAlias = Callable[..., tuple[Tensor, Mapping[str, Any]]]


class Scores(BatchTask):
    """Log-probabilities of packed sequences; each call of the engine passes its own loss."""

    def inputs(self, batch: Data) -> Inputs:
        names = {"labels": "labels", "position_ids": "position_ids", "document_ids_BL": "documents"}
        return Inputs(batch["input_ids"], **{name: batch[key] for name, key in names.items()}, scores=True)

    def split_sequence(self, batch: Data, split: ContextSplit) -> Data:
        return split.split(batch)


class VerlEngine:
    """Training engine with the methods of verl's `BaseEngine`. For collectives and options see `Engine.open`.

    With `offloads`, the state is in host memory outside of `train_mode` and `eval_mode`.
    """

    def __init__(self, config: EngineConfig, model: ModelProvider, *, offloads: bool = False, **options: Any) -> None:
        self.config, self.model, self.options = config, model, options
        self.is_param_offload_enabled = self.is_optimizer_offload_enabled = offloads
        self.num_lr_steps, self.is_pending, self._opened = 0, False, ExitStack()

    def initialize(self) -> None:
        opened = Engine.open(self.config, model=self.model, task=Scores(), **self.options)
        self.engine = self._opened.enter_context(opened)
        self.ctx = self.engine.ctx
        self._split = ContextSplit(self.ctx.mesh_for("batch")["cp"])
        self._multiple = 2 * self._split.mesh.size() * self.ctx.size("batch", "tp")
        if self.is_param_offload_enabled:
            self.engine.offload()

    def close(self) -> None:
        self._opened.close()

    @contextmanager
    def train_mode(self, **_: Any) -> Generator[None]:
        if self.is_param_offload_enabled:
            self.engine.onload()
        yield
        if self.is_param_offload_enabled:
            self.engine.offload()

    eval_mode = train_mode  # forward_only evaluates

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

    def learning_rate_factor(self, num_lr_steps: int) -> float:
        """Return the learning-rate factor after `num_lr_steps` calls of `lr_scheduler_step`; override this method."""
        return 1.0

    def lr_scheduler_step(self) -> float:
        self.num_lr_steps += 1
        self.engine.set_learning_rates(self.learning_rate_factor(self.num_lr_steps))
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
        parts, found = microbatches(data), []
        batches = [packed(part, multiple=self._multiple, number=number) for number, part in enumerate(parts)]

        def call(scores: Mapping[str, Tensor], number: int) -> Tensor:
            if loss_function is None:
                return torch.zeros(())
            nested = {name: jagged(value[0], parts[number]) for name, value in scores.items()}
            found.append(loss_function(nested, parts[number], dp_group=self.get_data_parallel_group()))
            return found[-1][0]

        def loss(outputs: Mapping[str, Tensor], batch: Data) -> Loss:
            if "auxiliary_losses" in outputs:
                raise UserError("the model has router losses, whose weight verl does not know; expected none.")
            mine, cp_size = {"log_probs": outputs["log_probs"]}, self._split.mesh.size()
            total = call(self._split.join(mine, gradient="partial"), batch["number"]) / cp_size
            # The weights of a step sum to the data-parallel size.
            return Loss(total, weight=1.0 / (len(parts) * cp_size), tokens=mine)

        if forward_only:
            scores = self.engine.score(batches)
            for number, each in enumerate(scores):
                call(each, number)
        else:
            scores, self.is_pending = self.engine.forward_backward(batches, loss), True
        if not self.is_mp_src_rank_with_outputs():
            return {}
        pairs = list(zip(scores, parts, strict=True))
        rows = {name: [jagged(each[name][0], part).values() for each, part in pairs] for name in scores[0]}
        metrics = {name: [each[name] for _, each in found] for name in (found[0][1] if found else ())}
        outputs = {name: jagged(torch.cat(values), data) for name, values in rows.items()}
        return {"model_output": outputs, "loss": [total.item() for total, _ in found], "metrics": metrics}

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Return all weights under their names on disk, on every rank: pipeline ranks take turns."""
        return self._all_weights(), None

    def _all_weights(self) -> Iterator[tuple[str, Tensor]]:
        group, own = self.ctx.group_for("regular", "pp"), self.engine.weights()
        while any(turns := gather_json((item := next(own, None)) is not None, group)):
            for source, has_item in enumerate(turns):
                if has_item:
                    tree = None if item is None else {item[0]: item[1].contiguous()}
                    found: dict[str, Tensor] = broadcast_tree(tree, group, source=source)
                    yield from found.items()

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
        """Save to the run folder, and write the step number to `local_path`."""
        _refuse(hdfs_path=hdfs_path, max_ckpt_to_keep=max_ckpt_to_keep)
        self.engine.save({"global_step": global_step, "num_lr_steps": self.num_lr_steps})
        if self.ctx.is_main_process:
            Path(local_path).mkdir(parents=True, exist_ok=True)
            (Path(local_path) / "d9d.json").write_text(json.dumps(self.engine.num_steps))

    def load_checkpoint(self, local_path: str, hdfs_path: object = None, del_local_after_load: bool = False) -> None:
        """Load the newest checkpoint of the run folder, whose step must be the step number in `local_path`."""
        _refuse(hdfs_path=hdfs_path, del_local_after_load=del_local_after_load)
        state, expected = self.engine.load(), json.loads((Path(local_path) / "d9d.json").read_text())
        if not isinstance(state, dict) or self.engine.num_steps != expected:
            raise UserError(f"the newest checkpoint is of step {self.engine.num_steps}; expected step {expected}.")
        self.num_lr_steps = int(str(state["num_lr_steps"]))
        self.engine.set_learning_rates(self.learning_rate_factor(self.num_lr_steps))


def _refuse(**options: Any) -> None:
    if given := [name for name, value in options.items() if value]:
        raise UserError(f"got {', '.join(given)}; expected none. `keep_last` removes checkpoints; copy them yourself.")
