"""Method of adapter files: prepares a base model for the files without knowing how they were trained."""

import re
from collections.abc import Collection
from pathlib import Path

from safetensors import safe_open

from d9d_dist import UserError
from d9d_dist.errors import shorten
from d9d_peft.dora import DoRA
from d9d_peft.full_tune import FullTune
from d9d_peft.lora import LoRA
from d9d_peft.low_rank import LowRank
from d9d_peft.method import PeftMethod
from d9d_peft.peft_config import config_low_rank, read_config
from d9d_peft.peft_layout import CONFIG_NAME, PREFIX, TENSORS_NAME
from d9d_peft.stack import Stack

_FACTOR = re.compile(r"\.(?:lora_[AB]\.weight|lora_embedding_[AB]|lora_magnitude_vector)$")


def stored_method(folder: str | Path) -> PeftMethod:
    """Return the method of adapter files of `save_adapters` or `peft`, for `inject`. Then call `load_adapters`.

    The modules of the model have the names of the files, as those of the `transformers` model do.

    Raises:
        UserError: If a file is missing, or the files hold adapters of parameters [experts, out, in].
    """
    folder = Path(folder)
    for name in (CONFIG_NAME, TENSORS_NAME):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} does not exist; expected a folder with {TENSORS_NAME} and {CONFIG_NAME}.")
    text = (folder / CONFIG_NAME).read_text(encoding="utf-8")
    is_dora = re.search(r'"use_dora":\s*true', text) is not None
    config = read_config(text, origin=str(folder / CONFIG_NAME), is_dora=is_dora)
    if config.get("target_parameters"):
        raise UserError(
            f"{folder} holds adapters of {shorten(config['target_parameters'])}; expected adapters of layers. Install "
            "peft, which reads them, or inject the method of the training."
        )
    with safe_open(folder / TENSORS_NAME, framework="pt") as file:
        names = [key.removeprefix(PREFIX) for key in file.keys()]  # noqa: SIM118 - no mapping
    by_low_rank: dict[LowRank, list[str]] = {}
    for layer in dict.fromkeys(_FACTOR.sub("", name) for name in names if _FACTOR.search(name)):
        by_low_rank.setdefault(config_low_rank(config, layer), []).append(layer)
    kind = DoRA if is_dora else LoRA
    methods: list[PeftMethod] = [
        kind(_exactly(layers), rank=each.rank, alpha=each.alpha, rank_stabilized=each.rank_stabilized)
        for each, layers in by_low_rank.items()
    ]
    tuned = [name for name in names if not _FACTOR.search(name)]
    return Stack(*methods, *([FullTune(_exactly(tuned))] if tuned else []))


def _exactly(names: Collection[str]) -> str:
    """Return a regular expression that matches only these names."""
    return f"^(?:{'|'.join(map(re.escape, names))})$"
