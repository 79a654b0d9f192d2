"""Provider of `transformers` models.

The model is built without weights; each rank then reads only the weights of its own shards.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import nn

from d9d_dist import DistributedContext, Precision, StageInfo, UserError, parallelize_hsdp, parallelize_tensor
from d9d_dist.install_hint import install_hint
from d9d_loop._hugging_face_tensor_plan import tensor_plan
from d9d_loop.model._block_trace import BlockTrace, trace_blocks, without_cache
from d9d_loop.model._hugging_face_context import split_rows
from d9d_loop.model._hugging_face_experts import check_experts
from d9d_loop.model._hugging_face_heads import Accepted
from d9d_loop.model._hugging_face_masks import mask_packed_rows
from d9d_loop.model._hugging_face_stage import Absent, cut_stage
from d9d_loop.model._tower_cost import tower_cost
from d9d_loop.model.block_lists import blocks_of
from d9d_loop.model.export_notes import with_older_entries
from d9d_loop.model.folder_dtypes import FolderDtypes
from d9d_loop.model.model_check import dropout_names
from d9d_loop.model.model_provider import ModelProvider
from d9d_pipeline import Inputs
from d9d_state import JsonValue, StateMapper

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_WITHOUT_CALLS = frozenset(("ReformerLayer", "SqueezeBertModule"))
"""Blocks that other modules use without a call, which would gather them: by `forward`, or in a backward pass."""


def hugging_face_model(
    source: str | Path | Any,
    model_class: type | None = None,
    *,
    new: Sequence[str] = (),
    unused: Sequence[str] = (),
    new_head: bool = False,
    dtype: torch.dtype | None = None,
    keep_dtypes: bool = False,
    precision: Precision | Literal["job"] | None = "job",
    from_scratch: bool = False,
    disable_dropout: bool = False,
    **config_changes: Any,
) -> ModelProvider:
    """Return a provider of a `transformers` model with the weights of a folder, or with the model's initialization.

    The mesh decides the layout: `mesh.tensor_parallel` splits the layers that the model's own plan (`model.tp_plan`)
    names, `mesh.expert_parallel` shards experts (with d9d-moe), and `mesh.pipeline_parallel` splits a decoder into
    stages at its list of blocks.

    From a folder, each rank reads only the bytes of its own shards, and no rank holds a whole copy. Parameters and
    buffers are bitwise equal to those of `from_pretrained`. Over data-parallel ranks, each block, a module of an
    outermost list, is gathered separately (`parallelize_hsdp`). Parameters outside of blocks are gathered together.

    The model is in training mode, as in the Trainer of `transformers`; `from_pretrained` returns evaluation mode.

    Args:
        source: Folder with `config.json` and safetensors files, as `save_pretrained` writes it; or a configuration of
            `transformers`, whose model starts from its own initialization. Nothing is downloaded.
        model_class: An `AutoModelFor...` or a model class; by default the class that `architectures` names.
        new: `fnmatch` patterns (`"score.*"`) of parameters that the folder may lack, or hold in another shape. They
            start from the model's initialization, under the job's seed.
        unused: `fnmatch` patterns of tensors in the folder to ignore if the model lacks them.
        new_head: If True, the folder may hold another head than `model_class` has: what the classes of both models do
            not share is as in `new` or `unused`. The tensors of the base model must be equal.
        dtype: Dtype of the parameters; by default the dtype in the configuration, or float32 if it has none.
        keep_dtypes: If True, export each tensor in its dtype in the folder, whatever `dtype` is.
        precision: Dtypes of computation and reduction, as in `parallelize_hsdp`; "job" for those of the configuration.
        from_scratch: Read only the configuration from the folder, not the weights.
        disable_dropout: If True, train without dropout, as a loss with a reference needs; an export keeps the entries.
        config_changes: Configuration values to override, such as `num_labels=3` or `attn_implementation="eager"`.

    Raises:
        ModuleNotFoundError: If `transformers` is not installed.
        UserError: If the folder or the class cannot be used. Missing and unused tensors are reported when the model is
            built, before the job starts.
    """
    if find_spec("transformers") is None:
        hint = install_hint("d9d-loop", "transformers")
        raise ModuleNotFoundError(f"hugging_face_model needs transformers. Install it: {hint}")
    folder = None
    if isinstance(source, str | Path):
        folder = Path(source)
        config = read_config(folder, model_class, config_changes)
        if not from_scratch:
            _check_weights(folder)
    else:
        config = source
        if config_changes:
            raise UserError(
                f"got both a configuration and changes to it ({', '.join(config_changes)}); expected one of them. Set "
                "the values in the configuration."
            )
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            "the model is quantized (config.quantization_config); expected float "
            "weights. Use the unquantized folder, or write one with model.dequantize()."
        )
    return _HuggingFaceModel(
        config,
        _find_class(config, model_class),
        None if from_scratch else folder,
        Accepted(new, unused, new_head=new_head),
        dtype=dtype,
        keep_dtypes=keep_dtypes,
        precision=precision,
        disable_dropout=disable_dropout,
    )


@final
@dataclass(eq=False)
class _HuggingFaceModel(ModelProvider):
    """Provider of a `transformers` model. If `folder` is None, it starts from the model's initialization."""

    late_init = False
    has_foreign_modules = True

    config: Any
    model_class: Any
    folder: Path | None
    accepted: Accepted
    dtype: torch.dtype | None
    keep_dtypes: bool
    precision: Precision | Literal["job"] | None
    disable_dropout: bool
    built_config: JsonValue = None
    mappers: dict[Path, StateMapper] = field(default_factory=dict)
    new_parameters: frozenset[str] = frozenset()
    trace: BlockTrace | None = None

    @property
    def initial_weights(self) -> Path | None:
        return self.folder

    def build(self, stage: StageInfo) -> nn.Module:
        model = self._build_whole() if self.folder is None else self._build_for(self.folder)
        config = deepcopy(model.config)  # of the export
        without_cache(model)
        for module in model.modules() if self.disable_dropout else ():
            for each in (module, getattr(module, "config", module)):
                for name in dropout_names(each):
                    setattr(each, name, 0.0)
        if stage.count > 1:
            self.trace = self.trace or trace_blocks(model)
            self.virtual_layers = self.trace.virtual_layers(self.virtual_layers, stage.count)
            cut_stage(model, self.trace, stage, virtual_layers=self.virtual_layers)
        config.architectures = [type(model).__name__]
        dtype = model.dtype if self._folder_dtypes is None else self._folder_dtypes.main
        config.dtype = str(dtype).removeprefix("torch.")
        self.built_config = with_older_entries(json.loads(config.to_json_string(use_diff=True)))
        for module in model.modules():
            if hasattr(module, "rope_deltas"):
                module.register_forward_hook(_forget_positions, always_call=True)
            if hasattr(module, "rope_type") and (limit := rope_limit(module.config)):
                module.register_forward_pre_hook(partial(_check_lengths, limit=limit), with_kwargs=True)
        mask_packed_rows(model)
        return model.train()

    def first_cost(self, model: nn.Module, inputs: Callable[[], Inputs]) -> float:
        return tower_cost(model, inputs()) if hasattr(model, "get_image_features") else 0.0

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        whole_model = self.trace.model if self.trace else model
        experts = check_experts(whole_model, ctx)
        rows = ctx.mesh_for("batch")["cp"]
        if rows.size() > 1:
            whole = split_rows(model, whole_model, rows)
            if whole and ctx.is_main_process:
                reasons = {re.sub(r"\.\d+", ".*", name): reason for name, reason in whole.items()}
                for name, reason in reasons.items():
                    print(f"d9d: each context-parallel rank computes whole rows in {name}, because {reason}.")
        tensor = ctx.mesh_for("dense")["tp"]
        if tensor.size() > 1:
            # A stage has the plan of the whole model, so that copies of tied parameters are split in the same way.
            plan = tensor_plan(whole_model, tensor.size(), leave=experts)
            if ctx.is_main_process:
                for block, reasons in plan.whole.items():
                    print(f"d9d: mesh.tensor_parallel does not split {block}, because of {', '.join(reasons)}.")
            present = {name for name, module in model.named_modules() if not isinstance(module, Absent)}
            parallelize_tensor(model, tensor, {name: each for name, each in plan.styles.items() if name in present})
        dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
        # Do not cast inputs: blocks get float32 rotary tables, and activations already in the compute dtype.
        precision = ctx.precision if self.precision == "job" else self.precision
        inner = precision and replace(precision, cast_inputs=False)
        # In a pipeline, do not reshard after forward: a stage would gather its parameters for each microbatch.
        reshard = ctx.size("regular", "pp") == 1
        if experts:
            from d9d_moe import parallelize_moe  # noqa: PLC0415 - an extra

            parallelize_moe(model, ctx, precision=inner)
        for block in _gathered_blocks(model):
            parallelize_hsdp(block, dense, shard_axis="dp_cp_shard", precision=inner, reshard_after_forward=reshard)
        parallelize_hsdp(model, dense, shard_axis="dp_cp_shard", precision=precision, reshard_after_forward=reshard)

    def state_mapper(self, model: nn.Module) -> StateMapper:
        from d9d_loop.model._hugging_face_weights import released_mapper  # noqa: PLC0415 - needs an optional extra

        return released_mapper(model).inverse()

    def load_mapper(self, model: nn.Module, folder: Path) -> StateMapper:
        if folder not in self.mappers:
            self._build_for(folder)
        return self.mappers[folder]

    def head_layers(self, model: nn.Module) -> Collection[str]:
        whole: Any = model
        base, output = whole.base_model, whole.get_output_embeddings()
        inside = {id(module) for module in base.modules()}
        return [name for name, module in model.named_modules() if id(module) not in inside or module is output]

    def export_dtype(self, name: str) -> torch.dtype | None:
        return None if self._folder_dtypes is None else self._folder_dtypes.of(name)

    @cached_property
    def _folder_dtypes(self) -> FolderDtypes | None:
        return FolderDtypes.read(self.folder) if self.keep_dtypes and self.folder is not None else None

    def export_files(self) -> Mapping[str, JsonValue]:
        return {"config.json": self.built_config}

    def _build_whole(self) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype or self.config.dtype or before)
        try:
            return self.model_class(deepcopy(self.config))
        finally:
            torch.set_default_dtype(before)

    def _build_for(self, folder: Path) -> Any:
        from d9d_loop.model._hugging_face_weights import build_without_weights  # noqa: PLC0415 - needs an optional extra

        loaded = build_without_weights(
            self.model_class, self.config, folder, dtype=self.dtype or "auto", accepted=self.accepted
        )
        self.mappers[folder] = loaded.mapper
        if folder == self.folder:
            self.new_parameters = loaded.new_parameters
        return loaded.model


def takes_positions(model: ModelProvider) -> bool:
    """Return True if the forward of a `transformers` model takes positions of logits [B, K] as `logits_to_keep`."""
    from transformers import modeling_utils

    has_rows = hasattr(modeling_utils, "slice_logits_to_keep")  # before, all rows had the same positions
    is_own = isinstance(model, _HuggingFaceModel)
    return has_rows and is_own and "logits_to_keep" in signature(model.model_class.forward).parameters


def _forget_positions(module: Any, *_: Any) -> None:
    """Remove positions that a model keeps for generation: they differ between ranks, and training does not use them."""
    if module.training:
        module.rope_deltas = None


def rope_limit(config: Any) -> tuple[str, int] | None:
    """Return the `rope_type` of a decoder whose frequencies follow the longest row, and above which length they do."""
    found = getattr(config, "rope_parameters", None) or {}
    for rope in (found, *(each for each in found.values() if isinstance(each, Mapping))):
        if rope.get("rope_type") == "dynamic":
            return "dynamic", config.max_position_embeddings
        if rope.get("rope_type") == "longrope" and rope["short_factor"] != rope["long_factor"]:
            return "longrope", rope.get("original_max_position_embeddings", config.max_position_embeddings)
    return None


def rope_error(got: str, limit: tuple[str, int]) -> UserError:
    """Return the error about rows [L] whose rotary frequencies would depend on other rows; `got` describes them."""
    kind, length = limit
    remedy = {
        "dynamic": "or choose another rope_type, such as yarn, in rope_parameters",
        "longrope": "or set short_factor in rope_parameters to the long_factor, which all rows use then",
    }[kind]
    return UserError(
        f"{got} with rope_type = {kind}; expected at most {length} positions: above, the frequencies of all rows of a "
        f"batch follow its longest row, so layouts and resumed jobs would differ. Shorten the rows, {remedy}."
    )


def _check_lengths(module: Any, args: tuple[Any, ...], given: dict[str, Any], *, limit: tuple[str, int]) -> None:
    """Raise `UserError` if a row is so long that the rotary frequencies of other rows depend on it."""
    position_ids = given["position_ids"] if "position_ids" in given else args[1]
    if position_ids.shape[-1] > limit[1] and not position_ids.is_meta and (last := int(position_ids.max())) >= limit[1]:
        raise rope_error(f"got a row of {last + 1} positions, with its padding, for {type(module).__name__}", limit)


def read_config(folder: Path, model_class: Any, changes: Mapping[str, Any]) -> Any:
    """Return the configuration of a folder with changes; raise `UserError` if it cannot be used."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} has no config.json; expected a folder written by save_pretrained. Models are not downloaded: "
            "run `hf download NAME --local-dir FOLDER` first."
        )
    config_class = getattr(model_class, "config_class", None) or AutoConfig
    try:
        config, unknown = config_class.from_pretrained(folder, return_unused_kwargs=True, **changes)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be used: {error} Correct or download it again.") from error
    if "is_causal" in unknown:  # configurations do not declare is_causal, but the masks of transformers read it
        config.is_causal = unknown.pop("is_causal")
    check_entries(config, changes)
    if unknown:
        raise UserError(
            f"{type(config).__name__} has no {', '.join(unknown)}; expected keys of {folder / 'config.json'}, or "
            "arguments of hugging_face_model. Correct the names."
        )
    return config


def check_entries(config: Any, changes: Mapping[str, Any]) -> None:
    """Raise `UserError` if changes have an older form of `rope_parameters`, which would lack a part."""
    older = sorted({"rope_scaling", "rope_theta"} & changes.keys())
    if older and hasattr(config, "rope_parameters"):
        raise UserError(
            f"got {older[0]} for {type(config).__name__}, which is the older form of a part of rope_parameters; "
            "expected all of it. Set rope_parameters, with its keys rope_type and rope_theta."
        )


def _check_weights(folder: Path) -> None:
    if not any((folder / name).is_file() for name in _WEIGHTS):
        others = sorted(file.name for file in folder.glob("*.bin"))
        found = f"it has {', '.join(others)}. Convert" if others else "Download the weights, or convert"
        raise UserError(
            f"{folder} has no {' or '.join(_WEIGHTS)}; {found} them with from_pretrained(...).save_pretrained(...), "
            "or set from_scratch=True to start from random values."
        )


def _find_class(config: Any, model_class: Any) -> Any:
    """Return the concrete model class: `model_class`, or the class that an auto class or the configuration selects."""
    import transformers

    if model_class is None:
        names: list[str] = config.architectures or []
        model_class = getattr(transformers, names[0], None) if names else None
        if model_class is None:
            raise UserError(
                f"the configuration names {names[0] if names else 'no class'} in architectures; expected a class of "
                "transformers. Pass the class: hugging_face_model(folder, AutoModelForCausalLM)."
            )
    if not issubclass(model_class, nn.Module):  # an auto class
        with torch.device("meta"):
            return type(model_class.from_config(config))
    return model_class


def _gathered_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules to gather separately: each block, or its parts, that share no parameter with other modules."""
    uses = _num_uses(model)

    def is_whole(module: nn.Module) -> bool:
        own = _num_uses(module) if any(True for _ in module.children()) else Counter()
        return bool(own) and own.items() <= uses.items()

    blocks = [block for block in blocks_of(model) if type(block).__name__ not in _WITHOUT_CALLS]
    parts = [part for block in blocks for part in ([block] if is_whole(block) else block.children())]
    return [part for part in parts if is_whole(part)]


def _num_uses(model: nn.Module) -> Counter[nn.Parameter]:
    """Return the number of names of each parameter; more than 1 for tied parameters and in shared modules."""
    return Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
