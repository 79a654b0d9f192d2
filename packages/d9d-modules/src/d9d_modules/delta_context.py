"""Context parallelism of the gated delta rule: ranks exchange states and a few positions, never whole sequences.

`ContextSplit` gives each of R ranks two of the 2R chunks of a row. The state after a chunk is a linear function of the
state before it, S' = A S + B. Each rank computes A and B of its chunks and all-gathers them. It then computes the
states before its chunks by a loop over the chunks of the row. The data sent does not depend on the sequence length.

Shape legend: B batch, L this rank's length, C = L / 2 chunk size, N = 2R chunks of a row, F features, H value heads,
K key dim, V value dim. M = 2B: both chunks of this rank as rows of a batch, first all first chunks.
"""

from typing import final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist import ContextSplit, UserError
from d9d_modules.delta_rule import DeltaRuleBackend, gated_delta_rule


@final
class DeltaContext:
    """Both chunks of a rank, with the positions and the state before each of them.

    Args:
        mesh: Mesh of one axis, over which rows are split by `ContextSplit`.
        shape: B and L.
        document_ids_BL: Document ids of this rank's positions; None: each row is one document.
        num_before: Number of positions before each chunk that `extended` adds.

    Raises:
        UserError: If L is odd, or a chunk is shorter than `num_before`.
    """

    def __init__(
        self, mesh: DeviceMesh, shape: tuple[int, int], document_ids_BL: Tensor | None, *, num_before: int
    ) -> None:
        size = shape[1] // 2
        if size < num_before or shape[1] % 2:
            raise UserError(
                f"got {shape[1]} positions of a row; expected two chunks of at least {num_before} positions, which the "
                "convolution of the next chunk needs. Use longer rows, or fewer context-parallel ranks."
            )
        self._split = ContextSplit(mesh)
        self._num_chunks = 2 * mesh.size()
        self._chunks = (mesh.get_local_rank(), self._num_chunks - 1 - mesh.get_local_rank())
        self._num_before = num_before
        self.document_ids_MC = None if document_ids_BL is None else self.chunked(document_ids_BL)
        self.extended_ids = None if document_ids_BL is None else self._extended_ids(document_ids_BL)

    def chunked(self, x_BL: Tensor) -> Tensor:
        """Convert [B, L, ...] to [M, C, ...]."""
        return torch.cat(x_BL.chunk(2, dim=1))

    def joined(self, x_MC: Tensor) -> Tensor:
        """Convert [M, C, ...] to [B, L, ...]; the inverse of `chunked`."""
        return torch.cat(x_MC.chunk(2), dim=1)

    def extended(self, x_BLF: Tensor) -> Tensor:
        """Convert [B, L, F] to chunks with the positions before them [M, num_before + C, F]; one all-gather.

        Before the first chunk of a row there are zeros. In backward, gradients are reduce-scattered.
        """
        if self._num_before == 0:
            return self.chunked(x_BLF)
        ends = torch.cat([half[:, -self._num_before :] for half in x_BLF.chunk(2, dim=1)], dim=1)
        by_chunk = self._split.join(ends, gradient="partial").unflatten(1, (self._num_chunks, -1))
        before = [by_chunk[:, index - 1] * (index > 0) for index in self._chunks]
        return torch.cat([torch.cat(before), self.chunked(x_BLF)], dim=1)

    def state_before(
        self,
        k_MCGK: Tensor,
        v_MCHV: Tensor,
        *,
        log_decay_MCH: Tensor,
        beta_MCH: Tensor,
        backend: DeltaRuleBackend | None,
    ) -> Tensor:
        """Compute the state before each chunk of this rank [M, H, K, V], float32 or float64.

        Issues one all-gather, and a second one for packed documents.

        The state is zero if the chunk starts a document. A is the state after a chunk whose values are zero and whose
        initial state is the identity. One call of the rule computes both B and A: zeros are appended to the values as
        further features, and the identity to the initial state.
        """
        (key_dim, value_dim), num_heads = (k_MCGK.shape[-1], v_MCHV.shape[-1]), v_MCHV.shape[2]
        wide_MCHW = torch.cat([v_MCHV, v_MCHV.new_zeros(*v_MCHV.shape[:3], key_dim)], dim=-1)
        dtype = torch.promote_types(v_MCHV.dtype, torch.float32)
        identity = torch.eye(key_dim, dtype=dtype, device=v_MCHV.device)
        initial = torch.cat([identity.new_zeros(key_dim, value_dim), identity], dim=1)
        _, after_MHKW = gated_delta_rule(
            k_MCGK,
            k_MCGK,
            wide_MCHW,
            log_decay_BLH=log_decay_MCH,
            beta_BLH=beta_MCH,
            document_ids_BL=self.document_ids_MC,
            initial_state_BHKV=initial.expand(len(v_MCHV), num_heads, -1, -1).contiguous(),
            backend=backend,
        )
        after_BNHKW = self._split.join(torch.stack(after_MHKW.chunk(2), dim=1), gradient="partial")
        continues_BN = self._continues()
        state = torch.zeros_like(after_BNHKW[:, 0, ..., :value_dim])
        states = {0: state}
        for index in range(max(self._chunks)):
            added, transition = after_BNHKW[:, index].split([value_dim, key_dim], dim=-1)
            state = transition @ state + added
            if continues_BN is not None:
                state = state * continues_BN[:, index + 1, None, None, None]
            states[index + 1] = state
        return torch.cat([states[index] for index in self._chunks])

    def _extended_ids(self, document_ids_BL: Tensor) -> Tensor:
        """Return the ids of the extended chunks; before the first chunk of a row, the id of its first position."""
        extended = self.extended(document_ids_BL)
        if 0 in self._chunks:
            extended[: len(document_ids_BL), : self._num_before] = document_ids_BL[:, :1]
        return extended

    def _continues(self) -> Tensor | None:
        """Return a mask [B, N]: True if the first document of a chunk started in an earlier chunk; one all-gather."""
        if self.document_ids_MC is None:
            return None
        ends = torch.cat([ids[:, [0, -1]] for ids in self.document_ids_MC.chunk(2)], dim=1)
        first, last = self._split.join(ends).unflatten(1, (self._num_chunks, 2)).unbind(dim=-1)
        return torch.cat([torch.zeros_like(first[:, :1], dtype=torch.bool), first[:, 1:] == last[:, :-1]], dim=1)
