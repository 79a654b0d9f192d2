"""Provider of d9d's own models for Hugging Face folders, which an entry point of d9d-modules recognizes."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import nn

from d9d_dist import DistributedContext, StageInfo, UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.model.folder_dtypes import FolderDtypes
from d9d_loop.model.model_provider import ModelProvider
from d9d_state import JsonValue, StateMapper

RECOGNIZER_ENTRY_POINTS = "d9d.model_recognizers"
"""Group of entry points whose function recognizes a folder, such as `d9d_modules.from_pretrained_config`."""


class RecognizedModel(Protocol):
    """Model of a recognized folder, such as `PretrainedDecoder`."""

    @property
    def folder(self) -> Path | None:
        """Folder of the configuration and the weights; None for a new model."""
        ...

    @property
    def is_causal(self) -> bool:
        """True if no position attends to a later one, so that the model can learn to predict the next token."""
        ...

    def build(self, stage: StageInfo) -> nn.Module:
        """Build one stage of the model."""
        ...

    def parallelize(self, model: nn.Module, ctx: DistributedContext, **options: Any) -> None:
        """Parallelize one stage in place."""
        ...

    def state_mapper(self) -> StateMapper:
        """Return the mapper from an exported folder to the model."""
        ...

    def load_mapper(self) -> StateMapper:
        """Return the mapper from `folder` to the model."""
        ...

    def export_files(self) -> Mapping[str, JsonValue]:
        """Return the JSON files of an export by name."""
        ...


def pretrained_model(
    folder: str | Path | Mapping[str, Any],
    *,
    from_scratch: bool = False,
    parallelize: Mapping[str, Any] | None = None,
    keep_dtypes: bool = False,
    **options: Any,
) -> "PretrainedProvider":
    """Return a provider of d9d's own model for a Hugging Face folder; its family is recognized by `config.json`.

    The model supports every axis of the mesh that its family supports, pipeline stages included. For other families use
    `hugging_face_model`. Needs d9d-modules, and d9d-moe for MoE families.

    Args:
        folder: Folder with `config.json`, the name of a model in the local cache of Hugging Face, or the entries of a
            `config.json` for a new model.
        from_scratch: If True, draw the initial weights instead of loading the weights in the folder.
        parallelize: Options of `d9d_modules.parallelize_decoder`, such as `{"checkpointing": "selective"}`.
        keep_dtypes: If True, export each tensor in its dtype in the folder, although parameters are float32.
        options: Options of `d9d_modules.from_pretrained_config`, such as `head="classification", num_classes=3`.

    Raises:
        ModuleNotFoundError: If d9d-modules is not installed.
        UserError: If the folder or its family cannot be used.
    """
    found = list(entry_points(group=RECOGNIZER_ENTRY_POINTS))
    if not found:
        raise ModuleNotFoundError(f"pretrained_model needs d9d-modules. Install it: {install_hint('d9d-modules')}")
    if len(found) > 1:
        raise UserError(
            f"got the model recognizers {', '.join(each.value for each in found)}; expected one installed package with "
            f"an entry point of {RECOGNIZER_ENTRY_POINTS}."
        )
    recognized = found[0].load()(folder, **options)
    return PretrainedProvider(recognized, from_scratch=from_scratch, parallelize=parallelize, keep_dtypes=keep_dtypes)


@final
class PretrainedProvider(ModelProvider):
    """Provider of a recognized model; see `pretrained_model`.

    Attributes:
        recognized: The recognized model; `str` describes it.
    """

    def __init__(
        self,
        recognized: RecognizedModel,
        *,
        from_scratch: bool = False,
        parallelize: Mapping[str, Any] | None = None,
        keep_dtypes: bool = False,
    ) -> None:
        self.recognized = recognized
        self._from_scratch = from_scratch
        self._options = dict(parallelize or {})
        folder = recognized.folder
        self._dtypes = FolderDtypes.read(folder) if keep_dtypes and folder is not None and not from_scratch else None

    @property
    def initial_weights(self) -> Path | None:
        """See `ModelProvider`."""
        return None if self._from_scratch else self.recognized.folder

    def build(self, stage: StageInfo) -> nn.Module:
        """See `ModelProvider`."""
        return self.recognized.build(stage)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        """See `ModelProvider`."""
        self.recognized.parallelize(model, ctx, **self._options)

    def state_mapper(self, model: nn.Module) -> StateMapper:
        """See `ModelProvider`."""
        del model
        return self.recognized.state_mapper()

    def load_mapper(self, model: nn.Module, folder: Path) -> StateMapper:
        """See `ModelProvider`; another folder than the recognized one is read as an export."""
        del model
        own = self.recognized.folder
        is_recognized = own is not None and folder.resolve() == own.resolve()
        return self.recognized.load_mapper() if is_recognized else self.recognized.state_mapper()

    def export_dtype(self, name: str) -> torch.dtype | None:
        """See `ModelProvider`."""
        return None if self._dtypes is None else self._dtypes.of(name)

    def export_files(self) -> Mapping[str, JsonValue]:
        """See `ModelProvider`."""
        return self.recognized.export_files()
