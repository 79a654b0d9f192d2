"""Model providers: how a job's model is built, parallelized, loaded and exported."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

from torch import nn

from d9d_dist import DistributedContext, StageInfo, parallelize_hsdp
from d9d_state import JsonValue, StateMapper


class ModelProvider(ABC):
    """Recipe that builds and parallelizes a model. Subclasses must implement `build`; other methods have defaults.

    Attributes:
        late_init: If True (the default), `build` runs on `meta` and each `reset_parameters` sets the initial values, so
            no rank holds the whole model. If False, `build` runs on the CPU with the job's seed, and training starts
            from the values that it returns.
    """

    late_init: bool = True

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

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        """Parallelize one stage in place. The default is HSDP over the dense mesh.

        `model` is the stage, on `meta` if the job has several ranks or `late_init` is True.
        """
        dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
        # A pipeline stage would gather its parameters again for each microbatch.
        parallelize_hsdp(model, dense, shard_axis="dp_cp_shard", reshard_after_forward=ctx.size("regular", "pp") == 1)

    def state_mapper(self, model: nn.Module) -> StateMapper | None:
        """Return the mapper from weights on disk to those of the model; exports use its inverse.

        The default is `None`: the weights have the same names on disk.
        """
        return None

    def load_mapper(self, model: nn.Module, folder: Path) -> StateMapper | None:
        """Return the mapper from the weights in `folder` to the model's. The default is `state_mapper(model)`."""
        return self.state_mapper(model)

    def export_files(self) -> Mapping[str, JsonValue]:
        """Return JSON files to write beside exported weights, such as `config.json`, by file name."""
        return {}


@final
class FunctionProvider(ModelProvider):
    """Provider for a build function; all other methods are the defaults of `ModelProvider`.

    Args:
        build: Builds the stage of the model that its argument names.
        late_init: If True, build on `meta` and set the values with `reset_parameters`. By default the function runs on
            the CPU and its values are kept.
    """

    def __init__(self, build: Callable[[StageInfo], nn.Module], *, late_init: bool = False) -> None:
        self._build = build
        self.late_init = late_init

    def build(self, stage: StageInfo) -> nn.Module:
        """Call the build function."""
        return self._build(stage)
