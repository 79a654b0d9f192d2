"""Samples from the data files of a job, in any supported format."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from torch.utils.data import Subset

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.data import JsonLines
from d9d_loop.data.samples import Samples

_TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json"}


@final
class PlainTexts:
    """Samples that are whole text files. A sample is a dictionary with the text in one field."""

    def __init__(self, paths: Sequence[Path], *, field: str) -> None:
        self._paths, self._field = list(paths), field

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, str]:
        path = self._paths[index]
        try:
            return {self._field: path.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is not UTF-8 text: {error}; expected .jsonl, .parquet, .csv or UTF-8. Convert the file."
            ) from None


def open_samples(paths: Sequence[Path], *, key: str, text_field: str) -> Samples:
    """Open files of one format as a map-style dataset of dictionaries.

    The paths, whose configuration key is `key`, are `.jsonl` or other text files, tables that `datasets` reads, or one
    folder of `save_to_disk`. The content of a plain text file is in the field `text_field`.

    A path that does not exist or cannot be read, different formats, and a missing package `datasets` raise `UserError`.
    """
    for path in paths:
        if not path.exists():
            where = "" if path.is_absolute() else f", relative to {Path.cwd()}"
            raise UserError(f"{key}: {path} does not exist; expected a file or folder with samples. Check it{where}.")
    kinds = {"folder" if path.is_dir() else path.suffix for path in paths}
    if len(kinds) != 1:
        found = ", ".join(sorted(kinds)) or "no files"
        raise UserError(f"{key} has {found}; expected files of one format. Convert some, or list one format only.")
    (kind,) = kinds
    if kind == ".jsonl":
        return JsonLines(paths)
    if kind != "folder" and kind not in _TABLES:
        return PlainTexts(paths, field=text_field)
    if find_spec("datasets") is None:
        raise UserError(
            f"{key}: {paths[0]} needs the package datasets, which is not installed. Install it: "
            f"{install_hint('d9d-loop', 'huggingface')}, or convert the file to .jsonl."
        )
    import datasets

    try:
        if kind == "folder":
            return datasets.load_from_disk(str(paths[0]))
        return datasets.load_dataset(_TABLES[kind], data_files=[str(path) for path in paths], split="train")
    except Exception as error:  # datasets raises the exceptions of many libraries
        what = "a dataset of save_to_disk" if kind == "folder" else f"a valid {kind} file"
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"{key}: {paths[0]} cannot be read: {why} Expected {what}. Name other files, or write them again."
        ) from error


def split_samples(samples: Samples, held_out: float, *, key: str) -> tuple[Samples, Samples | None]:
    """Split a dataset into training and held-out samples, which are evenly spaced; `None` if `held_out` is 0.

    An empty part raises `UserError`.
    """
    if not held_out:
        return samples, None
    size = len(samples)
    chosen = {int(number / held_out) for number in range(round(size * held_out))}
    if not 0 < len(chosen) < size:
        raise UserError(
            f"{key} = {held_out} holds out {len(chosen)} of {size} samples; expected samples in both parts. Change "
            f"{key}, or set dataset.evaluation_files."
        )
    rest = [index for index in range(size) if index not in chosen]
    data: Any = samples  # torch's annotation requires a Dataset, but its code does not
    return Subset(data, rest), Subset(data, sorted(chosen))
