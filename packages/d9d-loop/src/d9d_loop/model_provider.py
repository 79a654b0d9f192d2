"""Where a job's model comes from: how it is built, parallelised, loaded and exported."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import final

from torch import nn

from d9d_dist import DistributedContext, StageInfo, parallelize_hsdp
from d9d_state import JsonValue, StateMapper


class ModelProvider(ABC):
    """Builds a model and says how it is split. Only `build` has no default."""

    @abstractmethod
    def build(self, stage: StageInfo) -> nn.Module:
        """Build one stage of the model. It is called with `meta` as the default device: nothing is allocated.

        Every module that owns parameters or buffers has `reset_parameters`; torch's own layers have.
        """

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        """Split the model over ranks, in place, still on `meta`. By default, hybrid sharding over the dense mesh."""
        dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
        parallelize_hsdp(model, dense, shard_axis="dp_cp_shard")

    def state_mapper(self, model: nn.Module) -> StateMapper | None:
        """How weights on disk become the model's; exports use its inverse. By default, they have the same names."""
        return None

    def export_files(self) -> Mapping[str, JsonValue]:
        """JSON files that belong beside exported weights, such as `config.json`."""
        return {}


@final
class FunctionProvider(ModelProvider):
    """A model given by the function that builds a stage, with all defaults."""

    def __init__(self, build: Callable[[StageInfo], nn.Module]) -> None:
        self._build = build

    def build(self, stage: StageInfo) -> nn.Module:
        """Call the function."""
        return self._build(stage)
