"""Model providers: how a job's model is built, parallelized, loaded and exported."""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from d9d_dist import DistributedContext, StageInfo, UserError
from d9d_pipeline import Inputs
from d9d_state import JsonValue

if TYPE_CHECKING:
    from d9d_state import StateMapper  # imports DTensor

BuildFunction: TypeAlias = Callable[[StageInfo], nn.Module] | Callable[[], nn.Module]
"""Function that builds a pipeline stage of a model, or the whole model."""


class ModelProvider(ABC):
    """Recipe that builds and parallelizes a model. Subclasses must implement `build`; other methods have defaults.

    Attributes:
        late_init: If True (the default), `build` runs on `meta` and each `reset_parameters` sets the initial values, so
            no rank holds the whole model. If False, `build` runs on the CPU with the job's seed, and training starts
            from the values that it returns.
        is_exported_by_handler: True if a handler of `Finished` exports the model, as that of adapters, and not the job.
        has_foreign_modules: True if the modules are those of another library, by whose names `peft` loads adapters.
        new_parameters: Parameters of the last whole model that the folder of initial weights does not have.
        virtual_layers: Cost of what the first stage computes before its layers, in layers: it gets fewer of them.
    """

    late_init: bool = True
    is_exported_by_handler: bool = False
    has_foreign_modules: bool = False
    new_parameters: frozenset[str] = frozenset()
    virtual_layers: int = 0

    @property
    def initial_weights(self) -> Path | None:
        """Folder of the initial weights if the configuration names none; `None` to use the values of `build`.

        If a folder is set and `late_init` is False, `build` may leave parameters and persistent buffers on `meta`. Each
        rank then reads its shards from the folder.
        """
        return None

    @abstractmethod
    def build(self, stage: StageInfo) -> nn.Module:
        """Build one stage of the model; `stage` has its index and the number of stages.

        With `late_init`, `meta` is the default device, and every module that owns parameters or buffers needs a
        `reset_parameters` method, as torch's layers have. Without `late_init`, `build` may run any code, such as
        loading weights. Pipeline stages then take their values from the whole model, `build(StageInfo())`, by name.
        """

    def first_cost(self, model: nn.Module, inputs: Callable[[], Inputs]) -> float | None:
        """Return the cost of what the first stage computes before its layers, in units of one unsplit layer.

        `inputs` returns those of a microbatch. `virtual_layers` becomes the cost times the number of context-parallel
        and tensor-parallel ranks; the default `None` keeps it.
        """
        return None

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        """Parallelize one stage in place. The default is HSDP over the dense mesh, in the precision of the job.

        If this precision is bfloat16, the default casts floating-point outputs of the stage to float32, for the loss.
        `model` is the stage, on `meta` if the job has several ranks or `late_init` is True.
        """
        from d9d_dist import parallelize_hsdp  # noqa: PLC0415 - imports FSDP and DTensor

        dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
        # In a pipeline, do not reshard after forward: a stage would gather its parameters for each microbatch.
        parallelize_hsdp(
            model,
            dense,
            shard_axis="dp_cp_shard",
            precision=ctx.precision,
            reshard_after_forward=ctx.size("regular", "pp") == 1,
        )
        if ctx.precision is not None:
            model.register_forward_hook(_widen_outputs)

    def state_mapper(self, model: nn.Module) -> "StateMapper | None":
        """Return the mapper from weights on disk to the model's weights; exports use its inverse.

        The default is `None`: the weights have the same names on disk.
        """
        return None

    def load_mapper(self, model: nn.Module, folder: Path) -> "StateMapper | None":
        """Return the mapper from the weights in `folder` to the model's. The default is `state_mapper(model)`."""
        return self.state_mapper(model)

    def head_layers(self, model: nn.Module) -> Collection[str]:
        """Return the names of the modules of the head, which adapters of all linear layers omit; by default none."""
        return ()

    def export_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a floating-point tensor in exported files; `None` (the default) for that of the model."""
        return None

    def export_files(self) -> Mapping[str, JsonValue]:
        """Return JSON files to write next to exported weights, such as `config.json`, by file name."""
        return {}


def _widen_outputs(module: nn.Module, args: Any, outputs: Any) -> Any:
    """Cast floating-point outputs to float32 (forward hook)."""
    return pytree.tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, outputs)


@final
class FunctionProvider(ModelProvider):
    """Provider for a build function; all other methods are the defaults of `ModelProvider`.

    Args:
        build: Function that builds the stage of the model that its argument names. A function without required
            parameters, such as the class of a module, builds a whole model.
        late_init: If True, build on `meta` and set the values with `reset_parameters`. By default the function runs on
            the CPU and its values are kept.
    """

    def __init__(self, build: BuildFunction, *, late_init: bool = False) -> None:
        self._build: Callable[..., Any] = build
        self.late_init = late_init

    def build(self, stage: StageInfo) -> nn.Module:
        """Call the build function. Raise `UserError` if it returns no module, or cannot build a pipeline stage."""
        name = getattr(self._build, "__name__", repr(self._build))
        if not _takes_stage(self._build):
            _check_whole(stage, f"the model function {name} has no parameter for the stage")
            built = self._build()
        else:
            built = self._build(stage)
        if not isinstance(built, nn.Module):
            found = "None (is a return missing?)" if built is None else f"a {type(built).__name__}"
            raise UserError(f"the model function {name} returned {found}; expected an nn.Module. Return the model.")
        return built


@final
class ModuleProvider(ModelProvider):
    """Provider for a module that the user built. Each build is a copy with the module's values."""

    late_init = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def build(self, stage: StageInfo) -> nn.Module:
        """Return a copy of the module. Raise `UserError` for a pipeline stage, or if the module cannot be copied."""
        name = type(self._module).__name__
        _check_whole(stage, f"the model is a {name} that is already built")
        try:
            return copy.deepcopy(self._module)
        except (TypeError, RuntimeError) as error:
            raise UserError(
                f"the model is a {name} that is already built, and cannot be copied: {error}; expected a module that "
                "copy.deepcopy supports. Pass model=lambda stage: ..., a function that builds it."
            ) from error


def model_provider(model: "ModelProvider | nn.Module | BuildFunction") -> ModelProvider:
    """Convert a user's model argument (a provider, a module or a build function) to a provider.

    Raises `UserError` for anything else.
    """
    if isinstance(model, ModelProvider):
        return model
    if isinstance(model, nn.Module):
        return ModuleProvider(model)
    if isinstance(model, type) and issubclass(model, ModelProvider):
        raise UserError(f"got the class {model.__name__} as model; expected an instance. Pass {model.__name__}(...).")
    if not callable(model):
        raise UserError(
            f"got model = {model!r:.60}; expected a module, a function that builds one, or a ModelProvider. Pass "
            "model=lambda stage: MyModel()."
        )
    return FunctionProvider(model)


def _takes_stage(build: Callable[..., Any]) -> bool:
    """Return True if a build function requires an argument or has a parameter `stage`.

    A module's class may have optional parameters, such as a width, which are not a stage.
    """
    try:
        parameters = inspect.signature(build).parameters.values()
    except ValueError:  # a C function without a signature
        return True
    keywords = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    positional = [each for each in parameters if each.kind not in keywords]
    return any(each.default is inspect.Parameter.empty or each.name == "stage" for each in positional)


def _check_whole(stage: StageInfo, why: str) -> None:
    if stage.count > 1:
        raise UserError(
            f"got {stage.count} pipeline stages, but {why}; expected a function that builds one stage of the model. "
            "Pass model=lambda stage: ..., or set mesh.pipeline_parallel to 1."
        )
