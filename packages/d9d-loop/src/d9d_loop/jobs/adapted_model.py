"""Provider of a model with adapters, whose base weights are frozen."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from d9d_dist import DistributedContext, StageInfo, UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.events import Finished
from d9d_loop.jobs.job_config import AdapterConfig
from d9d_loop.model.model_provider import ModelProvider
from d9d_state import JsonValue, StateMapper, save_model_state, sequential


@final
class AdaptedModel(ModelProvider):
    """Model of the provider `base` with LoRA or DoRA adapters. Requires d9d-peft."""

    late_init = False

    def __init__(self, base: ModelProvider, adapter: AdapterConfig) -> None:
        try:
            import d9d_peft  # noqa: PLC0415 - an extra
        except ModuleNotFoundError:
            raise UserError(
                "[adapter] needs the package d9d-peft, which is not installed. Remove the section, or install it: "
                f"{install_hint('d9d-peft')}"
            ) from None
        self._peft: Any = d9d_peft
        self._base, self._adapter = base, adapter
        self._method = (d9d_peft.LoRA if adapter.kind == "lora" else d9d_peft.DoRA)(
            adapter.target, rank=adapter.rank, alpha=adapter.alpha, dropout=adapter.dropout
        )

    @property
    def initial_weights(self) -> Path | None:
        """Folder of the base weights."""
        return self._base.initial_weights

    def build(self, stage: StageInfo) -> nn.Module:
        """Build the base model, inject the adapters, and quantize the adapted weights if configured.

        The adapters are initialized even if the base model is on `meta`. The weights of such a base model are
        quantized while they are loaded.
        """
        model, is_part, chosen = self._base.build(stage), stage.count > 1, self._adapter
        base_mapper = self._base.state_mapper(model)  # before the injection, which changes names
        changes = self._peft.inject(self._method, model, is_part=is_part)
        for module in model.modules():
            if isinstance(module, self._peft.Adapter) and any(each.is_meta for each in module.parameters()):
                module.to_empty(device=torch.device("cpu"))
                module.reset_parameters()
        if chosen.base != "dense":
            quantized = self._peft.quantize_base(
                model, chosen.target, block_format=chosen.base, block_size=chosen.block_size
            )
            changes = sequential(changes, quantized)
        if not is_part:  # the whole model is built first, and its names are used to read and write files
            self._base_mapper, self._changes = base_mapper, changes
        return model

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        """Parallelize the base model with its adapters."""
        self._base.parallelize(model, ctx)

    def state_mapper(self, model: nn.Module) -> StateMapper:
        """Return the mapper of the base model, followed by the changes for adapters and quantization."""
        return self._with_adapters(self._base_mapper)

    def load_mapper(self, model: nn.Module, folder: Path) -> StateMapper:
        """Return the mapper of a folder of base weights, followed by the changes for adapters and quantization."""
        return self._with_adapters(self._base.load_mapper(model, folder))

    def export_files(self) -> Mapping[str, JsonValue]:
        """Return the files of the base model."""
        return self._base.export_files()

    def export(self, done: Finished, source: Path | None) -> None:
        """Save the adapters to `adapters/`, merge them, and export the model to `export/`. Collective.

        Adapters of a quantized base are not merged, because merging would round their update.
        """
        folder, model, ctx = done.result.run_dir, done.model, done.ctx
        self._peft.save_adapters(model, folder / "adapters", self._base_mapper, ctx)
        if self._adapter.base != "dense":
            return
        self._peft.merge_(model, ctx)
        mapper = self.state_mapper(model).inverse()
        files = self.export_files()
        save_model_state(model, folder / "export", mapper, ctx, extra_files=files, source=source)

    def _with_adapters(self, base: StateMapper | None) -> StateMapper:
        return self._changes if base is None else sequential(base, self._changes)
