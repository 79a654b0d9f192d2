"""Configuration of a job on text: what `d9d-train sft.toml` reads."""

from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from d9d_loop.config.section import Section
from d9d_loop.config.trainer_config import TrainerConfig
from d9d_loop.data.conversation import TooLong

JobKind: TypeAlias = Literal["sft", "pretrain", "classify"]
"""Fine-tuning on conversations, next-token prediction on text, or classification of texts."""


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
        default=None, description="Folder with tokenizer.json; by default the model's folder, or bytes without one."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="Dtype of the parameters; null: that of the folder."
    )
    tensor_parallel_plan: Literal["auto"] | None = Field(
        default=None, description="auto: split the model over mesh.tensor_parallel by its own plan."
    )

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.folder is None) == (self.family is None):
            raise ValueError("expected either folder (released weights) or family (a new model)")
        return self

    @property
    def entries(self) -> dict[str, Any]:
        """Entries of `config.json` that differ from those of the folder, or from the defaults of the family."""
        return dict(self.model_extra or {})


class TextDataConfig(Section):
    """Files with text, and what their fields mean."""

    files: tuple[Path, ...] = Field(
        description="Files .jsonl, .parquet, .csv or .txt, folders of `datasets.save_to_disk`, or a token file."
    )
    evaluation_files: tuple[Path, ...] = Field(default=(), description="Files for evaluation, of the same kinds.")
    held_out: float = Field(
        default=0.0, ge=0, lt=1, description="Fraction of the samples held out for evaluation, if there are no files."
    )
    length: PositiveInt = Field(default=1024, description="Maximum length of a sample, in tokens.")
    too_long: TooLong = Field(default="truncate", description="What happens to longer samples.")
    text_field: str = Field(default="text", description="Field with the text, in pretraining and classification.")
    label_field: str = Field(default="label", description="Field with the class, in classification.")


class AdapterConfig(Section):
    """Adapters, with all other parameters frozen. Without this section all parameters are trained."""

    kind: Literal["lora", "dora"] = Field(default="lora", description="Kind of the adapters.")
    target: str = Field(
        default=r"\.(q|k|v|o|gate|up|down)_proj$", description="Regular expression of the layers' names."
    )
    rank: PositiveInt = Field(default=16, description="Rank of the adapters.")
    alpha: PositiveFloat = Field(default=32.0, description="Scale of the update, divided by the rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout probability of the adapters' inputs.")
    base: Literal["dense", "nf4", "int8"] = Field(
        default="dense", description="Format of the weights under the adapters: nf4 (4 bits, QLoRA) or int8 need lora."
    )
    block_size: PositiveInt = Field(default=64, description="Number of inputs that share a scale in nf4 and int8.")


class TextJobConfig(TrainerConfig):
    """Configuration of a training job on text."""

    job: JobKind = Field(description="What is trained: sft (chats), pretrain (text) or classify (labelled texts).")
    model: LanguageModelConfig
    dataset: TextDataConfig
    adapter: AdapterConfig | None = None
