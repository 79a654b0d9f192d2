"""Pretrain a Qwen3-style decoder, dense or MoE, on the source code of the standard library; export it for transformers.

Each file is a document, and each byte a token. The preset pretrain_preset.toml names the classes below by import path.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Self

import torch
from pydantic import model_validator
from source_text import PackedText, Text
from torch import nn

from d9d_dist import ContextMethod, DistributedContext, StageInfo
from d9d_loop import Finished, ModelProvider, Section, Trainer, TrainerConfig, cli_main, on_event
from d9d_loop.tasks import NextTokenTask
from d9d_metrics import plot_metrics
from d9d_modules import QWEN3, Qwen3ForCausalLM, Qwen3Params, decoder_from_hugging_face, generate, parallelize_decoder
from d9d_moe import (
    QWEN3_MOE,
    Qwen3MoeForCausalLM,
    Qwen3MoeParams,
    RouterLosses,
    parallelize_moe,
    sparse_from_hugging_face,
)
from d9d_state import JsonValue, StateMapper


class Experts(Section):
    num_experts: int
    top_k: int
    intermediate_size: int
    balance: float = 0.0  # weights of the router losses
    z: float = 0.0


class PretrainConfig(TrainerConfig):
    text: Text = Text()
    model: Qwen3Params
    experts: Experts | None = None
    context_method: ContextMethod = "all_gather"

    @model_validator(mode="after")
    def _has_a_token_for_each_byte(self) -> Self:
        if self.model.vocab_size < 256:
            raise ValueError(f"model.vocab_size = {self.model.vocab_size}; expected at least 256, one for each byte")
        return self


class Decoder(ModelProvider):
    def __init__(
        self, params: Qwen3Params, experts: Experts | None = None, context_method: ContextMethod = "all_gather"
    ) -> None:
        self.params, self.moe = params, None
        self.context_method: ContextMethod = context_method
        if experts is not None:
            self.moe = Qwen3MoeParams.like(
                params,
                num_experts=experts.num_experts,
                top_k=experts.top_k,
                expert_intermediate_size=experts.intermediate_size,
                router_losses=RouterLosses(balance=experts.balance, z=experts.z),
            )

    def build(self, stage: StageInfo) -> nn.Module:
        return Qwen3ForCausalLM(self.params, stage) if self.moe is None else Qwen3MoeForCausalLM(self.moe, stage)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        experts = None if self.moe is None else parallelize_moe
        parallelize_decoder(model, ctx, experts=experts, context_method=self.context_method)

    def state_mapper(self, model: nn.Module) -> StateMapper:
        return decoder_from_hugging_face(self.params) if self.moe is None else sparse_from_hugging_face(self.moe)

    def export_files(self) -> Mapping[str, JsonValue]:
        return {"config.json": QWEN3.write(self.params) if self.moe is None else QWEN3_MOE.write(self.moe)}


class Report:
    """Event handler that generates text, plots the curves, and prints a JSON summary at the end of the job."""

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context

    @on_event(Finished)
    def finished(self, done: Finished) -> None:
        result, device = done.result, done.ctx.device
        written = generate(  # collective
            done.for_generation(),
            torch.tensor([list(b"def ")], device=device),
            max_new_tokens=200,
            max_context=self.max_context,
            temperature=0.7,
            row_seeds=torch.tensor([0], device=device),
        )
        if done.ctx.is_main_process:
            panels = [("loss", "evaluation_loss"), ("learning_rate",), ("grad_norm",)]
            plot_metrics(result.run_dir / "metrics.jsonl", result.run_dir / "loss.png", panels=panels)
            print(bytes(written.token_ids[0].tolist()).decode(errors="replace"), end="\n\n")
            bits = result.evaluation["loss"] / math.log(2)  # a token is a byte
            print(json.dumps({**asdict(result), "val_bits_per_byte": bits}, default=str))


def main() -> None:
    config = PretrainConfig.from_cli(Path(__file__).with_suffix(".toml"))
    decoder = Decoder(config.model, config.experts, config.context_method)
    trainer = Trainer(config, model=decoder, data=PackedText(config.text), task=NextTokenTask())
    trainer.events.subscribe(Report(config.text.length))
    trainer.train()


if __name__ == "__main__":
    with cli_main():
        main()
