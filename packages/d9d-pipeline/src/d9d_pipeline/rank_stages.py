"""The stages of one rank as one module: what optimizers, checkpoints and exports take for the model."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn, final

from torch import Tensor, nn

from d9d_dist import canonical_name


@final
class RankStages(nn.Module):
    """The stages that a rank holds. Parameters and buffers have the names that they have in the whole model.

    It has no forward: an `Executor` runs stages.

    Attributes:
        stages: The modules by global stage index.

    Args:
        stages: See the attribute.
        copies: For each stage the names of parameters that another stage owns: they are not among this module's. See
            `SharedParameters`.
    """

    def __init__(self, stages: Mapping[int, nn.Module], *, copies: Mapping[int, Collection[str]] | None = None) -> None:
        super().__init__()
        self._copies = {index: frozenset(names) for index, names in (copies or {}).items()}
        for index, stage in stages.items():
            self.add_module(str(index), stage)

    @property
    def stages(self) -> dict[int, nn.Module]:
        """The modules by global stage index."""
        return {int(index): stage for index, stage in self.named_children()}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter that a stage of this rank owns, under its name in the model."""
        copied = self._copied()
        for stage in self.children():
            for name, parameter in stage.named_parameters(prefix, recurse, remove_duplicate):
                if id(parameter) not in copied:
                    yield name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Every buffer of this rank's stages, under its name in the model."""
        for stage in self.children():
            yield from stage.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The state of every stage, under its names in the model, without what other stages own."""
        copied = self._copied()
        state = {} if destination is None else destination
        for stage in self.children():
            for name, value in stage.state_dict(prefix=prefix, keep_vars=True).items():
                if id(value) not in copied:
                    state[name] = value.detach() if isinstance(value, Tensor) and not keep_vars else value
        return state

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """There is none.

        Raises:
            TypeError: Always.
        """
        raise TypeError("the stages of one rank are not a whole model; run them with an Executor or a PipelinedModel.")

    def _copied(self) -> set[int]:
        """Parameters that another stage owns, whatever names they have here."""
        return {
            id(parameter)
            for index, names in self._copies.items()
            for name, parameter in self.stages[index].named_parameters(remove_duplicate=False)
            if canonical_name(name) in names
        }
