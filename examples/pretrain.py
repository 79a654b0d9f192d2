"""Pretrain a Qwen3-style decoder, dense or MoE, on the source code of the standard library; export it for transformers.

Each file is a document, and each byte a token. The preset pretrain_preset.toml names the classes below by import path.
"""

import hashlib
import json
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import nn

from d9d_dist import (
    ContextMethod,
    ContextSplit,
    DistributedContext,
    StageInfo,
    UserError,
    parallelize_context,
    parallelize_hsdp,
    parallelize_tensor,
)
from d9d_loop import (
    DataProvider,
    Finished,
    Loss,
    ModelProvider,
    Section,
    Task,
    Trainer,
    TrainerConfig,
    cli_main,
    on_event,
)
from d9d_loop.data import DocumentStream, PackedSamples, PackedStream, SampleStream, cached_token_file
from d9d_metrics import BitsPerByte, plot_metrics
from d9d_modules import (
    IGNORED_LABEL,
    QWEN3,
    CheckpointPolicy,
    Float8,
    Qwen3ForCausalLM,
    Qwen3Params,
    checkpoint_layers,
    compile_layers,
    convert_to_float8,
    decoder_from_hugging_face,
    decoder_tensor_plan,
    generate,
)
from d9d_moe import (
    QWEN3_MOE,
    Qwen3MoeForCausalLM,
    Qwen3MoeParams,
    RouterLosses,
    parallelize_moe,
    sparse_from_hugging_face,
)
from d9d_pipeline import Inputs
from d9d_state import JsonValue, StateMapper


class Text(Section):
    folder: Path = Path(sysconfig.get_path("stdlib"))
    pattern: str = Field(default="**/*.py", min_length=1)
    length: PositiveInt = 256
    tokens: Path = Path("runs/tokens")  # cache of token files for later jobs


class Experts(Section):
    num_experts: int
    top_k: int
    intermediate_size: int
    router_losses: RouterLosses = RouterLosses()

    @model_validator(mode="after")
    def _has_a_load(self) -> Self:
        if self.router_losses.follow_global_batch:
            raise ValueError('scope = "global_batch" needs balance_experts, which this example does not call')
        return self


class Parallelism(Section):
    context_method: ContextMethod = "all_gather"
    activation_checkpointing: CheckpointPolicy = "none"
    compile_blocks: bool = False
    async_tensor_parallel: bool = False
    float8: Float8 | None = None  # e.g. --parallelism.float8.recipe rowwise

    @model_validator(mode="after")
    def _compiles_if_async(self) -> Self:
        if self.async_tensor_parallel and not self.compile_blocks:
            raise ValueError("async_tensor_parallel needs compile_blocks = true")
        return self


class PretrainConfig(TrainerConfig):
    text: Text = Text()
    parallelism: Parallelism = Parallelism()
    model: Qwen3Params
    experts: Experts | None = None

    @model_validator(mode="after")
    def _has_a_token_for_each_byte(self) -> Self:
        if self.model.vocab_size < 256:
            raise ValueError(f"model.vocab_size = {self.model.vocab_size}; expected at least 256, one for each byte")
        return self

    @property
    def moe(self) -> Qwen3MoeParams | None:
        if self.experts is None:
            return None
        return Qwen3MoeParams.like(
            self.model,
            num_experts=self.experts.num_experts,
            top_k=self.experts.top_k,
            expert_intermediate_size=self.experts.intermediate_size,
            router_losses=self.experts.router_losses,
        )


Batch = dict[str, torch.Tensor]

_CHANGE = "Change it with --text.folder PATH or --text.pattern PATTERN; of a preset, with --dataset.text.folder PATH."


def read_text(text: Text) -> tuple[list[bytes], list[bytes]]:
    """Return training and held-out text: whole files; a hash of its path selects one file in ten as held out."""
    if not text.folder.is_dir():
        raise UserError(f"text.folder = {text.folder} is not a folder; expected one with text. {_CHANGE}")
    files = [path.relative_to(text.folder) for path in sorted(text.folder.glob(text.pattern)) if path.is_file()]
    files = [file for file in files if not {"site-packages", "test"} & set(file.parts)]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for file in files:
        held_out = hashlib.sha256(file.as_posix().encode()).digest()[0] % 10 == 0
        parts[held_out].append((text.folder / file).read_bytes())
    if not all(map(any, parts)):
        raise UserError(
            f"text.folder = {text.folder} has {len(files)} files {text.pattern}; expected text in the training files "
            f"and in the held-out tenth of the files. {_CHANGE}"
        )
    return parts


class PackedText(DataProvider):
    """Files packed into rows of `text.length` bytes; a byte attends only to the preceding bytes of its own file."""

    draws = False  # only the order is random

    def __init__(self, text: Text) -> None:
        self.length = text.length
        self.train, self.held_out = (cached_token_file(files, text.tokens) for files in read_text(text))

    def training(self, *, seed: int) -> SampleStream:
        documents = DocumentStream(self.train, max_length=self.length, seed=seed)
        return PackedStream(documents, row_length=self.length, seed=seed)

    def evaluation(self) -> PackedSamples:
        return PackedSamples(self.held_out, row_length=self.length)


class Decoder(ModelProvider):
    def __init__(
        self, dense: Qwen3Params, moe: Qwen3MoeParams | None = None, parallelism: Parallelism | None = None
    ) -> None:
        self.dense, self.moe, self.parallelism = dense, moe, parallelism or Parallelism()

    def build(self, stage: StageInfo) -> nn.Module:
        return Qwen3ForCausalLM(self.dense, stage) if self.moe is None else Qwen3MoeForCausalLM(self.moe, stage)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        dense, cp = ctx.mesh_for("dense"), ctx.mesh_for("batch")["cp"]
        precision = ctx.precision  # bfloat16 on accelerators; router losses stay in float32
        if precision is not None and self.moe is not None:
            precision = replace(precision, cast_inputs=False)
        blocks = cast("nn.ModuleDict", model.get_submodule("backbone.layers"))
        if self.parallelism.float8 is not None:
            convert_to_float8(blocks, self.parallelism.float8, ctx)
        parallelize_tensor(model, dense["tp"], decoder_tensor_plan(model))
        parallelize_context(model, cp, method=self.parallelism.context_method)
        parallelize_moe(model, ctx, precision=precision)
        dp = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
        checkpoint_layers(blocks, policy=self.parallelism.activation_checkpointing)
        if self.parallelism.compile_blocks:
            compile_layers(
                blocks, async_tensor_parallel=dense["tp"] if self.parallelism.async_tensor_parallel else None
            )
        for block in blocks.children():
            parallelize_hsdp(block, dp, shard_axis="dp_cp_shard", precision=precision)
        parallelize_hsdp(model, dp, shard_axis="dp_cp_shard", precision=precision)

    def state_mapper(self, model: nn.Module) -> StateMapper:
        return decoder_from_hugging_face(self.dense) if self.moe is None else sparse_from_hugging_face(self.moe)

    def export_files(self) -> Mapping[str, JsonValue]:
        dense, moe = self.dense, self.moe
        return {"config.json": QWEN3.write(dense) if moe is None else QWEN3_MOE.write(moe)}


class NextByte(Task):
    weight_unit = "tokens"

    def inputs(self, batch: Batch) -> Inputs:
        return Inputs(
            batch["input_ids"],
            labels=batch["labels"],
            position_ids=batch["position_ids"],
            document_ids_BL=batch["documents"],
        )

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        return Loss.sum(outputs, (batch["labels"] != IGNORED_LABEL).sum())

    def split_sequence(self, batch: Batch, split: ContextSplit) -> Batch:
        return split.split(batch)

    def metrics(self) -> dict[str, BitsPerByte]:
        return {"bits_per_byte": BitsPerByte()}

    def update_metrics(self, metrics: Mapping[str, Any], *, outputs: Any, batch: Any, loss: Loss) -> None:
        metrics["bits_per_byte"].update(loss.total.detach(), loss.weight)


class Report:
    """Event handler that generates text, plots the curves, and prints a JSON summary at the end of the job."""

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context

    @on_event(Finished)
    def finished(self, done: Finished) -> None:
        written = continue_text(done, "def ", max_context=self.max_context)  # collective
        if not done.ctx.is_main_process:
            return
        result = done.result
        curves = [("bits_per_byte", "evaluation_bits_per_byte"), ("learning_rate",), ("grad_norm",)]
        metrics, picture = result.run_dir / "metrics.jsonl", result.run_dir / "loss.png"
        plot_metrics(metrics, picture, panels=curves, title=result.run_dir.name)
        print(written, end="\n\n")
        summary = {
            "steps": result.steps,
            "train_loss": result.train_loss,
            "val_bits_per_byte": result.evaluation["bits_per_byte"],
            "tokens_per_second": round(result.weight_per_second),
            "run_dir": str(result.run_dir),
            "export_dir": str(result.export_dir),
        }
        print(json.dumps(summary))


def continue_text(
    done: Finished, prompt: str, *, max_context: int, max_new_tokens: int = 200, temperature: float = 0.7
) -> str:
    """Generate a continuation of a prompt, in any layout. Collective."""
    ctx = done.ctx
    model, multiple = for_generation(ctx, done.model, done.forward)
    written = generate(
        model,
        torch.tensor([list(prompt.encode())], device=ctx.device),
        max_new_tokens=max_new_tokens,
        max_context=max_context,
        pad_to_multiple_of=multiple,
        temperature=temperature,
        generator=torch.Generator(ctx.device).manual_seed(0),
    )
    return bytes(written.token_ids[0].tolist()).decode(errors="replace")


def for_generation(
    ctx: DistributedContext, model: nn.Module, forward: Callable[..., Any]
) -> tuple[Callable[..., Any], int]:
    """Return `model` and `pad_to_multiple_of` for `generate`; the model supports a cache without `cp` and `pp`."""
    cp = ctx.mesh_for("batch")["cp"]
    if cp.size() == ctx.size("regular", "pp") == 1:
        return model, ctx.size("batch", "tp")
    split = ContextSplit(cp)

    def logits(ids: torch.Tensor, **padded: torch.Tensor) -> torch.Tensor:
        arguments = split.split(padded) or {"position_ids": split.positions(ids.shape[1])}
        return split.join(forward(split.split(ids), **arguments))

    return logits, 2 * cp.size() * ctx.size("batch", "tp")


def main() -> None:
    config = PretrainConfig.from_cli(Path(__file__).with_suffix(".toml"))
    trainer = Trainer(
        config,
        model=Decoder(config.model, config.moe, config.parallelism),
        data=PackedText(config.text),
        task=NextByte(),
    )
    trainer.events.subscribe(Report(config.text.length))
    trainer.train()


if __name__ == "__main__":
    with cli_main():
        main()
