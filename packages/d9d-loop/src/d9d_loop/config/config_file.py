"""Strict reader of TOML, JSON and (with the extra `yaml`) YAML configuration files, which may include others."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from d9d_dist import UserError
from d9d_dist.errors import may_pass
from d9d_dist.install_hint import install_hint

_Values = dict[str, Any]

_DISCRIMINATORS = ("kind", "use")
"""Discriminator keys: their value determines the other keys of a section."""


def read_config_file(file: str | Path) -> _Values:
    """Read a `.toml`, `.json`, `.yaml` or `.yml` file and the files that it includes, as nested dicts.

    `include = ["base.toml"]` at the top level includes other files, by paths relative to this file. Keys of this file
    override those of included files, and later included files override earlier ones. Sections are merged; other values
    are replaced. A section is also replaced if its `kind` or `use` differs, because then its keys differ. The result
    lacks `include` and `$schema`.

    Raises:
        UserError: If a file cannot be read, has an unknown extension, is malformed, repeats a key or includes itself;
            if YAML has tags, anchors or aliases, or PyYAML is not installed.
    """
    return _read(Path(file), ())


def _read(path: Path, included_by: Sequence[Path]) -> _Values:
    if path.resolve() in included_by:
        chain = " -> ".join(str(one) for one in [*included_by, path.resolve()])
        raise UserError(f"configuration file {path} includes itself: {chain}. Remove one include.")
    values = _parse(path, included_by)
    names = values.pop("include", [])
    values.pop("$schema", None)  # used by editors only
    names = [names] if isinstance(names, str) else names
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f"configuration file {path}: include = {names!r}; expected a list of files.")
    merged: _Values = {}
    for name in names:
        merged = merge(merged, _read(path.parent / name, [*included_by, path.resolve()]))
    return merge(merged, values)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> _Values:
    """Merge two configurations; `over` wins. A section with another `kind` or `use` replaces the section of `base`."""
    if any(key in base and key in over and base[key] != over[key] for key in _DISCRIMINATORS):
        return dict(over)
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(below, value) if both else value
    return merged


def _parse(path: Path, included_by: Sequence[Path]) -> _Values:
    if path.suffix not in _PARSERS:
        raise UserError(f"configuration file {path}: expected a .toml, .json or .yaml file.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and may_pass(error):
            raise
        why = error.strerror if isinstance(error, OSError) else error
        where = "" if path.is_absolute() else f", relative to {Path.cwd()}"
        source = f", included by {included_by[-1]}," if included_by else ""
        raise UserError(f"configuration file {path}{source} cannot be read: {why}. Check the path{where}.") from None
    try:
        values = _PARSERS[path.suffix](text)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"configuration file {path} cannot be parsed: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"configuration file {path} contains a {type(values).__name__}; expected sections and keys.")
    return values


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> _Values:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)} is duplicated")
    return values


def _parse_yaml(text: str) -> Any:
    try:
        from d9d_loop.config._strict_yaml import parse_yaml  # noqa: PLC0415  (PyYAML is optional)
    except ImportError:
        raise UserError(
            f"a .yaml configuration file needs PyYAML, which is not installed. Install it: "
            f"{install_hint('d9d-loop', 'yaml')}, or write the file as .toml."
        ) from None
    return parse_yaml(text)


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".json": partial(json.loads, object_pairs_hook=_reject_duplicate_keys),
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}
