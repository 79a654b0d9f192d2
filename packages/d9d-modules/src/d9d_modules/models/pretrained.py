"""Models built from a Hugging Face folder, whose family is recognized by `config.json`."""

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.metadata import entry_points
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

from torch import nn

from d9d_dist import DistributedContext, StageInfo, UserError
from d9d_dist.errors import check_choice
from d9d_modules.models.decoder_heads import DecoderForCausalLM, DecoderForClassification, DecoderForEmbedding
from d9d_modules.models.decoder_params import DecoderParams
from d9d_modules.models.gemma3 import GEMMA3
from d9d_modules.models.glm4 import GLM4
from d9d_modules.models.grouped_query import GroupedQueryParams
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, text_entries
from d9d_modules.models.hugging_face_family import HuggingFaceFamily
from d9d_modules.models.hugging_face_irrelevant import IRRELEVANT, SPECIAL_TOKENS
from d9d_modules.models.hugging_face_quantization import quantization_from_hugging_face
from d9d_modules.models.llama3 import LLAMA3
from d9d_modules.models.mistral import MISTRAL
from d9d_modules.models.modernbert import MODERNBERT
from d9d_modules.models.qwen2 import QWEN2
from d9d_modules.models.qwen3 import QWEN3
from d9d_modules.models.qwen3_5 import QWEN3_5
from d9d_modules.models.sentence_transformers import read_pooling
from d9d_modules.pooling import Pooling
from d9d_state import (
    JsonValue,
    ModelFolder,
    StateMapper,
    TensorInfo,
    dequantize_inputs,
    drop,
    keep,
    parallel,
    rename,
    rename_all,
    sequential,
)

FAMILIES: tuple[HuggingFaceFamily[Any], ...] = (GEMMA3, GLM4, LLAMA3, MISTRAL, MODERNBERT, QWEN2, QWEN3, QWEN3_5)
"""Families of this package."""

FAMILY_ENTRY_POINTS = "d9d.model_families"
"""Group of entry points by which other packages register tuples of families, as d9d-moe does."""

PretrainedHead: TypeAlias = Literal["language_model", "classification", "embedding"]
"""Type of the head to build on the backbone."""

_NESTED_PREFIXES = ("model.language_model.", "language_model.model.")
"""Prefixes of the tensors of the language model in multimodal checkpoints, by version of `transformers`."""

_logger = logging.getLogger(__name__)


def known_families() -> Mapping[str, HuggingFaceFamily[Any]]:
    """Return the families of all installed packages, by their `model_type`."""
    registered = [family for each in entry_points(group=FAMILY_ENTRY_POINTS) for family in each.load()]
    families = (*FAMILIES, *registered)
    return {name: family for family in families for name in (family.model_type, family.nested_type) if name is not None}


def from_pretrained_config(
    folder: str | Path | HuggingFaceConfig,
    *,
    head: PretrainedHead = "language_model",
    num_classes: int | None = None,
    pooling: Pooling | None = None,
    embedding_size: int | None = None,
    families: Sequence[HuggingFaceFamily[Any]] = (),
) -> "PretrainedDecoder":
    """Recognize the family of a Hugging Face folder by its `config.json`. Reads no weights and downloads nothing.

    Args:
        folder: Folder with `config.json`, the name of a model in the local cache of Hugging Face, or the entries of a
            `config.json` for a model without stored weights.
        head: Head of the model to build.
        num_classes: Number of classes of the classification head.
        pooling: Pooling of the classification or embedding head. None selects the family's pooling, or for an embedding
            head the pooling in the folder's `modules.json` (written by sentence-transformers), if any.
        embedding_size: Size of the embeddings, see `EmbeddingHead`; None for the size of the stored projection, if any.
        families: Further families, which have precedence over `known_families` of the same `model_type`.

    Raises:
        UserError: If the folder has no valid `config.json`, or the head is unknown. If `modules.json` lists modules
            that the embedding head does not have, and `pooling` is None. If the family is unknown; the message names
            the nearest family and the entries that differ. If the family does not support an entry; see
            `HuggingFaceFamily.read`.
    """
    path, config = (None, folder) if isinstance(folder, Mapping) else _read_folder(folder)
    known = {**known_families(), **{family.model_type: family for family in families}}
    family = known.get(str(config.get("model_type")))
    if family is None:
        raise UserError(_unknown(config, known))
    check_choice("head", head, PretrainedHead)
    if (num_classes is None) is (head == "classification"):
        raise UserError(
            f"head = {head!r}, num_classes = {num_classes}; expected num_classes for a classification head, and None "
            "for other heads."
        )
    if head == "embedding" and pooling is None and path is not None:
        pooling = read_pooling(path)
    return PretrainedDecoder(
        path,
        config,
        family,
        family.read(config),
        head,
        num_classes=num_classes,
        pooling=pooling,
        embedding_size=embedding_size,
    )


@final
@dataclass(frozen=True)
class PretrainedDecoder:
    """Model of a recognized folder, with the methods of a `d9d_loop.ModelProvider`.

    Attributes:
        folder: Folder with `config.json` and, if weights are loaded, safetensors files. None for a configuration
            without a folder.
    """

    folder: Path | None
    config: HuggingFaceConfig
    family: HuggingFaceFamily[Any]
    params: DecoderParams
    head: PretrainedHead
    num_classes: int | None = None
    pooling: Pooling | None = None
    embedding_size: int | None = None

    def __str__(self) -> str:
        mixers = Counter(self.params.mixer_kind(index) for index in range(self.params.num_layers))
        num_parameters = sum(prod(tensor.shape) for tensor in self._stored.values())
        dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in self._stored.values()})
        weights = f"{num_parameters / 1e9:.3g} B stored numbers ({', '.join(dtypes)})" if dtypes else "no weights"
        unused = ", ".join(self.unused) or "none"
        layers = ", ".join(f"{count} {kind}" for kind, count in mixers.items())
        where = self.folder or "new model"
        return f"{where}: family {self.family.model_type}, layers: {layers}; {weights}; tensors not used: {unused}"

    @property
    def is_causal(self) -> bool:
        """True if no position attends to a later position; False for encoders and bidirectional embedders."""
        return not isinstance(self.params, GroupedQueryParams) or self.params.attention_form.is_causal

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of stored tensors that are not loaded, because the model does not have them."""
        extra = self.family.prepare(self.config).get("num_nextn_predict_layers")
        indices = [self.params.num_layers + depth for depth in range(max(1, extra if isinstance(extra, int) else 0))]
        patterns = [pattern.format(num_layers=index) for pattern in self.family.unused for index in indices]
        patterns.append("*rotary_emb.inv_freq")
        if self.params.tie_word_embeddings or self.head != "language_model":
            patterns.append("lm_head.weight")
        if self.head != "classification":
            patterns += self.family.classifier(self.params)
        consumed = frozenset(self._mapper(self._stored).inputs)
        left = [name for name in self._stored if name not in consumed]
        return tuple(name for name in left if any(fnmatchcase(name, pattern) for pattern in patterns))

    def build(self, stage: StageInfo) -> nn.Module:
        """Build one pipeline stage of the model."""
        match self.head:
            case "language_model":
                return DecoderForCausalLM(self.params, stage)
            case "classification":
                assert self.num_classes is not None
                return DecoderForClassification(self.params, stage, num_classes=self.num_classes, pooling=self.pooling)
            case "embedding":
                size = self._embedding_size
                return DecoderForEmbedding(self.params, stage, pooling=self.pooling, embedding_size=size)

    def parallelize(self, model: nn.Module, ctx: DistributedContext, **options: Any) -> None:
        """Parallelize one stage in place; options as in `parallelize_decoder`."""
        self.family.parallelize(model, ctx, **options)

    def state_mapper(self) -> StateMapper:
        """Return the mapper from an exported folder to the model; exports use its inverse."""
        return self._mapper(dict.fromkeys([*self.family.classifier(self.params), "projection.weight"]))

    def load_mapper(self) -> StateMapper:
        """Return the mapper from the folder to the model, with dequantization, and log which tensors are not used.

        Stored tensors that are neither read nor in `unused` raise an error when the weights are loaded.
        """
        mapper, unused = self._mapper(self._stored), self.unused
        layout = quantization_from_hugging_face(self.config)
        if layout is not None:
            mapper = dequantize_inputs(mapper, layout, self._stored)
        if unused and os.environ.get("RANK", "0") == "0":
            _logger.warning("%s contains tensors that the model does not use: %s", self.folder, ", ".join(unused))
        return parallel(mapper, drop(*unused))

    def export_files(self) -> Mapping[str, JsonValue]:
        """Return the `config.json` of an export, with special tokens and the names of classes as in the folder.

        `architectures` names the `transformers` class that loads the export.
        """
        read = self.family.prepare(self.config)
        config: dict[str, Any] = {
            **{key: read[key] for key in SPECIAL_TOKENS if key in read},
            **self.family.write(self.params),
            "architectures": self.family.architectures(self.head),
        }
        if self.num_classes is not None:
            names = self.config.get("id2label")
            if not isinstance(names, Mapping) or len(names) != self.num_classes:
                names = {str(index): f"LABEL_{index}" for index in range(self.num_classes)}
            config["id2label"] = {str(index): str(name) for index, name in names.items()}
            config["label2id"] = {str(name): int(index) for index, name in names.items()}
        return {"config.json": config}

    @property
    def _embedding_size(self) -> int | None:
        stored = self._stored.get("projection.weight")
        return self.embedding_size if stored is None else self.embedding_size or stored.shape[0]

    @cached_property
    def _stored(self) -> Mapping[str, TensorInfo]:
        if self.folder is None or not any(self.folder.glob("model*.safetensors*")):
            return {}
        return ModelFolder.open(self.folder).tensors

    def _whole_mapper(self, stored: Mapping[str, object]) -> StateMapper:
        """Return the mapper of the language model for the layout with the most tensors in `stored`."""
        layouts = [self.family.mapper(self.params)]
        if not stored.keys() >= frozenset(layouts[0].inputs):
            layouts += [mapper(self.params) for mapper in self.family.other_mappers]
        for prefix in (each for each in _NESTED_PREFIXES if f"{each}embed_tokens.weight" in stored):
            layouts = [
                _with_names(whole, {name: name.replace("model.", prefix, 1) for name in whole.inputs})
                for whole in layouts
            ]
        return max(layouts, key=lambda whole: len(stored.keys() & whole.inputs))

    def _mapper(self, stored: Mapping[str, object]) -> StateMapper:
        """Return the mapper of the weights in a folder that contains the tensors `stored`."""
        whole = self._whole_mapper(stored)
        if self.head == "language_model":
            return whole
        backbone = whole.restrict(outputs=[name for name in whole.outputs if name.startswith("backbone.")])
        names = {name: name.removeprefix("model.") for name in backbone.inputs}
        if stored.keys() & names.values():  # a text-embedding checkpoint, whose tensor names have no prefix
            backbone = _with_names(backbone, names)
        match self.head:
            case "classification":
                names = self.family.classifier(self.params)
                found = {theirs: ours for theirs, ours in names.items() if theirs in stored}
                new = [ours for theirs, ours in names.items() if theirs not in stored]
                return parallel(backbone, rename_all(found), keep(*new))
            case "embedding" if self._embedding_size is None:
                return backbone
            case _ if "projection.weight" in stored:
                return parallel(backbone, rename("projection.weight", "head.projection.weight"))
            case _:
                return parallel(backbone, keep("head.projection.weight"))


def _with_names(mapper: StateMapper, names: Mapping[str, str]) -> StateMapper:
    """Return the mapper with other names of its inputs."""
    return sequential(rename_all({theirs: ours for ours, theirs in names.items()}), mapper)


def _read_folder(folder: str | Path) -> tuple[Path, HuggingFaceConfig]:
    path = _local_folder(folder)
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path / 'config.json'} is not valid JSON: {error}. Download it again.") from None
    if not isinstance(config, Mapping):
        raise UserError(f"{path / 'config.json'} contains {type(config).__name__}; expected an object.")
    return path, config


def _local_folder(name: str | Path) -> Path:
    folder = Path(name)
    if (folder / "config.json").is_file():
        return folder
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    cached = hub / f"models--{str(name).replace('/', '--')}"
    reference = cached / "refs" / "main"
    if reference.is_file():
        snapshot = cached / "snapshots" / reference.read_text(encoding="utf-8").strip()
        if (snapshot / "config.json").is_file():
            return snapshot
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{name} contains an adapter; expected a model. Name the folder of the adapter's base model.")
    if folder.is_dir():
        raise UserError(f"the folder {name} has no config.json; expected a model. Download or copy it again.")
    raise UserError(
        f"{name} is neither a folder with config.json nor a model in the local cache of Hugging Face, {hub}; expected "
        f"one of them. Download the model: hf download {name}"
    )


def _unknown(config: HuggingFaceConfig, known: Mapping[str, HuggingFaceFamily[Any]]) -> str:
    """Return the error for an unknown family, with the entries that differ from the nearest one."""
    model_type, config = config.get("model_type"), text_entries(config)
    differences = {
        name: (
            [key for key in config if key not in {*family.used, *family.irrelevant, *IRRELEVANT}],
            [each.key for each in family.entries if each.default is None and each.key not in config],
        )
        for name, family in known.items()
    }
    likeness = {name: SequenceMatcher(None, name, str(model_type)).ratio() for name in known}
    nearest = min(differences, key=lambda name: (sum(map(len, differences[name])), -likeness[name]))
    unknown, missing = (", ".join(names) or "none" for names in differences[nearest])
    return (
        f"config.json has model_type = {model_type!r}; expected one of {', '.join(sorted(known))}. The "
        f"nearest family is {nearest}; entries that it does not know: {unknown}; entries that it lacks: {missing}. Use "
        "d9d_loop.hugging_face_model, or define the family as a HuggingFaceFamily and pass families=[...]."
    )
