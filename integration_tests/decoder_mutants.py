"""Deliberate bugs in the components of decoders; each must make a cell of the oracle fail. See `mutants.py`."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from mutants import Mutant, list_in
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import d9d_dist.context_parallel.all_to_all
import d9d_dist.context_parallel.ring
import d9d_dist.tensor_parallel.styles
import d9d_modules.attention
import d9d_modules.attention_backends.sdpa
import d9d_modules.chunked_cross_entropy
import d9d_modules.models.decoder_tensor_plan
import d9d_modules.pooling
from d9d_dist import SequenceParallel, gather_from_axis
from d9d_dist.context_parallel.all_to_all import AllToAllAttention
from d9d_modules import (
    AttentionOptions,
    CrossEntropy,
    DecayGate,
    DecoderModel,
    GatedDeltaNet,
    Gemma3Params,
    LanguageModelHead,
    Linear,
    ModernBertParams,
    Qwen3Params,
    RMSNorm,
    WholeRows,
)
from d9d_modules.attention_sinks import AttentionSinks, HeadParallel
from d9d_modules.delta_context import DeltaContext
from d9d_pipeline import SharedParameters

DECODER_MUTANTS: list[Mutant] = []
caught_by = list_in(DECODER_MUTANTS)


# --- positions, documents and windows of decoders


def _of_a_decoder(change: Callable[..., None]) -> AbstractContextManager[object]:
    """Change the keyword arguments of a backbone's forward."""
    real = DecoderModel.forward

    def forward(self: DecoderModel, hidden: Tensor, **places: Any) -> Any:
        change(self, places)
        return real(self, hidden, **places)

    return mock.patch.object(DecoderModel, "forward", forward)


@caught_by("llama3,cp_shard=2,rows=packed", is_nightly=True)
def given_position_ids_are_ignored() -> AbstractContextManager[object]:
    return _of_a_decoder(lambda self, places: places.pop("position_ids"))


@caught_by("qwen3,pp=2,rows=packed")
def documents_stay_on_the_first_stage() -> AbstractContextManager[object]:
    return _of_a_decoder(lambda self, places: None if self.stage.is_first else places.pop("document_ids_BL"))


@caught_by("llama3,cp_shard=2,method=ring,rows=packed", is_nightly=True)
def a_ring_takes_documents_of_other_ranks_for_its_own() -> AbstractContextManager[object]:
    def own_everywhere(x: Tensor, mesh: DeviceMesh, *, dim: int, gradient: str) -> Tensor:
        return torch.cat([x] * mesh.size(), dim=dim)

    return mock.patch.object(d9d_dist.context_parallel.ring, "gather_from_axis", own_everywhere)


@caught_by("llama3,cp_shard=2,method=all_to_all,rows=packed", is_nightly=True)
def documents_are_exchanged_in_the_order_of_ranks() -> AbstractContextManager[object]:
    real = d9d_dist.context_parallel.all_to_all.to_natural_order

    def forgetful(x: Tensor, num_ranks: int, dim: int) -> Tensor:
        return x if x.ndim == 2 else real(x, num_ranks, dim=dim)

    return mock.patch.object(d9d_dist.context_parallel.all_to_all, "to_natural_order", forgetful)


def _with_scaling(stage_has_it: Callable[[Any], bool]) -> AbstractContextManager[object]:
    real = DecoderModel.__init__

    def build(self: DecoderModel, params: Any, stage: Any, **options: Any) -> None:
        real(self, params if stage_has_it(stage) else replace(params, rope_scaling=None), stage, **options)

    return mock.patch.object(DecoderModel, "__init__", build)


@caught_by("llama3,pp=2,rope=llama3", is_nightly=True)
def the_second_stage_forgets_the_scaling_of_positions() -> AbstractContextManager[object]:
    return _with_scaling(lambda stage: stage.is_first)


@caught_by("qwen3,cp_shard=2,window=5", is_nightly=True)
def a_window_is_one_too_wide() -> AbstractContextManager[object]:
    real = AttentionOptions.within

    def wider(self: AttentionOptions, key_length: int) -> AttentionOptions:
        return real(self if self.window is None else replace(self, window=self.window + 1), key_length)

    return mock.patch.object(AttentionOptions, "within", wider)


@caught_by("qwen3,pp=2,window=5", is_nightly=True)
def a_window_belongs_to_the_layer_of_the_stage_not_of_the_model() -> AbstractContextManager[object]:
    real = Qwen3Params.mixer
    return mock.patch.object(Qwen3Params, "mixer", lambda self, index: real(self, 0))


# --- parts of families


@caught_by("qwen2,tp=2", is_nightly=True)
def a_projection_drops_its_bias() -> AbstractContextManager[object]:
    return mock.patch.object(Linear, "forward", lambda self, x: F.linear(x, self.weight))


@caught_by("mistral,cp_shard=2", is_nightly=True)
def a_window_ends_at_the_chunk_of_a_rank() -> AbstractContextManager[object]:
    real = d9d_modules.attention_backends.sdpa.visible

    def of_chunk(queries: Tensor, keys: Tensor, options: AttentionOptions, **features: Any) -> Tensor:
        seen = real(queries, keys, options, **features)
        length, key_length = queries.shape[1], keys.shape[1]
        return seen & (torch.arange(key_length, device=seen.device) >= key_length - length)

    return mock.patch.object(d9d_modules.attention_backends.sdpa, "visible", of_chunk)


@caught_by("glm4,pp=2", is_nightly=True)
def interleaved_features_are_rotated_as_halves() -> AbstractContextManager[object]:
    real = d9d_modules.attention.apply_rotary
    return mock.patch.object(
        d9d_modules.attention, "apply_rotary", lambda x, tables, *, layout: real(x, tables, layout="half")
    )


@caught_by("glm4,tp=2", is_nightly=True)
def output_norms_have_the_gradient_of_one_rank() -> AbstractContextManager[object]:
    real = SequenceParallel.has_partial_gradients
    assert real
    return mock.patch.object(SequenceParallel, "has_partial_gradients", False)


@caught_by("gemma3,pp=2", is_nightly=True)
def the_base_of_positions_is_that_of_the_first_layer() -> AbstractContextManager[object]:
    real = Gemma3Params.rope
    return mock.patch.object(Gemma3Params, "rope", lambda self, index: real(self, 0))


@caught_by("gemma3,tp=2", is_nightly=True)
def embeddings_are_scaled_on_every_rank() -> AbstractContextManager[object]:
    real = DecoderModel.scaled
    return mock.patch.object(DecoderModel, "scaled", lambda self, x: real(self, x) * dist.get_world_size())


@caught_by("encoder,cp_shard=2,method=all_to_all", is_nightly=True)
def an_encoder_does_not_see_later_positions() -> AbstractContextManager[object]:
    real = AttentionOptions.within
    return mock.patch.object(AttentionOptions, "within", lambda self, n: replace(real(self, n), is_causal=True))


@caught_by("modernbert,tp=2", is_nightly=True)
def the_transform_of_a_head_has_the_gradient_of_one_rank() -> AbstractContextManager[object]:
    return mock.patch.object(d9d_modules.models.decoder_tensor_plan, "HeadedDecoder", type(None))


@caught_by("modernbert,pp=2,head=tied", is_nightly=True)
def the_bias_of_the_vocabulary_is_lost() -> AbstractContextManager[object]:
    return mock.patch.object(LanguageModelHead, "_with_bias", lambda self, hidden: (hidden, self._weights()))


@caught_by("modernbert,cp_shard=2,method=all_to_all", is_nightly=True)
def an_encoder_has_one_base_of_positions() -> AbstractContextManager[object]:
    real = ModernBertParams.rope
    return mock.patch.object(ModernBertParams, "rope", lambda self, index: real(self, 1))


@caught_by("encoder_classifier,tp=2", is_nightly=True)
def every_rank_counts_the_gradient_of_a_pooled_transform() -> AbstractContextManager[object]:
    return mock.patch.object(WholeRows, "has_partial_gradients", True)


# --- norms and heads


@caught_by("llama3,tp=2", is_nightly=True)
def a_fused_norm_drops_the_residual() -> AbstractContextManager[object]:
    real = RMSNorm.forward

    def forgetful(self: RMSNorm, x: Tensor, residual: Tensor | None = None) -> Any:
        return real(self, x) if residual is None else (real(self, x), x)

    return mock.patch.object(RMSNorm, "forward", forgetful)


@caught_by("sinks,tp=2", is_nightly=True)
def a_zero_centered_weight_is_used_without_adding_one() -> AbstractContextManager[object]:
    real = RMSNorm.forward

    def plain(self: RMSNorm, *args: Tensor) -> Any:
        self.zero_centered = False
        return real(self, *args)

    return mock.patch.object(RMSNorm, "forward", plain)


@caught_by("sinks,tp=2", is_nightly=True)
@contextmanager
def every_rank_has_the_sinks_of_the_first_heads() -> Generator[None]:
    def first(self: AttentionSinks) -> Tensor:
        return self.weight[: len(self.weight) // 2]

    with (
        mock.patch.object(HeadParallel, "placements", return_value={}),
        mock.patch.object(AttentionSinks, "forward", first),
    ):
        yield


@caught_by("sinks,cp_shard=2,method=all_to_all", is_nightly=True)
def exchanged_heads_have_the_sinks_of_the_first() -> AbstractContextManager[object]:
    real = AllToAllAttention._attention_for_local_heads

    def first(self: Any, num_heads: int) -> Any:
        with mock.patch.object(self._mesh, "get_local_rank", return_value=0):
            return real(self, num_heads)

    return mock.patch.object(AllToAllAttention, "_attention_for_local_heads", first)


@caught_by("delta,cp_shard=2")
def chunks_start_with_an_empty_state() -> AbstractContextManager[object]:
    real = DeltaContext.state_before

    def empty(self: DeltaContext, *args: Any, **options: Any) -> Tensor:
        return 0 * real(self, *args, **options)

    return mock.patch.object(DeltaContext, "state_before", empty)


@caught_by("delta,cp_shard=2", is_nightly=True)
def convolutions_restart_in_each_chunk() -> AbstractContextManager[object]:
    real = DeltaContext.extended

    def extended(self: DeltaContext, x_BLF: Tensor) -> Tensor:
        extended_MCF = real(self, x_BLF)
        return torch.cat([0 * extended_MCF[:, : self._num_before], extended_MCF[:, self._num_before :]], dim=1)

    return mock.patch.object(DeltaContext, "extended", extended)


@caught_by("delta,cp_shard=2,rows=packed", is_nightly=True)
def states_pass_from_document_to_document_between_chunks() -> AbstractContextManager[object]:
    return mock.patch.object(DeltaContext, "_continues", return_value=None)


@caught_by("delta,tp=2", is_nightly=True)
@contextmanager
def every_rank_has_the_decay_of_the_first_heads() -> Generator[None]:
    real, placements = DecayGate.forward, HeadParallel.placements

    def first(self: Any, x_BLH: Tensor) -> Tensor:
        whole = torch.cat((x_BLH, torch.zeros_like(x_BLH)), dim=-1)
        return real(self, whole)[..., : x_BLH.shape[-1]]

    def of_others(self: HeadParallel) -> Any:
        return placements(self) if self.names == ("weight",) else {}

    with (
        mock.patch.object(HeadParallel, "placements", of_others),
        mock.patch.object(DecayGate, "forward", first),
    ):
        yield


@caught_by("delta,dp_shard=2,rows=packed", is_nightly=True)
def a_state_is_not_reset_between_documents() -> AbstractContextManager[object]:
    real = GatedDeltaNet.forward
    return mock.patch.object(GatedDeltaNet, "forward", lambda self, x, rotary=None, document_ids_BL=None: real(self, x))


@caught_by("classifier,tp=2,rows=padded", is_nightly=True)
def the_last_position_is_pooled_also_where_it_is_padding() -> AbstractContextManager[object]:
    real = d9d_modules.pooling._token_at

    def last(hidden_BLD: Tensor, index_B: Tensor, is_token_BL: Tensor) -> Tensor:
        return real(hidden_BLD, torch.full_like(index_B, hidden_BLD.shape[1] - 1), is_token_BL)

    return mock.patch.object(d9d_modules.pooling, "_token_at", last)


@caught_by("embedder,tp=2", is_nightly=True)
def every_rank_counts_the_gradient_of_pooled_rows() -> AbstractContextManager[object]:
    def partial(x: Tensor, mesh: Any, *, dim: int, gradient: str) -> Tensor:
        return gather_from_axis(x, mesh, dim=dim, gradient="partial")

    return mock.patch.object(d9d_modules.models.decoder_tensor_plan, "gather_from_axis", partial)


@caught_by("heads,pp=2,head=tied", is_nightly=True)
def a_tied_head_among_others_keeps_its_share_of_the_gradient() -> AbstractContextManager[object]:
    return mock.patch.object(SharedParameters, "add_gradients")


@caught_by("llama3,tp=2,head=tied", is_nightly=True)
def only_the_head_adds_a_gradient_to_a_tied_weight() -> AbstractContextManager[object]:
    real = d9d_dist.tensor_parallel.styles.embed_vocab_shard

    def detached(ids: Tensor, num_rows: int, mesh: DeviceMesh, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        return real(ids, num_rows, mesh, lookup).detach().requires_grad_()

    return mock.patch.object(d9d_dist.tensor_parallel.styles, "embed_vocab_shard", detached)


# --- losses without logits


@caught_by("sinks,dp_shard=2", is_nightly=True)
def the_z_loss_is_counted_on_every_rank() -> AbstractContextManager[object]:
    return _with_loss(lambda loss: replace(loss, z_loss=loss.z_loss * dist.get_world_size()))


@caught_by("latent,tp=2", is_nightly=True)
def labels_are_smoothed_over_the_part_of_a_rank() -> AbstractContextManager[object]:
    vocabulary = d9d_modules.chunked_cross_entropy.VocabularyBlocks
    real = vocabulary.__init__

    def own(self: Any, weights_VD: Any, loss: CrossEntropy, softcap: float | None) -> None:
        real(self, weights_VD, loss, softcap)
        self.size = sum(len(weight) for weight in weights_VD)

    return mock.patch.object(vocabulary, "__init__", own)


def _with_loss(change: Callable[[CrossEntropy], CrossEntropy]) -> AbstractContextManager[object]:
    """Make the chunked loss compute another loss than the head requests."""
    vocabulary = d9d_modules.chunked_cross_entropy.VocabularyBlocks
    real = vocabulary.__init__

    def changed(self: Any, weights_VD: Any, loss: CrossEntropy, softcap: float | None) -> None:
        real(self, weights_VD, change(loss), softcap)

    return mock.patch.object(vocabulary, "__init__", changed)


@caught_by("llama3,dp_replicate=2", is_nightly=True)
@contextmanager
def a_chunked_loss_omits_the_last_block_of_the_vocabulary() -> Generator[None]:
    chunked = d9d_modules.chunked_cross_entropy
    vocabulary = chunked.VocabularyBlocks
    real = vocabulary.blocks

    def without_the_last(self: Any, index: int, **options: Any) -> Any:
        blocks = list(real(self, index, **options))
        return blocks[: max(1, len(blocks) - 1)]

    with (
        mock.patch.object(chunked, "HOST_TILE", chunked.TileSize(logits=512, tokens=1024)),
        mock.patch.object(vocabulary, "blocks", without_the_last),
    ):
        yield
