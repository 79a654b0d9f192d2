"""Copying of the small files beside a model's weights into an export: tokenizer, generation config, license.

Files are copied byte for byte. `config.json` is merged: entries that the exporter does not write keep their values.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from d9d_dist import UserError
from d9d_dist.errors import may_pass
from d9d_state.json_value import JsonValue
from d9d_state.tensor_info import TensorInfo

CONFIG_NAME = "config.json"
MAX_CARRIED_BYTES = 256 * 2**20
"""Size limit of a copied file, in bytes. Tokenizer files are typically below 20 MiB."""

# Text files, and sentencepiece and tiktoken tokenizers. Neither source code nor weight formats.
_SUFFIXES = {".bpe", ".jinja", ".json", ".jsonl", ".md", ".model", ".tiktoken", ".txt", ".vocab"}
_NAMES_WITHOUT_SUFFIX = re.compile(r"(LICEN[CS]E|NOTICE).*", re.IGNORECASE)
# Hidden files, and files that describe the weight files or the run that wrote them.
_NOT_CARRIED = re.compile(r".*\.index\.json|adapter_config\.json|trainer_state\.json|\..*")
_TOKENIZER = re.compile(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|chat_template|spiece|.*\.model|tekken).*|generation_config\.json"
)
# Config entries that refer to files that are not copied: source code, and scales of quantized weights.
_DROPPED_CONFIG_KEYS = ("auto_map", "quantization_config")

_logger = logging.getLogger(__name__)


def add_carried_files(
    own: Mapping[str, JsonValue], source: Path, tensors: Iterable[TensorInfo]
) -> dict[str, JsonValue | bytes]:
    """Return the small files of a source folder merged with `own`, the exporter's files, which take precedence.

    Exception: `config.json` is merged if `own` has none, or one with the same `model_type`. Entries that only the
    source has are kept, except `auto_map` and `quantization_config` if `own` has a `config.json`. `dtype` becomes the
    main dtype of the exported tensors. Raises `UserError` if the source is unreadable or its `config.json` is not an
    object.
    """
    try:
        carried = _read(source)
    except OSError as error:
        if may_pass(error):
            raise
        raise UserError(
            f"the files beside the source weights cannot be read: {error}. Restore {source}, or export without source=."
        ) from error
    files: dict[str, JsonValue | bytes] = {**carried, **own}
    if CONFIG_NAME in carried:
        files[CONFIG_NAME] = _merged_config(carried[CONFIG_NAME], own.get(CONFIG_NAME), tensors, source=source)
    return files


def earlier_tokenizer(export: Path) -> dict[str, bytes]:
    """Return the files of an earlier export for text: its tokenizer, and `generation_config.json` with its end tokens.

    A new export keeps them unless it has its own.
    """
    if not export.is_dir():
        return {}
    found = (path for path in sorted(export.iterdir()) if _TOKENIZER.fullmatch(path.name) and _is_carried(path))
    return {path.name: path.read_bytes() for path in found}


def _merged_config(carried: bytes, own: JsonValue, tensors: Iterable[TensorInfo], *, source: Path) -> JsonValue | bytes:
    try:
        theirs = json.loads(carried)  # not parse_json: other writers emit Infinity and NaN
    except ValueError as error:
        raise UserError(
            f"{source / CONFIG_NAME}: {error}. Expected the config.json of a Hugging Face model."
        ) from error
    if not isinstance(theirs, Mapping):
        raise UserError(f"{source / CONFIG_NAME} contains a {type(theirs).__name__}; expected a JSON object.")
    if own is not None and (not isinstance(own, Mapping) or own.get("model_type") != theirs.get("model_type")):
        return own
    kept = {key: value for key, value in theirs.items() if own is None or key not in _DROPPED_CONFIG_KEYS}
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
            _logger.warning("%s is larger than %d bytes; it is not copied to the export.", path, MAX_CARRIED_BYTES)
        else:
            files[path.name] = path.read_bytes()
    return files


def _is_carried(path: Path) -> bool:
    is_known = path.suffix.lower() in _SUFFIXES or _NAMES_WITHOUT_SUFFIX.fullmatch(path.name) is not None
    return is_known and _NOT_CARRIED.fullmatch(path.name) is None and path.is_file()


def _main_dtype(tensors: Iterable[TensorInfo]) -> str | None:
    """Return the floating-point dtype with the most bytes; `None` if no tensor is floating-point."""
    sizes: Counter[str] = Counter()
    for info in tensors:
        if info.dtype.is_floating_point:
            sizes[str(info.dtype).removeprefix("torch.")] += info.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)
