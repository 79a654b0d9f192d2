"""Adapters of a parameter [experts, out, in], in the layout of `peft` for `target_parameters`.

`peft` wraps the module that owns the parameter, with nested wrappers for several parameters. Tensors of the innermost
wrapper are named `<module>.base_layer...lora_A.weight`, those of the outermost `<module>.lora_A.weight`. A is [experts
* rank, in] with the expert as the slow index; B is [out, rank * experts] with the expert as the fast index.

A parameter of the checkpoint may hold the rows of several layers of the model: `gate_up_proj` holds `gate_proj` and
`up_proj`. `peft` has one A for all rows; here each layer has its own A. If the rank in the file equals the rank of each
layer, A is copied to all layers. If it is the sum of the layers' ranks, A is the concatenation of the layers' A, and B
is block-diagonal over layers. `save_adapters` writes the second form.

Shape legend: E experts, O output features, I input features, R rank.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from d9d_dist import UserError, copy_from_full_, full_tensor
from d9d_peft.lora import LoraAdapter
from d9d_peft.low_rank import LowRank
from d9d_peft.peft_layout import PREFIX, A, B


@final
@dataclass(frozen=True, slots=True)
class StoredParameter:
    """Parameter of the base checkpoint with adapters.

    Attributes:
        name: Name in the base checkpoint.
        depth: Number of `peft` wrappers around this parameter's wrapper, one per later parameter of the same module.
        adapters: Adapters of the layers that the parameter holds, in the order of its rows.
    """

    name: str
    depth: int
    adapters: tuple[LoraAdapter, ...]

    @property
    def low_rank(self) -> LowRank:
        """Rank, scale and dropout in the files that `save_adapters` writes."""
        first = self.adapters[0].low_rank
        rank = sum(adapter.low_rank.rank for adapter in self.adapters)
        alpha = first.scaling * (math.sqrt(rank) if first.rank_stabilized else rank)
        return LowRank(rank=rank, alpha=alpha, dropout=first.dropout, rank_stabilized=first.rank_stabilized)

    def stored_low_rank(self, rank: int) -> LowRank:
        """Return the rank and scale that a file with this low rank must have.

        They are those of a single layer if the file shares A between the layers, else `low_rank`.
        """
        return self.adapters[0].low_rank if self._is_shared(rank) else self.low_rank

    def shapes(self, rank: int | None = None) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameter's tensors in a file, by name.

        `rank` is the low rank in the file; `None` is the rank that `save_adapters` writes, `low_rank.rank`.
        """
        rank = self.low_rank.rank if rank is None else self.stored_low_rank(rank).rank
        num_experts, _, num_inputs = self.adapters[0].lora_a.shape
        num_rows = sum(adapter.lora_b.shape[1] for adapter in self.adapters)
        return {self._key(A): (num_experts * rank, num_inputs), self._key(B): (num_rows, rank * num_experts)}

    def tensors(self) -> dict[str, Tensor]:
        """Return the full tensors to write to a file, by name. Collective if parameters are sharded."""
        a_ERI = torch.cat([full_tensor(adapter.lora_a) for adapter in self.adapters], dim=1)
        parts = [full_tensor(adapter.lora_b) for adapter in self.adapters]
        b_EOR = torch.stack([torch.block_diag(*blocks) for blocks in zip(*parts, strict=True)])
        return {self._key(A): a_ERI.flatten(0, 1), self._key(B): b_EOR.permute(1, 2, 0).flatten(1)}

    def check_values(self, read: Callable[[str], Tensor], rank: int) -> None:
        """Raise `UserError` if a file with one A per layer has a B that is not block-diagonal over layers."""
        if self._is_shared(rank):
            return
        b_EOR = self._by_expert(read(self._key(B)))
        for _, rows, ranks in self._parts():
            if torch.count_nonzero(b_EOR[:, rows]) != torch.count_nonzero(b_EOR[:, rows, ranks]):
                raise UserError(
                    f"the adapter of {self.name} of rank {rank} shares its A among the rows of {len(self.adapters)} "
                    f"layers; expected a separate A per layer. Inject the layers with rank = {rank}."
                )

    def fill(self, read: Callable[[str], Tensor]) -> None:
        """Copy the tensors that `read` returns by name to the parameters. No collectives."""
        device = self.adapters[0].lora_a.device
        a_ERI = read(self._key(A)).to(device).unflatten(0, (self.adapters[0].lora_a.shape[0], -1))
        b_EOR = self._by_expert(read(self._key(B)).to(device))
        is_shared = self._is_shared(a_ERI.shape[1])
        for adapter, rows, ranks in self._parts():
            copy_from_full_(adapter.lora_a, a_ERI if is_shared else a_ERI[:, ranks])
            copy_from_full_(adapter.lora_b, b_EOR[:, rows] if is_shared else b_EOR[:, rows, ranks])

    def _is_shared(self, rank: int) -> bool:
        """Return True if a file with this low rank shares one A between all layers."""
        return all(adapter.low_rank.rank == rank for adapter in self.adapters)

    def _parts(self) -> list[tuple[LoraAdapter, slice, slice]]:
        """Return each adapter with its rows of the parameter and its slice of the rank dim."""
        parts: list[tuple[LoraAdapter, slice, slice]] = []
        row = column = 0
        for adapter in self.adapters:
            _, num_rows, rank = adapter.lora_b.shape
            parts.append((adapter, slice(row, row + num_rows), slice(column, column + rank)))
            row, column = row + num_rows, column + rank
        return parts

    def _by_expert(self, b: Tensor) -> Tensor:
        """Reshape B of a file from [O, R * E] to [E, O, R]."""
        return b.unflatten(1, (-1, self.adapters[0].lora_a.shape[0])).permute(2, 0, 1)

    def _key(self, suffix: str) -> str:
        return f"{PREFIX}{self.name.rpartition('.')[0]}{'.base_layer' * self.depth}.{suffix}"


def nested(adapters: Mapping[str, tuple[LoraAdapter, ...]]) -> tuple[StoredParameter, ...]:
    """Return the parameters with adapters, in the nesting of `peft`: the first parameter of a module is the innermost.

    `adapters` are by name in the base checkpoint, in the order of the checkpoint. Raises `UserError` if the layers of a
    parameter have different scales, or two parameters of a module have equal shapes, so that their files are ambiguous.
    """
    parameters: list[StoredParameter] = []
    for name, parts in adapters.items():
        later = list(adapters)[list(adapters).index(name) + 1 :]
        depth = sum(each.rpartition(".")[0] == name.rpartition(".")[0] for each in later)
        parameters.append(StoredParameter(name, depth, parts))
        scales = sorted({adapter.low_rank.scaling for adapter in parts})
        if len(scales) > 1:
            raise UserError(
                f"{name} holds layers whose adapters have the scales {', '.join(f'{s:g}' for s in scales)}; expected "
                "equal scales. Inject these layers with the same rank and alpha."
            )
    seen: dict[tuple[str, tuple[tuple[int, ...], ...]], str] = {}
    for parameter in parameters:
        key = (parameter.name.rpartition(".")[0], tuple(parameter.shapes().values()))
        if key in seen:
            raise UserError(
                f"{seen[key]} and {parameter.name} have adapters of equal shapes, which peft files cannot "
                "distinguish; expected different shapes within a module. Adapt one of them, or save the merged model."
            )
        seen[key] = parameter.name
    return tuple(parameters)
