"""Define where a job's model comes from: how it is built, parallelized, loaded and exported."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

from torch import nn

from d9d_dist import DistributedContext, StageInfo, parallelize_hsdp
from d9d_state import JsonValue, StateMapper


class ModelProvider(ABC):
    """Builds a model and says how it is split. Only `build` has no default.

    Attributes:
        late_init: If true, the default of a provider, `build` runs on `meta`: no rank ever holds the whole model, and
            each `reset_parameters` draws the initial values. If false, `build` runs on the CPU under the job's seed,
            and the model is trained from the values that it was built with.
    """

    late_init: bool = True

    @property
    def initial_weights(self) -> Path | None:
        """Folder of the weights to begin with where a configuration names none; None for those of `build`.

        If it is set and `late_init` is false, `build` may leave parameters and persistent buffers on `meta`. They are
        read from the folder, each rank its own part.
        """
        return None

    @abstractmethod
    def build(self, stage: StageInfo) -> nn.Module:
        """Build one stage of the model.

        With `late_init` it is called with `meta` as the default device, and every module that owns parameters or
        buffers needs `reset_parameters`; torch's own layers have it. Without `late_init` it may do whatever a plain
        function does, such as loading weights. A pipeline's stages take their values from the whole model,
        `build(StageInfo())`, by name.
        """

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        """Split the model over ranks, in place; on several ranks it is on `meta`. Default: HSDP over the dense mesh."""
        dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
        parallelize_hsdp(model, dense, shard_axis="dp_cp_shard")

    def state_mapper(self, model: nn.Module) -> StateMapper | None:
        """How weights on disk become the model's; exports use its inverse. By default, they have the same names."""
        return None

    def load_mapper(self, model: nn.Module, folder: Path) -> StateMapper | None:
        """How the weights in a folder become the model's. By default, what `state_mapper` says of every folder."""
        return self.state_mapper(model)

    def export_files(self) -> Mapping[str, JsonValue]:
        """JSON files that belong beside exported weights, such as `config.json`."""
        return {}


@final
class FunctionProvider(ModelProvider):
    """A model given by the function that builds it, with all defaults.

    Args:
        build: Builds the model, or the stage of it that it is called with.
        late_init: Whether to build on `meta` and to draw the values by `reset_parameters`. By default the function
            runs on the CPU, and its values are kept.
    """

    def __init__(self, build: Callable[[StageInfo], nn.Module], *, late_init: bool = False) -> None:
        self._build = build
        self.late_init = late_init

    def build(self, stage: StageInfo) -> nn.Module:
        """Call the function."""
        return self._build(stage)
