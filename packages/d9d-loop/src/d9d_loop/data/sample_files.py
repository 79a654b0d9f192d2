"""Samples of data files, in any supported format: one function opens the files of jobs, commands and scripts."""

import csv
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, final

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.data.contents import digest_of_files
from d9d_loop.data.json_lines import JsonLines, JsonObject
from d9d_loop.data.sample_stream import Samples

FileKind: TypeAlias = Literal[".jsonl", ".json", ".parquet", ".csv", "text", "saved dataset"]

_TEXTS = frozenset(
    (
        *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".xml", ".css", ".sql", ".sh"),
        *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".kt", ".js", ".ts", ".rs", ".go", ".rb"),
        *(".toml", ".yaml", ".yml", ".ini"),
    )
)
"""Suffixes of files that are one text each."""
_REMEDIES = {
    ".gz": "Decompress it: gunzip",
    ".zst": "Decompress it: unzstd",
    ".bz2": "Decompress it: bunzip2",
    ".xz": "Decompress it: unxz",
    ".zip": "Decompress it: unzip",
    ".tsv": "Convert it to .csv or .jsonl",
    **dict.fromkeys((".bin", ".idx"), "If it has tokens, only job = pretrain reads them"),
    ".arrow": "Name the folder of save_to_disk that contains it, or convert it to .parquet",
    **dict.fromkeys((".ndjson", ".jsonlines", ".jl"), "If its lines are JSON objects, rename it to .jsonl"),
}


class DataFiles(Samples, Protocol):
    """Map-style dataset of files."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all samples, in order."""
        ...

    def place(self, index: int) -> str:
        """Return the file and the position of a sample in it, for error messages."""
        ...

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        ...

    def contents_digest(self) -> JsonValue:
        """Return a digest of the contents of the files."""
        ...


@final
class FileSamples:
    """Samples of several files, in order. `open_file` opens each file, and its bytes identify the contents."""

    def __init__(self, paths: Sequence[Path], open_file: Callable[[Path], Samples]) -> None:
        self._paths, self._parts = list(paths), list[Any](map(open_file, paths))
        self._ends = list(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number, inside = self._locate(index)
        return self._parts[number][inside]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._parts)

    def place(self, index: int) -> str:
        """Return the file and the position of a sample in it."""
        number, inside = self._locate(index)
        part = self._parts[number]
        return part.place(inside) if isinstance(part, JsonLines) else f"{self._paths[number]}, sample {inside}"

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return self._paths[self._locate(index)[0]]

    def contents_digest(self) -> JsonValue:
        """Return the digest of the files; see `digest_of_files`."""
        return digest_of_files(
            [file for path in self._paths for file in (sorted(path.glob("*.arrow")) if path.is_dir() else [path])]
        )

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the number of the file of a sample, and the index in the file."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is out of range: the files have {len(self)} samples")
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number] - len(self._parts[number]))


@final
class _PlainText:
    """A file that is one text, as a dataset of one sample."""

    def __init__(self, path: Path, field: str) -> None:
        self._path, self._field = path, field

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield self[0]

    def __getitem__(self, index: int) -> dict[str, str]:
        try:
            return {self._field: self._path.read_text(encoding="utf-8-sig")}
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self._path} is not UTF-8 text (byte {error.start}); expected text. Convert it, or choose other "
                "files."
            ) from None


@final
class _NamedClasses:
    """A table whose ClassLabel columns have class names instead of class numbers."""

    def __init__(self, table: Any, names: Mapping[str, Sequence[str]]) -> None:
        self._table, self._names = table, names

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._named, self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._named(self._table[index])

    def _named(self, sample: dict[str, Any]) -> dict[str, Any]:
        numbers = {field: sample[field] for field in self._names}
        is_class = {field: number is not None and number >= 0 for field, number in numbers.items()}  # -1: no class
        return sample | {field: self._names[field][numbers[field]] if is_class[field] else None for field in numbers}


def open_samples(paths: Sequence[Path], *, key: str, text_field: str = "text") -> DataFiles:
    """Open files of one format as a map-style dataset of dictionaries, in the order of the files.

    The paths, which the user passed as `key`, are:

    - `.jsonl`: a JSON object in each line. `.json`: the same, or a list of objects.
    - `.parquet`, and folders of `datasets.save_to_disk`. Both need the package `datasets`. Columns of the type
      `ClassLabel` give the names of the classes.
    - `.csv` with a header: every value is a text, also NA, null and numbers. Needs `datasets` too.
    - `.txt`, `.md`, source code and others: a file is a sample, with its text in the field `text_field`.

    A path that does not exist or cannot be read, an unknown suffix, different formats, and a missing package raise
    `UserError`.
    """
    kinds = {file_kind(path, key=key) for path in paths}
    if len(kinds) != 1:
        found = ", ".join(sorted(kinds)) or "no files"
        raise UserError(f"{key} has {found}; expected files of one format. Convert some, or list one format only.")
    (kind,) = kinds
    if kind == ".jsonl":
        return JsonLines(paths)
    return FileSamples(paths, partial(_open, kind, key=key, text_field=text_field))


def file_kind(path: Path, *, key: str) -> FileKind:
    """Return the format of a file or folder; raise `UserError` if it is none, or does not exist."""
    if not path.exists():
        where = "" if path.is_absolute() else f", relative to {Path.cwd()}"
        raise UserError(f"{key}: {path} does not exist; expected a file or folder with samples. Check it{where}.")
    if path.is_dir():
        return _folder_kind(path, key=key)
    match path.suffix:
        case ".jsonl" | ".json" | ".parquet" | ".csv":
            return path.suffix
        case suffix if suffix in _TEXTS:
            return "text"
    suffix = path.suffix.lower()
    is_known = suffix in _TEXTS | {".jsonl", ".json", ".parquet", ".csv"}
    remedy = f"Rename it to {suffix}" if is_known else _REMEDIES.get(suffix, "If it is one text, rename it to .txt")
    found = f"the suffix {path.suffix}" if path.suffix else "no suffix"
    raise UserError(
        f"{key}: {path} has {found}; expected .jsonl, .json, .parquet, .csv, a text such as .txt or .md, or a folder "
        f"of datasets.save_to_disk. {remedy}."
    )


def is_saved_dataset(folder: Path) -> bool:
    """Return True for a folder of `datasets.save_to_disk`, with or without splits."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _folder_kind(folder: Path, *, key: str) -> FileKind:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(each.name for each in folder.iterdir() if (each / "state.json").is_file())
        first = "train" if "train" in splits else next(iter(splits), "train")
        raise UserError(
            f"{key}: {folder} has the splits {', '.join(splits)}; expected one dataset. Name the folder of a split: "
            f"{folder / first}"
        )
    if is_saved_dataset(folder):
        return "saved dataset"
    if any((folder / name).is_file() for name in ("manifest.json", "index.json")):
        raise UserError(f"{key}: {folder} has tokens; expected samples with text. Only job = pretrain reads tokens.")
    raise UserError(
        f"{key}: {folder} is a folder without state.json; expected a folder of datasets.save_to_disk, or files. List "
        "the files of the folder."
    )


def _open(kind: FileKind, path: Path, *, key: str, text_field: str) -> Samples:
    if kind in _TABLES and find_spec("datasets") is None:
        raise UserError(
            f"{key}: {path} needs the package datasets, which is not installed. Install it: "
            f"{install_hint('d9d-loop', 'huggingface')}, or convert the file to .jsonl."
        )
    try:
        match kind:
            case "text":
                return _PlainText(path, text_field)
            case ".json":
                return _open_json(path)
        return _TABLES[kind](path)
    except UserError:
        raise
    except Exception as error:  # datasets raises the exceptions of many libraries
        why = next(iter(str(error.__cause__ or error).strip().splitlines()), type(error).__name__)
        what = "dataset of save_to_disk" if kind == "saved dataset" else f"{kind} file"
        raise UserError(
            f"{key}: {path} cannot be read: {why} Expected a valid {what}. Name other files, or write it again."
        ) from error


def _open_json(path: Path) -> Samples:
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    if not first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return JsonLines(path)
    objects = json.loads(path.read_bytes())
    for number, each in enumerate(objects):
        if not isinstance(each, dict):
            raise UserError(f"{path}, item {number}: got a {type(each).__name__}; expected a JSON object.")
    return [JsonObject(each) for each in objects]


def _open_csv(path: Path) -> Samples:
    import datasets

    with path.open(encoding="utf-8-sig", newline="") as file:
        header = next(csv.reader(file), [])
    if not header:
        raise UserError(f"{path} is empty; expected a first line with the names of the columns.")
    if repeated := sorted({name for name in header if header.count(name) > 1}):
        raise UserError(f"{path} has more than one column {repeated[0]!r}; expected different names. Rename one.")
    # By default, the reader turns words such as NA into nulls, and guesses the types of columns block by block.
    columns = datasets.Features({name: datasets.Value("string") for name in header})
    return _load("csv", path, features=columns, na_filter=False, encoding="utf-8-sig")


def _load(builder: str, path: Path, **options: Any) -> Samples:
    import datasets

    return datasets.load_dataset(builder, data_files=[str(path)], split="train", **options)


def _open_saved(folder: Path) -> Samples:
    import datasets

    return _with_names(datasets.load_from_disk(str(folder)).with_format(None))


def _with_names(table: Any) -> Samples:
    """Return a table with undecoded images, and with class names instead of class numbers."""
    import datasets

    features = datasets.Features({name: _undecoded(kind) for name, kind in table.features.items()})
    if features != table.features:
        table = datasets.Dataset(table.data, info=datasets.DatasetInfo(features=features))
    names = {field: kind.names for field, kind in table.features.items() if isinstance(kind, datasets.ClassLabel)}
    return _NamedClasses(table, names) if names else table


def _undecoded(feature: Any) -> Any:
    """Return a `datasets` feature that does not decode images: it has their stored bytes and paths."""
    import datasets

    match feature:
        case datasets.Image():
            return datasets.Image(decode=False)
        case dict():
            return {name: _undecoded(each) for name, each in feature.items()}
        case datasets.List() | datasets.LargeList():
            return type(feature)(_undecoded(feature.feature))
    return feature


_TABLES: dict[FileKind, Callable[[Path], Samples]] = {
    ".csv": _open_csv,
    ".parquet": lambda path: _with_names(_load("parquet", path)),
    "saved dataset": _open_saved,
}
