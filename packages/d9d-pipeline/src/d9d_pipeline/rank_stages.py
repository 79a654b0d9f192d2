"""Stages of one rank as a single module: the model that optimizers, checkpoints and exports use."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn, final

from torch import Tensor, nn

from d9d_dist import canonical_name


@final
class RankStages(nn.Module):
    """Module that contains a rank's stages, with the parameter and buffer names of the whole model.

    The module has no forward: an `Executor` runs the stages.

    Args:
        stages: The stage modules by global stage index.
        copies: For each stage, the names of its parameters that another stage owns. They are excluded from this
            module's parameters and state dict. See `SharedParameters`.
    """

    def __init__(self, stages: Mapping[int, nn.Module], *, copies: Mapping[int, Collection[str]] | None = None) -> None:
        super().__init__()
        self._copies = {index: frozenset(names) for index, names in (copies or {}).items()}
        for index, stage in stages.items():
            self.add_module(str(index), stage)

    @property
    def stages(self) -> dict[int, nn.Module]:
        """The stage modules by global stage index."""
        return {int(index): stage for index, stage in self.named_children()}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank's stages own, with their names in the whole model."""
        copied = self._copied()
        for stage in self.children():
            for name, parameter in stage.named_parameters(prefix, recurse, remove_duplicate):
                if id(parameter) not in copied:
                    yield name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of this rank's stages, with their names in the whole model."""
        for stage in self.children():
            yield from stage.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the state of this rank's stages under the whole model's names, without copies of shared parameters."""
        copied = self._copied()
        state = {} if destination is None else destination
        for stage in self.children():
            for name, value in stage.state_dict(prefix=prefix, keep_vars=True).items():
                if id(value) not in copied:
                    state[name] = value.detach() if isinstance(value, Tensor) and not keep_vars else value
        return state

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `TypeError`, because one rank's stages are not a whole model."""
        raise TypeError("the stages of one rank are not a whole model; run them with an Executor or a PipelinedModel.")

    def _copied(self) -> set[int]:
        """Return the ids of the parameters that another stage owns; an id matches a parameter under all its names."""
        return {
            id(parameter)
            for index, names in self._copies.items()
            for name, parameter in self.stages[index].named_parameters(remove_duplicate=False)
            if canonical_name(name) in names
        }
