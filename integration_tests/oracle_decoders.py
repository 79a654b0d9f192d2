"""Grid of the oracle for `d9d_modules`: the dense families, their heads, and other blocks, by `parallelize_decoder`.

The layouts have two to four ranks; layouts of eight ranks are covered by the main job's models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from oracle_blocks import BlocksModel, blocks_plan
from oracle_grid import DEGREES, Grid, Value, Values
from oracle_models import BATCH_SIZE, LENGTH, VOCAB
from torch import Tensor, nn

from d9d_dist import ContextMethod, ContextSplit, DistributedContext, StageInfo
from d9d_loop import Loss, ModelProvider, Task
from d9d_loop.testing import Experiment
from d9d_modules import (
    CheckpointPolicy,
    ClassificationHead,
    DecoderForCausalLM,
    DecoderForClassification,
    DecoderForEmbedding,
    DecoderParams,
    DecoderWithHeads,
    EmbeddingHead,
    Gemma3Params,
    Glm4Params,
    LinearScaling,
    Llama3Params,
    Llama3Scaling,
    MistralParams,
    ModernBertParams,
    Qwen2Params,
    Qwen3Params,
    YarnScaling,
    decoder_lm_head,
    parallelize_decoder,
)
from d9d_modules.models.decoder_params import RopeScaling
from d9d_pipeline import Inputs

NUM_CLASSES = 3
IGNORED = -100
FAMILIES = ("qwen3", "llama3")
MORE_FAMILIES = ("qwen2", "mistral", "glm4", "gemma3", "encoder", "modernbert")
"""Families that are combined with layouts and batches only; the encoder is a bidirectional Qwen3."""

ENCODERS = ("encoder", "modernbert")
POOLED = ("classifier", "encoder_classifier", "embedder", "heads")
BLOCKS = ("delta", "latent", "sinks")
SCALINGS: dict[str, RopeScaling | None] = {
    "plain": None,
    "linear": LinearScaling(factor=3.0),
    "yarn": YarnScaling(factor=4.0, original_max_positions=8, beta_fast=4.0),
    "llama3": Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderProvider(ModelProvider):
    """Builds and parallelizes one of the grid's models as a user does.

    Attributes:
        model: Name of the model.
        num_layers: Number of layers of the whole model.
        tied: True if the language model head uses the embedding's weight.
        rope: Name of the rotary scaling.
        window: Attention window of every second layer of a Qwen3; None for full attention.
        method: Context-parallel method.
        checkpointing: Activation checkpointing policy.
        checkpoint_every: Interval of checkpointed layers.
    """

    model: str
    num_layers: int = 2
    tied: bool = False
    rope: str = "plain"
    window: int | None = None
    method: ContextMethod = "all_gather"
    checkpointing: CheckpointPolicy = "none"
    checkpoint_every: int = 1

    @property
    def params(self) -> DecoderParams:
        """Sizes of the model."""
        sizes: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": 12,
            "num_layers": self.num_layers,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 6,
            "intermediate_size": 20,
            "tie_word_embeddings": self.tied,
            "rope_theta": 100.0,
            "rope_scaling": SCALINGS[self.rope],
            "initializer_range": 0.2,
        }
        windows = () if self.window is None else tuple(range(1, self.num_layers, 2))
        every_second = {"sliding_window": 5, "sliding_layers": tuple(range(0, self.num_layers, 2))}
        biases = ("attention_bias", "feed_forward_bias", "norm_bias", "transform_bias")
        encoder = partial(
            ModernBertParams, **sizes, **every_second, **dict.fromkeys(biases, True), sliding_rope_theta=10.0
        )
        families: dict[str, Callable[[], DecoderParams]] = {
            "llama3": lambda: Llama3Params(**sizes),
            "qwen2": lambda: Qwen2Params(**sizes),
            "mistral": lambda: MistralParams(**sizes, sliding_window=5, sliding_layers=tuple(range(self.num_layers))),
            "glm4": lambda: Glm4Params(**sizes, rotary_dim=4),
            "gemma3": lambda: Gemma3Params(
                **sizes, **every_second, sliding_rope_theta=10.0, query_pre_attn_scalar=9, final_softcap=3.0
            ),
            "encoder": lambda: Qwen3Params(**sizes, is_causal=False),
            "modernbert": encoder,
            "encoder_classifier": encoder,
        }
        qwen3 = partial(Qwen3Params, **sizes, sliding_window=self.window, sliding_layers=windows)
        families |= dict.fromkeys(("qwen3", "classifier", "embedder", "heads", *BLOCKS), qwen3)
        return families[self.model]()

    def build(self, stage: StageInfo) -> nn.Module:
        match self.model:
            case "classifier" | "encoder_classifier":
                return DecoderForClassification(self.params, stage, num_classes=NUM_CLASSES)
            case "embedder":
                return DecoderForEmbedding(self.params, stage, embedding_size=5, pooling="mean")
            case "heads":
                heads = {
                    "text": decoder_lm_head,
                    "topic": lambda _: ClassificationHead(12, NUM_CLASSES, pooling="first", init_std=0.2),
                    "vector": lambda _: EmbeddingHead(12, normalize=False),
                }
                return DecoderWithHeads(self.params, stage, heads=heads)
            case "delta" | "latent" | "sinks":
                return BlocksModel(self.params, stage, kind=self.model)
            case _:
                return DecoderForCausalLM(self.params, stage)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        plan = blocks_plan(model) if self.model in BLOCKS else None
        parallelize_decoder(
            model,
            ctx,
            plan=plan,
            context_method=self.method,
            checkpointing=self.checkpointing,
            checkpoint_every=self.checkpoint_every,
        )


Batch = dict[str, Tensor]


class TokenTask(Task):
    """Predict tokens; positions and documents come from the batch, or are those of full rows."""

    def inputs(self, batch: Batch) -> Inputs:
        return Inputs(batch["input_ids"], labels=batch["labels"], **_places(batch))

    def loss(self, outputs: Tensor, batch: Batch) -> Loss:
        return Loss(outputs.sum(), weight=(batch["labels"] != IGNORED).sum())

    def split_sequence(self, batch: Batch, split: ContextSplit) -> Batch:
        of_tokens = {name: values for name, values in batch.items() if values.ndim > 1}
        return {"position_ids": split.positions(LENGTH), **split.split(of_tokens)}


class RowTask(Task):
    """Learn the class of a row, its embedding vector, or both and its tokens."""

    def inputs(self, batch: Batch) -> Inputs:
        return Inputs(batch["input_ids"], mask_BL=batch["mask"], **self._labels(batch), **_places(batch))

    def _labels(self, batch: Batch) -> dict[str, Any]:
        return {}

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        return Loss(_distance(outputs, batch), weight=len(batch["topic"]))


class ClassTask(RowTask):
    def _labels(self, batch: Batch) -> dict[str, Any]:
        return {"labels": batch["topic"]}

    def loss(self, outputs: Tensor, batch: Batch) -> Loss:
        return Loss(outputs.sum(), weight=(batch["topic"] != IGNORED).sum())


class HeadsTask(RowTask):
    def _labels(self, batch: Batch) -> dict[str, Any]:
        return {"labels": {"text": batch["labels"], "topic": batch["topic"]}}

    def loss(self, outputs: dict[str, Tensor], batch: Batch) -> Loss:
        total = outputs["text"].sum() + 3.0 * outputs["topic"].sum() + _distance(outputs["vector"], batch)
        return Loss(total, weight=len(batch["topic"]))


def _places(batch: Batch) -> dict[str, Tensor]:
    """Return the position arguments of a model. Stages after the first cannot derive positions."""
    counted = torch.arange(LENGTH, device=batch["input_ids"].device).unsqueeze(0)
    places = {"position_ids": batch.get("position_ids", counted)}
    return places if "documents" not in batch else {**places, "document_ids_BL": batch["documents"]}


def _distance(vectors_BE: Tensor, batch: Batch) -> Tensor:
    """Return a loss that requires different vectors of different rows."""
    wanted_E = torch.arange(vectors_BE.shape[1], device=vectors_BE.device).to(vectors_BE.dtype).sin()
    return (vectors_BE - batch["target"].unsqueeze(-1) * wanted_E).square().sum()


def rows(kind: str) -> list[Batch]:
    """Return one batch: rows of one document each, packed rows, or rows with padding on either side.

    Some labels and a class are ignored; positions start at 0 in each document; one padded row has no tokens.
    """
    draws = torch.Generator().manual_seed(0)
    return [_row(kind, index, draws) for index in range(BATCH_SIZE)]


def _row(kind: str, index: int, draws: torch.Generator) -> Batch:
    window = torch.randint(0, VOCAB, (LENGTH + 1,), generator=draws)
    is_counted = torch.rand(LENGTH, generator=draws) < 0.8
    starts = torch.rand(LENGTH, generator=draws) < 0.2
    row = {
        "input_ids": window[:-1],
        "mask": torch.ones(LENGTH, dtype=torch.bool),
        "topic": torch.tensor(IGNORED if index == 5 else index % NUM_CLASSES),
        "target": torch.tensor(index / BATCH_SIZE),
    }
    if kind == "packed":
        row["documents"] = starts.long().cumsum(0)
        same = row["documents"].unsqueeze(1) == row["documents"]
        row["position_ids"] = same.tril().sum(1) - 1
        is_counted[:-1] &= same.diagonal(1)  # the last token of a document does not predict the next one's first
    if kind == "padded":
        place = torch.arange(LENGTH) if index % 2 else torch.arange(LENGTH).flip(0)  # padding on the right, or the left
        row["mask"] = place < (index * LENGTH) // (BATCH_SIZE - 1)
        row["documents"] = row["mask"].long()
        row["position_ids"] = (row["mask"].cumsum(0) - 1).clamp(min=0)
        is_counted &= row["mask"]
    return {**row, "labels": window[1:].masked_fill(~is_counted, IGNORED)}


TASKS: dict[str, Task] = {
    "classifier": ClassTask(),
    "encoder_classifier": ClassTask(),
    "embedder": RowTask(),
    "heads": HeadsTask(),
}


def _experiment(values: Values, num_layers: int) -> Experiment:
    chosen: Any = values
    model = DecoderProvider(
        model=chosen["model"],
        num_layers=num_layers,
        tied=chosen["head"] == "tied",
        rope=chosen["rope"],
        window=None if chosen["window"] == "none" else int(chosen["window"]),
        method=chosen["method"],
        checkpointing="full" if chosen["checkpointing"] == "every_second" else chosen["checkpointing"],
        checkpoint_every=2 if chosen["checkpointing"] == "every_second" else 1,
    )
    return Experiment(model=model, batch=rows(chosen["rows"]), task=TASKS.get(chosen["model"], TokenTask()))


def _is_served(values: Values) -> bool:
    """Return True if the model supports the values; `test_oracle.py` checks the errors of the other combinations."""
    model = values.get("model", FAMILIES[0])
    has_context = values.get("cp_shard", "1") != "1" or values.get("cp_replicate", "1") != "1"
    if has_context and model in POOLED:
        return False
    if has_context and model in ENCODERS and values.get("method", "all_to_all") != "all_to_all":
        return False
    has_options = model in {"sinks", "mistral", "gemma3", *ENCODERS} or values.get("window", "none") != "none"
    if values.get("method") == "ring" and has_options:
        return False
    if values.get("method") == "all_to_all" and values.get("tp") == "2" and values.get("cp_shard") == "4":
        return False
    only = {"window": ("qwen3",), "rope": FAMILIES, "head": (*FAMILIES, *MORE_FAMILIES, "heads")}
    return all(values.get(key, default) == default or model in only[key] for key, default in _MODEL_DEFAULTS.items())


_MODEL_DEFAULTS = {"window": "none", "rope": "plain", "head": "untied"}


def _is_paired(first: Value, second: Value) -> bool:
    """Pair model options with layouts and batches, and computation options with the families' options."""
    keys, values = {first[0], second[0]}, {first[1], second[1]}
    if "schedule" in keys:
        return "pp" in keys
    if values & {*POOLED, *BLOCKS, *MORE_FAMILIES}:
        return bool(keys & {*DEGREES, "rows"})
    if "rope" in keys:
        return bool(keys & {"model", "pp", "rows"}) or ("cp_shard", "2") in (first, second)
    return not keys <= {"head", "microbatch", "checkpointing"}


DECODERS = Grid(
    factors={
        "model": (*FAMILIES, *MORE_FAMILIES, *POOLED, *BLOCKS),
        "pp": ("1", "2"),
        "schedule": ("1f1b", "zb1p", "zbv"),
        "dp_replicate": ("1", "2"),
        "dp_shard": ("1", "2"),
        "cp_shard": ("1", "2", "4"),
        "cp_replicate": ("1", "2"),
        "tp": ("1", "2"),
        "method": ("all_gather", "all_to_all", "ring"),
        "microbatch": ("all", "1"),
        "checkpointing": ("none", "full", "every_second", "selective"),
        "rows": ("full", "packed", "padded"),
        "head": ("untied", "tied"),
        "rope": tuple(SCALINGS),
        "window": ("none", "5"),
    },
    of_the_model=("rows", "head", "rope", "window"),
    max_ranks=4,
    experiment=_experiment,
    is_served=_is_served,
    is_paired=_is_paired,
    alone=(*FAMILIES, *MORE_FAMILIES),
)
