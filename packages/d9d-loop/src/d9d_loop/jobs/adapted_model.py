"""Provider of a model with adapters, whose base weights are frozen."""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from d9d_dist import DistributedContext, StageInfo, UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.engine.code_digest import BASE, BASE_FILE
from d9d_loop.events import Finished
from d9d_loop.jobs.job_config import ALL_LINEAR, AdapterConfig
from d9d_loop.model.disk_mapper import export_mapper
from d9d_loop.model.export_notes import print_export_notes
from d9d_loop.model.model_provider import ModelProvider
from d9d_pipeline import Inputs
from d9d_state import JsonValue, StateMapper, save_model_state, sequential
from d9d_state.model_save import check_export


@final
class AdaptedModel(ModelProvider):
    """Model of the provider `base` with LoRA or DoRA adapters. Requires d9d-peft.

    Parameters that the folder of the base does not have, such as those of a new head, are trained in full.
    """

    late_init = False
    is_exported_by_handler = True

    def __init__(self, base: ModelProvider, adapter: AdapterConfig, *, task_type: str | None = None) -> None:
        try:
            import d9d_peft  # noqa: PLC0415 - an extra
        except ModuleNotFoundError:
            raise UserError(
                "[adapter] needs the package d9d-peft, which is not installed. Remove the section, or install it: "
                f"{install_hint('d9d-peft')}"
            ) from None
        self._peft: Any = d9d_peft
        self._base, self._adapter, self.virtual_layers = base, adapter, base.virtual_layers
        self._task_type = task_type
        self._target, self._tuned, self._tied, self._summary = "", frozenset[str](), list[str](), ""

    @property
    def initial_weights(self) -> Path | None:
        """Folder of the base weights."""
        return self._base.initial_weights

    def build(self, stage: StageInfo) -> nn.Module:
        """Build the base model, inject the adapters, and quantize the adapted weights if configured.

        The adapters are initialized even if the base model is on `meta`. The weights of such a base model are
        quantized while they are loaded.
        """
        self._base.virtual_layers = self.virtual_layers
        model, is_part, chosen = self._base.build(stage), stage.count > 1, self._adapter
        self.virtual_layers = self._base.virtual_layers
        base_mapper = self._base.state_mapper(model)  # before the injection, which changes names
        if not is_part:  # the whole model is built first
            self._choose(model)
        elif self._tied:
            raise UserError(
                f"adapter.target chooses {', '.join(self._tied)}, whose weight is tied; expected no adapter of it in a "
                "pipeline, whose stages have copies of it. Narrow adapter.target, or set mesh.pipeline_parallel = 1."
            )
        changes = self._peft.inject(self._method(), model, is_part=is_part)
        if not is_part:
            self._file_mapper = None if self._base.has_foreign_modules else base_mapper
            with _in_job("set dataset.packing = false, so that the layers are those of the folder"):
                self._peft.stored_tensor_names(model, self._file_mapper)  # those that `peft` reads
        for module in model.modules():
            if isinstance(module, self._peft.Adapter) and any(each.is_meta for each in module.parameters()):
                module.to_empty(device=torch.device("cpu"))
                module.reset_parameters()
        if chosen.base != "dense":
            options = {"block_format": chosen.base, "block_size": chosen.block_size}
            with _in_job("set adapter.base = dense"):
                changes = sequential(changes, self._peft.quantize_base(model, self._target, **options))
        if not is_part:  # names of the whole model are used to read and write files
            self._base_mapper, self._changes = base_mapper, changes
            if chosen.base == "dense" and not self._tied:  # those that `export` merges
                self._export_mapper = export_mapper(self, model, base_only=True)
        return model

    def first_cost(self, model: nn.Module, inputs: Callable[[], Inputs]) -> float | None:
        """Return the cost of the base model."""
        return self._base.first_cost(model, inputs)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        """Parallelize the base model with its adapters. Print once what is trained."""
        if self._summary and ctx.is_main_process:
            print(self._summary)
            self._summary = ""
        self._base.parallelize(model, ctx)

    def state_mapper(self, model: nn.Module) -> StateMapper:
        """Return the mapper of the base model, followed by the changes for adapters and quantization."""
        return self._with_adapters(self._base_mapper)

    def load_mapper(self, model: nn.Module, folder: Path) -> StateMapper:
        """Return the mapper of a folder of base weights, followed by the changes for adapters and quantization."""
        return self._with_adapters(self._base.load_mapper(model, folder))

    def export_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of the base model's export."""
        return self._base.export_dtype(name)

    def export_files(self) -> Mapping[str, JsonValue]:
        """Return the files of the base model."""
        return self._base.export_files()

    def without_adapters(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which the model acts as its base, such as a reference."""
        return self._peft.adapters_off(model)

    def check_export(self, folder: Path, source: Path | None) -> None:
        """Raise `UserError` if `export` could not write to the run folder at the end of the job."""
        has_source = source is not None and source.is_dir()
        check_export(folder / "export", extra_files=self.export_files(), source=source if has_source else None)

    def export(self, done: Finished, source: Path | None, digests: Mapping[str, str]) -> None:
        """Save the adapters to `adapters/`, merge them, and export the model to `export/`. Collective.

        `adapters/` also has the `config.json` of the model, names `source`, the folder of the base weights, and has the
        digest of these weights at the start, from `digests`.

        Adapters of a quantized base are not merged, because merging would round their update. Neither are those of tied
        weights, because merging would untie the model.
        """
        folder, model, ctx = done.result.run_dir, done.model, done.ctx
        base = None if source is None else str(source.resolve())
        names = {"base_model": base, "task_type": self._task_type}
        self._peft.save_adapters(model, folder / "adapters", self._file_mapper, ctx, **names)
        if ctx.is_main_process:  # the configuration of the adapted model: its classes, for example
            of_base = {name: each for name, each in digests.items() if name == BASE}
            for name, content in {**self.export_files(), BASE_FILE: of_base}.items():
                (folder / "adapters" / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if self._adapter.base != "dense" or self._tied:
            return
        self._peft.merge_(model, ctx)
        mapper, files = self._export_mapper, self.export_files()
        save_model_state(model, folder / "export", mapper, ctx, extra_files=files, source=source)
        if ctx.is_main_process:
            print_export_notes(folder / "export")

    def _choose(self, model: nn.Module) -> None:
        """Choose the layers of the whole model that get adapters, and the parameters that are trained in full."""
        self._tuned = self._base.new_parameters
        if (pattern := self._adapter.full) is not None:
            parameters = dict(model.named_parameters(remove_duplicate=False))  # tied ones under all names
            chosen = {id(each) for name, each in parameters.items() if re.search(pattern, name)}
            if not chosen:
                raise UserError(
                    f"adapter.full = {pattern!r} matches no parameter of {type(model).__name__}; expected the names of "
                    "some. Correct the pattern, which is searched in the names."
                )
            self._tuned |= {name for name, each in parameters.items() if id(each) in chosen}
        owners = {name.rpartition(".")[0] for name in self._tuned}
        linear = self._peft.linear_layers(model)
        if self._adapter.target == ALL_LINEAR:
            heads = self._base.head_layers(model)
            names = [name for name in linear if name not in owners and name not in heads]
        else:
            names = [name for name, _ in model.named_modules() if name and re.search(self._adapter.target, name)]
            names = [name for name in names if name not in owners]
        self._target = _exactly(names) if names else self._adapter.target
        if not names and self._adapter.target == ALL_LINEAR:
            raise UserError(
                f"adapter.target = {ALL_LINEAR} matches no layer of {type(model).__name__}; expected linear layers. "
                "Set adapter.target to a regular expression, or remove [adapter]."
            )
        uses = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
        adapted = ((name, model.get_submodule(name).parameters(recurse=False)) for name in names)
        self._tied = [name for name, own in adapted if any(uses[id(each)] > 1 for each in own)]
        tuned = self._tuned & dict(model.named_parameters()).keys()  # tied ones once
        self._summary = _summary(model, names, tuned, only_new=self._adapter.full is None)
        if self._tied:
            tied = ", ".join(self._tied)
            self._summary += (
                f" The weight of {tied} is tied, so the adapters are saved, but not merged into export/; d9d-export "
                "merges them."
            )

    def _method(self) -> Any:
        chosen, peft = self._adapter, self._peft
        kind = {"lora": peft.LoRA, "dora": peft.DoRA}[chosen.kind]
        method = kind(self._target, rank=chosen.rank, alpha=chosen.alpha, dropout=chosen.dropout)
        return peft.Stack(method, peft.FullTune(_exactly(self._tuned))) if self._tuned else method

    def _with_adapters(self, base: StateMapper | None) -> StateMapper:
        return self._changes if base is None else sequential(base, self._changes)


@contextmanager
def _in_job(remedy: str) -> Generator[None]:
    """Add the keys of the job, such as a remedy, to an error of d9d-peft."""
    try:
        yield
    except UserError as error:
        raise UserError(f"[adapter]: {error} In a job, narrow adapter.target, or {remedy}.") from None


def _exactly(names: Collection[str]) -> str:
    """Return a regular expression that matches only these names."""
    return f"^(?:{'|'.join(map(re.escape, sorted(names)))})$"


def _summary(model: nn.Module, names: Collection[str], tuned: Collection[str], *, only_new: bool) -> str:
    """Describe what is trained: the layers with adapters, their part of the matrices, and other parameters."""
    heads = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables = {id(parameter) for module in heads for parameter in module.parameters(recurse=False)}
    matrices = {name: each for name, each in model.named_parameters() if each.ndim > 1 and id(each) not in tables}
    adapted = {name: each for name, each in matrices.items() if name.rpartition(".")[0] in set(names)}
    part = sum(each.numel() for each in adapted.values()) / max(sum(each.numel() for each in matrices.values()), 1)
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
    kind = "new" if only_new else "new and chosen"
    also = f" {len(tuned)} {kind} parameters are trained in full: {', '.join(sorted(tuned))}." if tuned else ""
    return (
        f"d9d: adapters of {len(names)} layers ({kinds}), which have {part:.0%} of the elements of all matrices except "
        f"embeddings.{also}"
    )
