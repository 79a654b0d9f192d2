"""The files that came with weights, which an export of those weights carries on: tokenizer, generation config, licence.

Files are copied byte for byte; of `config.json`, entries that the exporter does not write itself are kept as they are.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from d9d_dist import UserError
from d9d_state.json_value import JsonValue
from d9d_state.tensor_info import TensorInfo

CONFIG_NAME = "config.json"
MAX_CARRIED_BYTES = 256 * 2**20
"""A larger file is not carried: a tokenizer has at most some ten MiB."""

# Text, and tokenizers of sentencepiece and tiktoken. Not code, and no format of weights.
_SUFFIXES = {".bpe", ".jinja", ".json", ".jsonl", ".md", ".model", ".tiktoken", ".txt", ".vocab"}
_NAMES_WITHOUT_SUFFIX = re.compile(r"(LICEN[CS]E|NOTICE).*", re.IGNORECASE)
# They describe weight files of the folder, or the run that wrote it.
_NOT_CARRIED = re.compile(r".*\.index\.json|adapter_config\.json|trainer_state\.json|\..*")
# Each names files that are not carried: code, and scales of quantized weights.
_NOT_KEPT = ("auto_map", "quantization_config")

_logger = logging.getLogger(__name__)


def add_carried_files(
    own: Mapping[str, JsonValue], source: Path, tensors: Iterable[TensorInfo]
) -> dict[str, JsonValue | bytes]:
    """Add the small files beside the weights in a folder to those that an exporter writes.

    A file of the exporter replaces the carried one, but for `config.json`: its entries come first, and the others are
    kept where both are of the same `model_type`. `dtype` becomes that of the exported tensors.

    Args:
        own: What the exporter writes, by name.
        source: Folder that the weights came from; links are followed, as in a cache of downloads.
        tensors: What is exported, or a part of it.

    Raises:
        UserError: If there is no such folder, a file cannot be read, or its `config.json` is no JSON object.
    """
    try:
        carried = _read(source)
    except OSError as error:
        raise UserError(
            f"the files that came with the weights cannot be read: {error}. Put {source} back, or export without a "
            "source."
        ) from error
    files: dict[str, JsonValue | bytes] = {**carried, **own}
    if CONFIG_NAME in carried:
        files[CONFIG_NAME] = _merged_config(carried[CONFIG_NAME], own.get(CONFIG_NAME), tensors, source=source)
    return files


def _merged_config(carried: bytes, own: JsonValue, tensors: Iterable[TensorInfo], *, source: Path) -> JsonValue | bytes:
    try:
        theirs = json.loads(carried)  # other writers write infinity, which our JSON has no place for
    except ValueError as error:
        raise UserError(f"{source / CONFIG_NAME}: {error}. Expected the config of a checkpoint.") from error
    if not isinstance(theirs, Mapping):
        raise UserError(f"{source / CONFIG_NAME} holds {type(theirs).__name__}; expected a JSON object.")
    if own is not None and (not isinstance(own, Mapping) or own.get("model_type") != theirs.get("model_type")):
        return own
    kept = {key: value for key, value in theirs.items() if own is None or key not in _NOT_KEPT}
    dtype = _main_dtype(tensors)
    kept |= {key: dtype for key in ("dtype", "torch_dtype") if dtype is not None and kept.get(key) is not None}
    merged = {**kept, **(own or {})}
    return carried if merged == theirs else json.dumps(merged, indent=2, sort_keys=True, ensure_ascii=False).encode()


def _read(source: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in sorted(source.iterdir()):
        if not _is_carried(path):
            continue
        if path.stat().st_size > MAX_CARRIED_BYTES:
            _logger.warning("%s is larger than %d bytes: it is not exported.", path, MAX_CARRIED_BYTES)
        else:
            files[path.name] = path.read_bytes()
    return files


def _is_carried(path: Path) -> bool:
    is_known = path.suffix.lower() in _SUFFIXES or _NAMES_WITHOUT_SUFFIX.fullmatch(path.name) is not None
    return is_known and _NOT_CARRIED.fullmatch(path.name) is None and path.is_file()


def _main_dtype(tensors: Iterable[TensorInfo]) -> str | None:
    """The floating-point dtype that most bytes have."""
    sizes: Counter[str] = Counter()
    for info in tensors:
        if info.dtype.is_floating_point:
            sizes[str(info.dtype).removeprefix("torch.")] += info.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)
