"""Pooling of an embedding model saved by sentence-transformers, read from its `modules.json`."""

import json
from pathlib import Path
from typing import Any

from d9d_dist.errors import UserError
from d9d_modules.pooling import Pooling

_KINDS = ("Transformer", "Pooling", "Normalize")
"""Modules of sentence-transformers that an `EmbeddingHead` on a backbone computes."""

_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}


def read_pooling(folder: Path) -> Pooling | None:
    """Return the pooling that a folder's `modules.json` names; None without this file or without pooling.

    Raises:
        UserError: If the file lists modules that `EmbeddingHead` does not have, such as the dense layers of
            EmbeddingGemma, or another pooling.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    modules = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in _parsed(path)]
    advice = "Pass pooling= to train an embedding head of your own on the backbone."
    unknown = [f"{kind} ({where})" for kind, where in modules if kind not in _KINDS]
    if unknown:
        raise UserError(
            f"{path} lists {', '.join(unknown)}; expected only {', '.join(_KINDS)}, which the embedding head of d9d "
            f"computes. {advice}"
        )
    poolings = [where for kind, where in modules if kind == "Pooling"]
    if not poolings:
        return None
    config_path = folder / poolings[0] / "config.json"
    config: dict[str, Any] = _parsed(config_path)
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UserError(
            f"{config_path} has the pooling {', '.join(modes) or 'none'}; expected one of {', '.join(_MODES)}. {advice}"
        )
    return _MODES[modes[0]]


def _parsed(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
