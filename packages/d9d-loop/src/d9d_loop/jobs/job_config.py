"""Configuration of a job on text: what `d9d-train sft.toml` reads."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from d9d_loop.config.preset import JobFileConfig
from d9d_loop.data.chat_template import TRAINING_DATE
from d9d_loop.data.conversation import ChatLabels, TextPairs, TooLong
from d9d_loop.preference_kind import PreferenceKind
from d9d_loop.section import Section

JobKind: TypeAlias = Literal["sft", "vision", "dpo", "reward", "pretrain", "classify", "embed"]
"""Fine-tuning on conversations, also with images, preference optimization or a reward model on pairs of answers,
next-token prediction on text, classification of texts, or embeddings of texts."""

CHAT_JOBS: tuple[JobKind, ...] = ("sft", "vision", "dpo", "reward")
"""Jobs on conversations, which need a chat template."""

GENERATING_JOBS: tuple[JobKind, ...] = ("sft", "vision", "dpo", "pretrain")
"""Jobs whose model predicts the next token."""

PACKED_JOBS: tuple[JobKind, ...] = ("sft", "vision", "dpo", "pretrain")
"""Jobs that support packed rows."""

OWN_JOBS = tuple(job for job in PACKED_JOBS if job != "vision")
"""Jobs whose packed rows need d9d's own model of the family."""

_USED_BY: dict[str, tuple[JobKind, ...]] = {
    "dataset.packing": PACKED_JOBS,
    "dataset.labels": CHAT_JOBS,
    "dataset.text_pairs": ("sft", "dpo", "reward"),
    "dataset.date": CHAT_JOBS,
    "dataset.end_token": ("pretrain",),
    "dataset.text_field": ("pretrain", "classify"),
    "dataset.label_field": ("classify",),
    "prompts": GENERATING_JOBS,
    "embedding": ("embed",),
    "preference": ("dpo",),
    "reward": ("reward",),
}
"""Jobs that use a key of the configuration, if not all do."""

OnBroken: TypeAlias = Literal["refuse", "drop"]
"""Treatment of a sample whose image does not exist or cannot be decoded: an error, or the sample is skipped."""

_OF_LOADING = {
    "torch_dtype": "Set model.dtype",
    "revision": "Download this revision, and set model.folder",
    "subfolder": "Set model.folder to this folder",
    "trust_remote_code": "Remove it: a job runs no code of a folder",
}
"""Arguments of `from_pretrained` that are not entries of `config.json`, and what to do instead."""

ALL_LINEAR = "all-linear"
"""Value of `adapter.target` for all linear layers except those of a head."""


class LanguageModelConfig(Section):
    """Model of `transformers`: the weights of a folder, or a new model of a known family.

    Other keys are entries of the model's `config.json`, such as `hidden_size` of a new model.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    folder: Path | None = Field(
        default=None, description="Folder in the Hugging Face layout; nothing is downloaded. Null: a new model."
    )
    family: str | None = Field(
        default=None, description="Family of a new model: a `model_type` of transformers, such as qwen3 or llama."
    )
    tokenizer: Path | None = Field(
        default=None,
        description="Folder with tokenizer.json. Default: `model.folder`; a byte-level tokenizer if that is also null.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="Dtype of the parameters and of the export. Null: parameters are float32, and each exported tensor "
        "has its dtype in the folder. bfloat16 rounds updates, but halves the memory of a frozen base.",
    )

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.folder is None) == (self.family is None):
            raise ValueError("expected either folder (released weights) or family (a new model)")
        for name, remedy in _OF_LOADING.items():
            if name in (self.__pydantic_extra__ or {}):
                raise ValueError(f"{name} is not an entry of config.json. {remedy}")
        return self

    @property
    def entries(self) -> dict[str, Any]:
        """Entries of `config.json` that differ from those of the folder, or from the defaults of the family.

        The types of the entries are unknown, so text from the command line is parsed as JSON if possible.
        """
        return {name: _parsed(value) for name, value in (self.model_extra or {}).items()}


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


class TextDataConfig(Section):
    """Files with text, and the names of their fields."""

    files: tuple[Path, ...] = Field(
        description="Files of one format: .jsonl, .json, .parquet, .csv or .txt; folders of `datasets.save_to_disk`; "
        "or tokens: a token file, or those of Megatron-LM, nanoGPT, llm.c, MosaicML, litdata or datasets."
    )
    evaluation_files: tuple[Path, ...] = Field(default=(), description="Files for evaluation, in the same formats.")
    held_out: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Fraction of the samples held out for evaluation, if `evaluation_files` is empty.",
    )
    length: PositiveInt = Field(default=1024, description="Maximum length of a sample, in tokens.")
    too_long: TooLong = Field(default="truncate", description="Treatment of samples longer than `length`.")
    broken_images: OnBroken = Field(
        default="refuse",
        description="Treatment of samples with an image that does not exist or cannot be decoded, in the jobs vision "
        "and dpo.",
    )
    labels: ChatLabels = Field(
        default="assistant",
        description="Tokens of conversations that contribute to the loss: the assistant's turns, or all tokens except "
        "for a prompt.",
    )
    text_pairs: TextPairs = Field(
        default="chat",
        description="Treatment of a prompt and a completion that are texts: chat applies the chat template, joined "
        "appends the completion and the end token to the prompt.",
    )
    packing: bool = Field(
        default=False,
        description="Pack several samples into rows of `length` tokens, for d9d's own model of the family, or a model "
        "of transformers in the job vision. Each token attends only to its own sample.",
    )
    end_token: str | None = Field(
        default=None,
        description="Token that ends each text in pretraining, such as <|endoftext|>, unless the tokenizer adds it. "
        "Null: no token besides those that the tokenizer adds.",
    )
    date: datetime.date = Field(
        default=TRAINING_DATE,
        description="Date that a chat template prints as the current one. It is fixed, so that all ranks and a resumed "
        "job read equal texts.",
    )
    text_field: str = Field(default="text", description="Field with the text, in pretraining and classification.")
    label_field: str = Field(default="label", description="Field with the class, in classification.")


class AdapterConfig(Section):
    """Adapters, with all other parameters frozen. Without this section all parameters are trained."""

    kind: Literal["lora", "dora"] = Field(default="lora", description="Kind of the adapters.")
    target: str = Field(
        default=ALL_LINEAR,
        description="all-linear: all linear layers except heads, as in peft; or a regular expression for the names of "
        "adapted layers.",
    )
    full: str | None = Field(
        default=None,
        description="Regular expression for the names of parameters that are trained in full, such as those of a "
        "projector. Null: only those that the folder does not have.",
    )
    rank: PositiveInt = Field(default=16, description="Rank of the adapters.")
    alpha: PositiveFloat = Field(default=32.0, description="LoRA alpha: the update is scaled by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout probability for adapter inputs.")
    base: Literal["dense", "nf4", "int8"] = Field(
        default="dense", description="Format of the base weights. nf4 (4 bits, QLoRA) and int8 need kind = lora."
    )
    block_size: PositiveInt = Field(
        default=64, description="Number of weights of a row that share a scale in nf4 and int8."
    )


class EmbeddingConfig(Section):
    """Text embeddings, and the pairs of texts that train them."""

    pooling: Literal["mean", "last", "first"] = Field(
        default="mean", description="Token outputs that become the embedding: their mean, or the last or first token."
    )
    attention: Literal["model", "bidirectional"] = Field(
        default="model", description="bidirectional: each token of a decoder attends to all tokens of its text."
    )
    temperature: PositiveFloat = Field(default=0.05, description="Softmax temperature: divides cosine similarities.")
    group: int = Field(
        default=8,
        ge=2,
        description="Number of pairs in a sample. For each query, the documents of the other pairs are negatives.",
    )
    num_negatives: NonNegativeInt | None = Field(
        default=None,
        description="Number of negatives per query, the first of `negatives_field`. Required if samples have them.",
    )
    query_field: str = Field(default="query", description="Field with the query.")
    positive_field: str = Field(default="positive", description="Field with the document that matches the query.")
    negatives_field: str = Field(
        default="negatives", description="Field with the negatives: a list of texts, or one text."
    )


class PreferenceConfig(Section):
    """Loss of preference pairs: DPO and its relatives, by the options of `PreferenceLoss`."""

    beta: PositiveFloat = Field(default=0.1, description="Strength of the preference.")
    kind: PreferenceKind = Field(
        default="sigmoid",
        description="Function of the margin: sigmoid (DPO, SimPO), squared (IPO if length_normalized) or hinge (SLiC).",
    )
    length_normalized: bool = Field(default=False, description="Divide the score of an answer by its number of tokens.")
    label_smoothing: float = Field(default=0.0, description="Probability that a preference is wrong; for sigmoid.")
    target_margin: float = Field(default=0.0, description="Margin to reach; for sigmoid.")
    answer_weight: float = Field(
        default=0.0, description="Factor of the mean negative log-likelihood of the chosen answer, which is added."
    )
    reference: bool = Field(
        default=True,
        description="Compare with the initial model: the model without its adapters, or a copy in host memory. False: "
        "no reference, as in SimPO.",
    )


class RewardConfig(Section):
    """Loss of a reward model."""

    centering: NonNegativeFloat = Field(
        default=0.0, description="Factor of the squared sum of both rewards, which centers the rewards around 0."
    )
    margin: float = Field(default=0.0, description="Margin to reach; the margin of a pair is added.")


class TextJobConfig(JobFileConfig):
    """Configuration of a training job on text."""

    job: JobKind = Field(
        description="Kind of training: sft (chats), vision (chats with images), dpo or reward (pairs of answers), "
        "pretrain (text), classify (labeled texts) or embed (pairs of texts)."
    )
    model: LanguageModelConfig
    dataset: TextDataConfig
    adapter: AdapterConfig | None = None
    embedding: EmbeddingConfig | None = None
    preference: PreferenceConfig | None = None
    reward: RewardConfig | None = None
    prompts: tuple[str, ...] = Field(
        default=(),
        description="Texts that the model continues (pretrain) or answers (sft, dpo) at each evaluation, with greedy "
        "decoding. Results go to report.html and the trackers.",
    )

    @property
    def has_own_model(self) -> bool:
        """True if the job trains d9d's own model of the family."""
        return self.dataset.packing and self.job in OWN_JOBS

    @model_validator(mode="after")
    def _uses_what_is_set(self) -> Self:
        for key, jobs in _USED_BY.items():
            owner, name = (self.dataset if "." in key else self), key.rpartition(".")[2]
            if self.job not in jobs and getattr(owner, name) != type(owner).model_fields[name].default:
                raise ValueError(f"{key} is set, but job = {self.job}; expected job = {_or(jobs)}. Remove {key}")
        return self

    @model_validator(mode="after")
    def _has_what_packing_needs(self) -> Self:
        if self.job not in GENERATING_JOBS:
            axes = ("expert_parallel", "context_parallel_shard", "context_parallel_replicate")
            split = [f"mesh.{axis} = {degree}" for axis in axes if (degree := getattr(self.mesh, axis)) != 1]
            if split:
                raise ValueError(
                    f"{split[0]} is set, but job = {self.job}; expected 1, or {_or(GENERATING_JOBS)}. Remove it, "
                    "or shard with mesh.data_parallel_shard"
                )
        if not self.has_own_model:
            return self
        model = self.model
        unused = [] if model.dtype is None else ["model.dtype"]
        unused += [] if model.folder is None else [f"model.{name}" for name in model.entries]
        if unused:
            raise ValueError(
                f"{unused[0]} applies to transformers models, but dataset.packing = true uses d9d's own model of "
                "the family; expected no dtype and no changes to the folder's config.json. Remove "
                f"{unused[0]}"
            )
        return self

    @model_validator(mode="after")
    def _has_what_images_need(self) -> Self:
        if self.job != "vision":
            if self.dataset.broken_images != "refuse" and (self.job != "dpo" or self.dataset.packing):
                raise ValueError(
                    f"dataset.broken_images is set, but job = {self.job}; expected vision, or dpo without packing. "
                    "Remove it"
                )
            return self
        if self.model.folder is None:
            raise ValueError("job = vision needs model.folder, a folder with a model and its processor. Set it")
        return self

    @model_validator(mode="after")
    def _has_too_long_that_is_used(self) -> Self:
        data = self.dataset
        if self.job == "pretrain" and data.too_long != "truncate":
            raise ValueError(f"dataset.too_long = {data.too_long}, but job = pretrain splits long texts. Remove it")
        if data.too_long == "drop" and self.job not in CHAT_JOBS:
            raise ValueError(
                f"dataset.too_long = drop, but job = {self.job}; expected job = {_or(CHAT_JOBS)}, or truncate or refuse"
            )
        return self

    @model_validator(mode="after")
    def _has_what_prompts_need(self) -> Self:
        if not self.prompts:
            return self
        if not (self.dataset.evaluation_files or self.dataset.held_out):
            raise ValueError(
                "prompts are set, but there are no evaluation data; expected dataset.held_out or "
                "dataset.evaluation_files. Set one of them, or remove prompts"
            )
        for axis in ("context_parallel_shard", "context_parallel_replicate"):
            if getattr(self.mesh, axis) != 1:
                raise ValueError(
                    f"prompts are set with mesh.{axis} = {getattr(self.mesh, axis)}; expected 1, because samples are "
                    "not split over context-parallel ranks. Remove prompts"
                )
        return self


def _or(jobs: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(jobs[:-1]), jobs[-1])))
