"""Decoder with the blocks of `d9d_modules` that the dense families do not use, as a user would compose it.

Gated DeltaNet, latent attention, attention with sinks and an output gate; a zero-centered norm; a vocabulary in named
splits, or a head whose loss has all terms over a vocabulary sharded by tensor parallelism. No sequence parallelism.
"""

from torch import Tensor, nn

from d9d_dist import (
    ColumnParallel,
    RowParallel,
    StageInfo,
    TensorRegion,
    TensorStyle,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from d9d_modules import (
    CrossEntropy,
    DecoderLayer,
    DecoderParams,
    GatedDeltaNet,
    GroupedQueryAttention,
    HeadParallel,
    LanguageModelHead,
    MultiHeadLatentAttention,
    RMSNorm,
    SplitLanguageModelHead,
    SplitTokenEmbedding,
    SwiGLU,
    TokenEmbedding,
    gated_delta_tensor_plan,
    rotary_tables,
)

STD = 0.2
LOSS = CrossEntropy(z_loss=0.1, label_smoothing=0.1)
ROTARY_DIM = 4


class BlocksBackbone(nn.Module):
    def __init__(self, params: DecoderParams, stage: StageInfo, *, kind: str) -> None:
        super().__init__()
        size, vocabulary = params.hidden_size, params.vocab_size
        self.stage = stage
        self.embedding = None
        if stage.is_first:
            splits = {"orig": vocabulary - 5, "special": 5}
            self.embedding = (
                TokenEmbedding(vocabulary, size, init_std=STD)
                if kind == "latent"
                else SplitTokenEmbedding(splits, size, init_std=STD)
            )
        self.layers = nn.ModuleDict(
            {
                str(index): DecoderLayer(
                    size,
                    attention=_mixer(kind, size),
                    feed_forward=SwiGLU(size, params.intermediate_size, init_std=STD),
                )
                for index in stage.layers(params.num_layers)
            }
        )
        self.norm = RMSNorm(size, zero_centered=True) if stage.is_last else None

    def forward(self, hidden: Tensor, *, position_ids: Tensor, document_ids_BL: Tensor | None) -> Tensor:
        x_BLD = hidden if self.embedding is None else self.embedding(hidden)
        rotary = rotary_tables(position_ids, head_dim=ROTARY_DIM, theta=100.0)
        for layer in self.layers.values():
            x_BLD = layer(x_BLD, rotary, document_ids_BL=document_ids_BL)
        return x_BLD if self.norm is None else self.norm(x_BLD)


class BlocksModel(nn.Module):
    def __init__(self, params: DecoderParams, stage: StageInfo, *, kind: str) -> None:
        super().__init__()
        self.backbone = BlocksBackbone(params, stage, kind=kind)
        self.lm_head = None
        if stage.is_last:
            size, vocabulary = params.hidden_size, params.vocab_size
            splits = {"orig": vocabulary - 5, "special": 5}
            self.lm_head = (
                LanguageModelHead(size, vocabulary, softcap=3.0, token_loss=LOSS, init_std=STD)
                if kind == "latent"
                else SplitLanguageModelHead(size, splits, softcap=3.0, loss=LOSS, init_std=STD)
            )

    def forward(
        self, hidden: Tensor, *, labels: Tensor, position_ids: Tensor, document_ids_BL: Tensor | None = None
    ) -> Tensor:
        x_BLD = self.backbone(hidden, position_ids=position_ids, document_ids_BL=document_ids_BL)
        return x_BLD if self.lm_head is None else self.lm_head(x_BLD, labels=labels)


def blocks_plan(kind: str) -> dict[str, TensorStyle]:
    """Return the tensor-parallel plan: hidden states are replicated between the regions."""
    mixer, feed_forward = "backbone.layers.*.attention", "backbone.layers.*.feed_forward"
    plan: dict[str, TensorStyle] = {
        feed_forward: TensorRegion(),
        f"{feed_forward}.gate_proj": ColumnParallel(input=None),
        f"{feed_forward}.up_proj": ColumnParallel(input=None),
        f"{feed_forward}.down_proj": RowParallel(),
    }
    heads = ColumnParallel(input=None, head_dim=ROTARY_DIM)
    match kind:
        case "delta":
            return {**plan, **gated_delta_tensor_plan(mixer, key_dim=3, value_dim=5)}
        case "latent":
            return {
                **plan,
                mixer: TensorRegion(),
                f"{mixer}.q_up_proj": ColumnParallel(input=None, head_dim=3 + ROTARY_DIM),
                f"{mixer}.kv_up_proj": ColumnParallel(input=None, head_dim=3 + 5),
                f"{mixer}.o_proj": RowParallel(),
                "backbone.embedding": VocabParallelEmbedding(),
                "lm_head": VocabParallelHead(),
            }
        case _:
            return {
                **plan,
                mixer: TensorRegion(),
                **{f"{mixer}.{name}_proj": heads for name in ("q", "k", "v", "gate")},
                f"{mixer}.sinks": HeadParallel(),
                f"{mixer}.o_proj": RowParallel(),
            }


def _mixer(kind: str, size: int) -> nn.Module:
    match kind:
        case "delta":
            return GatedDeltaNet(size, num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, init_std=STD)
        case "latent":
            return MultiHeadLatentAttention(
                size, num_heads=4, kv_rank=7, q_rank=6, head_dim=3, rotary_dim=ROTARY_DIM, value_dim=5, init_std=STD
            )
        case _:
            return GroupedQueryAttention(
                size, num_heads=4, num_kv_heads=2, head_dim=ROTARY_DIM, output_gate=True, sinks=True, init_std=STD
            )
