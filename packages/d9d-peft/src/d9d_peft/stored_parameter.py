"""Adapters of a parameter [experts, out, in], as `peft` keeps those that `target_parameters` asks for.

`peft` wraps the module that owns the parameter, one wrapper around another for several parameters: the tensors of the
innermost are `<module>.base_layer...lora_A.weight`, those of the outermost `<module>.lora_A.weight`. A is
[experts * rank, in], one expert after the other; B is [out, rank * experts], all experts of a rank side by side.

A parameter may hold the rows of several layers here, as `gate_up_proj` holds those of `gate_proj` and `up_proj`. `peft`
has one A for all rows; each layer here has its own. A file of the layers' common rank is read as one A that is copied;
a file of the sum of their ranks as an A of all layers, and a B without elements across layers. The latter is written.

Shape legend: E experts, O output features, I input features, R rank.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_peft._sharded import fill, whole
from d9d_peft.lora import LoraAdapter
from d9d_peft.low_rank import LowRank
from d9d_peft.peft_layout import PREFIX, A, B


@final
@dataclass(frozen=True, slots=True)
class StoredParameter:
    """A parameter of the base checkpoint with adapters.

    Attributes:
        name: Its name in the base checkpoint.
        depth: Number of wrappers of `peft` around its own, for other parameters of the same module.
        adapters: The adapters of the layers that it holds, in the order of its rows.
    """

    name: str
    depth: int
    adapters: tuple[LoraAdapter, ...]

    @property
    def low_rank(self) -> LowRank:
        """Rank and scale in the files that `save_adapters` writes."""
        first = self.adapters[0].low_rank
        rank = sum(adapter.low_rank.rank for adapter in self.adapters)
        alpha = first.scaling * (math.sqrt(rank) if first.rank_stabilized else rank)
        return LowRank(rank=rank, alpha=alpha, dropout=first.dropout, rank_stabilized=first.rank_stabilized)

    def stored_low_rank(self, rank: int) -> LowRank:
        """Rank and scale in files of some rank, if they can be read, else those that `save_adapters` writes."""
        return self.adapters[0].low_rank if self._is_shared(rank) else self.low_rank

    def check(self) -> None:
        """Refuse layers that one parameter cannot hold.

        Raises:
            UserError: If their scales differ.
        """
        scales = {adapter.low_rank.scaling for adapter in self.adapters}
        if len(scales) > 1:
            raise UserError(
                f"{self.name} holds layers whose adapters have the scales {', '.join(f'{s:g}' for s in sorted(scales))}"
                "; expected one. Inject them with one rank and alpha."
            )

    def shapes(self, rank: int | None = None) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors in files of some rank; `None` for that which `save_adapters` writes."""
        rank = self.low_rank.rank if rank is None else self.stored_low_rank(rank).rank
        num_experts, _, num_inputs = self.adapters[0].lora_a.shape
        num_rows = sum(adapter.lora_b.shape[1] for adapter in self.adapters)
        return {self._key(A): (num_experts * rank, num_inputs), self._key(B): (num_rows, rank * num_experts)}

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors for a file, whole. Collective where parameters are sharded."""
        a_ERI = torch.cat([whole(adapter.lora_a) for adapter in self.adapters], dim=1)
        parts = [whole(adapter.lora_b) for adapter in self.adapters]
        b_EOR = torch.stack([torch.block_diag(*blocks) for blocks in zip(*parts, strict=True)])
        return {self._key(A): a_ERI.flatten(0, 1), self._key(B): b_EOR.permute(1, 2, 0).flatten(1)}

    def check_values(self, read: Callable[[str], Tensor], rank: int) -> None:
        """Refuse tensors of a file that the layers cannot hold, although their shapes fit.

        Raises:
            UserError: If B has elements across layers.
        """
        if self._is_shared(rank):
            return
        b_EOR = self._by_expert(read(self._key(B)))
        for _, rows, ranks in self._parts():
            if torch.count_nonzero(b_EOR[:, rows]) != torch.count_nonzero(b_EOR[:, rows, ranks]):
                raise UserError(
                    f"the adapter of {self.name} of rank {rank} shares its A among all rows, of {len(self.adapters)} "
                    f"layers here; expected one A for each. Inject the layers with rank = {rank}."
                )

    def fill(self, read: Callable[[str], Tensor]) -> None:
        """Set the parameters from tensors of a file. Local.

        Args:
            read: Returns a tensor by its name in the file.
        """
        device = self.adapters[0].lora_a.device
        a_ERI = read(self._key(A)).to(device).unflatten(0, (self.adapters[0].lora_a.shape[0], -1))
        b_EOR = self._by_expert(read(self._key(B)).to(device))
        is_shared = self._is_shared(a_ERI.shape[1])
        for adapter, rows, ranks in self._parts():
            fill(adapter.lora_a, a_ERI if is_shared else a_ERI[:, ranks])
            fill(adapter.lora_b, b_EOR[:, rows] if is_shared else b_EOR[:, rows, ranks])

    def _is_shared(self, rank: int) -> bool:
        """True if files of a rank have one A for all layers."""
        return all(adapter.low_rank.rank == rank for adapter in self.adapters)

    def _parts(self) -> list[tuple[LoraAdapter, slice, slice]]:
        """Each adapter with its rows of the parameter and its part of the rank."""
        parts: list[tuple[LoraAdapter, slice, slice]] = []
        row = column = 0
        for adapter in self.adapters:
            _, num_rows, rank = adapter.lora_b.shape
            parts.append((adapter, slice(row, row + num_rows), slice(column, column + rank)))
            row, column = row + num_rows, column + rank
        return parts

    def _by_expert(self, b: Tensor) -> Tensor:
        """B [O, R * E] of a file as [E, O, R]."""
        return b.unflatten(1, (-1, self.adapters[0].lora_a.shape[0])).permute(2, 0, 1)

    def _key(self, suffix: str) -> str:
        return f"{PREFIX}{self.name.rpartition('.')[0]}{'.base_layer' * self.depth}.{suffix}"


def nested(adapters: Mapping[str, tuple[LoraAdapter, ...]]) -> tuple[StoredParameter, ...]:
    """The parameters with adapters, nested as `peft` nests those of one module: the first is the innermost.

    Args:
        adapters: The adapters of each parameter, by its name in the base checkpoint, in the order of the checkpoint.

    Raises:
        UserError: If two parameters of a module have tensors of equal shapes, so that only their order tells them
            apart, which is not in the files.
    """
    parameters: list[StoredParameter] = []
    for name, parts in adapters.items():
        later = list(adapters)[list(adapters).index(name) + 1 :]
        depth = sum(each.rpartition(".")[0] == name.rpartition(".")[0] for each in later)
        parameters.append(StoredParameter(name, depth, parts))
        parameters[-1].check()
    seen: dict[tuple[str, tuple[tuple[int, ...], ...]], str] = {}
    for parameter in parameters:
        key = (parameter.name.rpartition(".")[0], tuple(parameter.shapes().values()))
        if key in seen:
            raise UserError(
                f"{seen[key]} and {parameter.name} have adapters of equal shapes; in the files of peft only the "
                "order of a module's parameters tells them apart. Adapt one of them, or save the merged model."
            )
        seen[key] = parameter.name
    return tuple(parameters)
