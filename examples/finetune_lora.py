"""Fine-tune the model that pretrain.py exported with LoRA; save the adapters, merge them, export the result."""

import json
from collections.abc import Mapping
from pathlib import Path

from pretrain import Decoder
from source_text import PackedText, Text
from torch import nn

from d9d_dist import DistributedContext, StageInfo, UserError
from d9d_loop import Finished, ModelProvider, Section, Trainer, TrainerConfig, cli_main, read_config_file
from d9d_loop.tasks import NextTokenTask
from d9d_modules import QWEN3
from d9d_peft import LoRA, inject, merge_, save_adapters
from d9d_state import JsonValue, StateMapper, save_model_state, sequential


class Lora(Section):
    target: str
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rank_stabilized: bool = False


class FinetuneConfig(TrainerConfig):
    text: Text = Text()
    lora: Lora


class LoraDecoder(ModelProvider):
    """Decoder with adapters on its linear layers; all other parameters are frozen."""

    def __init__(self, base: Decoder, lora: LoRA) -> None:
        self.base, self.lora = base, lora

    def build(self, stage: StageInfo) -> nn.Module:
        model = self.base.build(stage)
        injected = inject(self.lora, model, is_part=stage.count > 1)
        if stage.count == 1:  # the whole model is built first, and its names are used to read and write files
            self.injected = injected
        return model

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        self.base.parallelize(model, ctx)

    def state_mapper(self, model: nn.Module) -> StateMapper:
        return sequential(self.base.state_mapper(model), self.injected)


def export(done: Finished, provider: LoraDecoder, source: Path, found: Mapping[str, JsonValue] | None = None) -> None:
    """Save only the adapters, then the model with the adapters merged into its weights; print `found` and a summary."""
    run_dir, model, ctx = done.result.run_dir, done.model, done.ctx
    save_adapters(model, run_dir / "adapters", provider.base.state_mapper(model), ctx)
    merge_(model, ctx)
    mapper = provider.state_mapper(model).inverse()
    files = provider.base.export_files()
    save_model_state(model, run_dir / "export", mapper, ctx, extra_files=files, source=source)
    if ctx.is_main_process:
        summary = {
            **(found or {}),
            "steps": done.result.steps,
            "train_loss": done.result.train_loss,
            **{f"val_{name}": value for name, value in done.result.evaluation.items()},
            "adapters_dir": str(run_dir / "adapters"),
            "export_dir": str(run_dir / "export"),
        }
        print(json.dumps(summary))


def lora_decoder(source: Path | None, lora: Lora) -> tuple[LoraDecoder, Path]:
    """Return the model that pretrain.py exported, with adapters, and the folder of its weights."""
    if source is None or not source.is_dir():
        raise UserError(f"initial_weights = {source} does not exist; run examples/pretrain.py first.")
    params = QWEN3.read(read_config_file(source / "config.json"))
    return LoraDecoder(Decoder(params), LoRA(**lora.model_dump())), source


def main() -> None:
    config = FinetuneConfig.from_cli(Path(__file__).with_suffix(".toml"))
    provider, source = lora_decoder(config.initial_weights, config.lora)
    trainer = Trainer(config, model=provider, data=PackedText(config.text), task=NextTokenTask())
    trainer.events.on(Finished, lambda done: export(done, provider, source))
    trainer.train()


if __name__ == "__main__":
    with cli_main():
        main()
