"""Decoder with the blocks of `d9d_modules` that the dense families do not use, as a user would compose it.

Gated DeltaNet, latent attention, attention with sinks and an output gate; a zero-centered norm; a vocabulary in named
splits, or a head whose loss has all terms over a vocabulary sharded by tensor parallelism. No sequence parallelism.
"""

from torch import Tensor, nn

from d9d_dist import (
    StageInfo,
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
    LanguageModelHead,
    MultiHeadLatentAttention,
    RMSNorm,
    SplitTokenEmbedding,
    SwiGLU,
    TokenEmbedding,
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
            vocabulary_splits = vocabulary if kind == "latent" else splits
            self.lm_head = LanguageModelHead(size, vocabulary_splits, softcap=3.0, token_loss=LOSS, init_std=STD)

    def forward(
        self, hidden: Tensor, *, labels: Tensor, position_ids: Tensor, document_ids_BL: Tensor | None = None
    ) -> Tensor:
        x_BLD = self.backbone(hidden, position_ids=position_ids, document_ids_BL=document_ids_BL)
        return x_BLD if self.lm_head is None else self.lm_head(x_BLD, labels=labels)


def blocks_plan(model: nn.Module) -> dict[str, TensorStyle]:
    """How the model is tensor parallel: hidden states are equal on all ranks between the regions."""
    plan: dict[str, TensorStyle] = {}
    for name, module in model.named_modules():
        match module:
            case GatedDeltaNet() | MultiHeadLatentAttention() | GroupedQueryAttention() | SwiGLU():
                plan |= module.tensor_plan(name)
            case TokenEmbedding():
                plan[name] = VocabParallelEmbedding()
            case LanguageModelHead() if "weight" in module._parameters:
                plan[name] = VocabParallelHead()
    return plan


def _mixer(kind: str, size: int) -> nn.Module:
    match kind:
        case "delta":
            # Chunks of four context-parallel ranks have two positions, which a width of 3 needs.
            return GatedDeltaNet(
                size, num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, conv_width=3, init_std=STD
            )
        case "latent":
            return MultiHeadLatentAttention(
                size, num_heads=4, kv_rank=7, q_rank=6, head_dim=3, rotary_dim=ROTARY_DIM, value_dim=5, init_std=STD
            )
        case _:
            return GroupedQueryAttention(
                size, num_heads=4, num_kv_heads=2, head_dim=ROTARY_DIM, output_gate=True, sinks=True, init_std=STD
            )
