"""ModernBERT (arXiv:2412.13663): an encoder with local and global layers, GeGLU and layer norms, without causality."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, final

from torch import nn

from d9d_dist.errors import UserError
from d9d_modules.lm_head import LanguageModelHead
from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.decoder_hugging_face import decoder_layer_from_hugging_face, norm_names
from d9d_modules.models.grouped_query import AttentionForm
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, layers_of_kind, written_layer_types
from d9d_modules.models.local_global import LocalGlobalParams, read_global_rope, read_local_theta, written_ropes
from d9d_modules.norm import LayerNorm
from d9d_modules.pooling import Pooling
from d9d_modules.sequence_heads import HeadTransform
from d9d_modules.swiglu import GeGLU
from d9d_state import JsonValue, StateMapper, parallel, rename_all, scope, split


@final
@dataclass(frozen=True, kw_only=True)
class ModernBertParams(LocalGlobalParams):
    """Hyperparameters of a ModernBERT model; see `LocalGlobalParams`.

    `DecoderForCausalLM` is then a masked language model: labels are the original tokens of the masked positions.

    Attributes:
        attention_bias: If True, all projections of the attention have biases.
        feed_forward_bias: If True, all projections of the feed-forward blocks have biases.
        norm_bias: If True, the layer norms have biases.
        lm_head_bias: If True, the logits of the language-model head have a bias.
        transform_bias: If True, the dense layer before each head has a bias; see `HeadTransform`.
        classifier_pooling: Default pooling of heads: the first token, or the mean.
    """

    hugging_face_norms: ClassVar[Mapping[str, str]] = {"attn_norm": "attention_norm", "mlp_norm": "feed_forward_norm"}
    score_bias: ClassVar[bool] = True

    attention_bias: bool = False
    feed_forward_bias: bool = False
    norm_bias: bool = False
    lm_head_bias: bool = True
    transform_bias: bool = False
    classifier_pooling: Literal["cls", "mean"] = "cls"
    tie_word_embeddings: bool = True
    rope_theta: float = 160_000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192

    @property
    def attention_form(self) -> AttentionForm:
        """See `GroupedQueryParams`."""
        return AttentionForm(qkv_bias=self.attention_bias, output_bias=self.attention_bias, is_causal=False)

    @property
    def pooling(self) -> Pooling:
        """See `DecoderParams`."""
        return "first" if self.classifier_pooling == "cls" else "mean"

    def norm(self) -> LayerNorm:
        """See `DecoderParams`."""
        return LayerNorm(self.hidden_size, eps=self.rms_norm_eps, bias=self.norm_bias)

    def embedding_norm(self) -> LayerNorm:
        """See `DecoderParams`."""
        return self.norm()

    def has_attention_norm(self, index: int) -> bool:
        """See `DecoderParams`; the first layer has none, because the embeddings are already normalized."""
        return index > 0

    def feed_forward(self, index: int) -> nn.Module:
        """See `DecoderParams`."""
        sizes, bias = (self.hidden_size, self.intermediate_size), self.feed_forward_bias
        return GeGLU(*sizes, approximate="none", bias=bias, init_std=self.initializer_range)

    def lm_head(self) -> LanguageModelHead:
        """See `DecoderParams`."""
        std = self.initializer_range
        return LanguageModelHead(self.hidden_size, self.vocab_size, bias=self.lm_head_bias, init_std=std)

    def head_transform(self) -> HeadTransform:
        """See `DecoderParams`."""
        std = self.initializer_range
        return HeadTransform(self.hidden_size, norm=self.norm(), bias=self.transform_bias, init_std=std)

    def mixer_from_hugging_face(self, index: int) -> StateMapper:
        """See `DecoderParams`; queries, keys and values are one fused matrix."""
        projections = [f"attention.{name}_proj" for name in "qkv"]
        rows = [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        names = ["weight", "bias"] if self.attention_bias else ["weight"]
        return parallel(
            *(split(f"attn.Wqkv.{name}", [f"{each}.{name}" for each in projections], rows, dim=0) for name in names),
            rename_all({f"attn.Wo.{name}": f"attention.o_proj.{name}" for name in names}),
        )

    def feed_forward_from_hugging_face(self, index: int) -> StateMapper:
        """See `DecoderParams`; gate and up projection are one fused matrix."""
        rows, names = [self.intermediate_size] * 2, ["weight", "bias"] if self.feed_forward_bias else ["weight"]
        return parallel(
            *(split(f"Wi.{name}", [f"gate_proj.{name}", f"up_proj.{name}"], rows, dim=0) for name in names),
            rename_all({f"Wo.{name}": f"down_proj.{name}" for name in names}),
        )


def modernbert_from_hugging_face(params: ModernBertParams) -> StateMapper:
    """Build the mapper from a `ModernBertForMaskedLM` checkpoint to `DecoderForCausalLM`; its `inverse()` exports."""
    ends = {
        "model.embeddings.tok_embeddings.weight": "backbone.embedding.weight",
        **norm_names(params, "model.embeddings.norm", "backbone.embedding_norm"),
        **norm_names(params, "model.final_norm", "backbone.norm"),
        **_transform(params, "transform"),
        **({} if params.tie_word_embeddings else {"decoder.weight": "lm_head.weight"}),
        **({"decoder.bias": "lm_head.bias"} if params.lm_head_bias else {}),
    }
    layers = (
        scope(f"model.layers.{index}.", f"backbone.layers.{index}.", decoder_layer_from_hugging_face(params, index))
        for index in range(params.num_layers)
    )
    return parallel(rename_all(ends), *layers)


def _transform(params: ModernBertParams, name: str) -> dict[str, str]:
    names = ["weight", "bias"] if params.transform_bias else ["weight"]
    dense = {f"head.dense.{each}": f"{name}.dense.{each}" for each in names}
    return {**dense, **norm_names(params, "head.norm", f"{name}.norm")}


def _classifier(params: ModernBertParams) -> dict[str, str]:
    score = {f"classifier.{each}": f"head.score.{each}" for each in ("weight", "bias")}
    return {**_transform(params, "head.transform"), **score}


def _check(config: HuggingFaceConfig) -> None:
    for key in ("rope_scaling", "rope_theta"):
        if config.get(key) is not None:
            raise UserError(
                f"config.json has {key} = {config[key]!r} for no kind of layer; expected no such entry. Write it into "
                "the entry full_attention or sliding_attention of rope_parameters."
            )
    pooling = config.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise UserError(f"config.json has classifier_pooling = {pooling!r}; expected 'cls' or 'mean'.")


def _read_own(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    num_layers, num_heads = values["num_layers"], values["num_heads"]
    if values["hidden_size"] % (2 * num_heads):
        raise UserError(
            f"config.json has hidden_size = {values['hidden_size']}, num_attention_heads = {num_heads}; expected an "
            "even number of features per head, since RoPE rotates pairs."
        )
    step = config_value(config, "global_attn_every_n_layers", int, default=3)
    layers = layers_of_kind(config, num_layers, "sliding_attention", default=lambda index: index % step > 0)
    read: dict[str, Any] = {
        "num_kv_heads": num_heads,
        "head_dim": values["hidden_size"] // num_heads,
        "sliding_rope_theta": read_local_theta(config, key="local_rope_theta"),
        "classifier_pooling": config.get("classifier_pooling", "cls"),
    }
    if layers:
        window = config_value(config, "local_attention", int, default=128)
        read |= {"sliding_window": window // 2 + 1, "sliding_layers": layers}
    return read


def _written_own(params: ModernBertParams) -> Mapping[str, JsonValue]:
    return {
        "layer_types": written_layer_types(params),
        # transformers requires the entry even if no layer has a window.
        "local_attention": 128 if params.sliding_window is None else 2 * (params.sliding_window - 1),
        "classifier_pooling": params.classifier_pooling,
    }


def _written_rope(params: ModernBertParams, *, rotary_factor: float | None) -> Mapping[str, JsonValue]:
    written = written_ropes(params, rotary_factor=rotary_factor)
    thetas: dict[str, JsonValue] = {
        "global_rope_theta": written["rope_theta"],
        "local_rope_theta": params.sliding_rope_theta,
    }
    return {"rope_parameters": written["rope_parameters"], **thetas}


_DECODER_ENTRIES = hf.with_defaults(hf.DECODER_ENTRIES, tie_word_embeddings=True, max_position_embeddings=8192)

MODERNBERT = hf.HuggingFaceFamily(
    params=ModernBertParams,
    architecture="ModernBertForMaskedLM",
    model_type="modernbert",
    entries=(
        *(each for each in _DECODER_ENTRIES if each.field != "rms_norm_eps"),
        hf.Entry("rms_norm_eps", "norm_eps", float, 1e-5),
        hf.Entry("attention_bias", "attention_bias", bool, default=False),
        hf.Entry("feed_forward_bias", "mlp_bias", bool, default=False),
        hf.Entry("norm_bias", "norm_bias", bool, default=False),
        hf.Entry("lm_head_bias", "decoder_bias", bool, default=True),
        hf.Entry("transform_bias", "classifier_bias", bool, default=False),
    ),
    fixed={
        "attention_dropout": 0.0,
        "classifier_activation": "gelu",
        "embedding_dropout": 0.0,
        "hidden_activation": "gelu",
        "mlp_dropout": 0.0,
    },
    own=(
        "classifier_pooling",
        "global_attn_every_n_layers",
        "global_rope_theta",
        "layer_types",
        "local_attention",
        "local_rope_theta",
    ),
    check=_check,
    read_rope=partial(read_global_rope, key="global_rope_theta", default=160_000.0),
    write_rope=_written_rope,
    read_own=_read_own,
    write_own=_written_own,
    irrelevant={
        "position_embedding_type": "all versions of transformers use RoPE",
        "gradient_checkpointing": "an argument of parallelize_decoder",
        "initializer_cutoff_factor": "weights are loaded, or drawn from a normal distribution without a cut-off",
        "layer_norm_eps": "norm_eps is the epsilon of all norms",
    },
    unused=("decoder.*", "head.*"),
    mapper=modernbert_from_hugging_face,
    classifier=_classifier,
)
"""Checkpoints of ModernBERT."""
