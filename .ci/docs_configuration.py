"""Generate the reference of every configuration field from the pydantic models while the documentation is built."""

from typing import Any

from mkdocs.structure.files import File, Files
from pydantic import BaseModel

from d9d_loop import InferenceConfig, InferencePresetConfig, TrainerConfig
from d9d_loop.config._config_help import _defaults, _descriptions, _entries, _only_for, _types
from d9d_loop.config.preset import PresetConfig

PAGES = (
    ("Training", TrainerConfig, None, "`TrainerConfig`, which a job's own configuration subclasses."),
    ("Presets", PresetConfig, TrainerConfig, "`PresetConfig` of `d9d-train`: the fields above, and these."),
    ("Inference", InferenceConfig, None, "`InferenceConfig`."),
    (
        "Presets of inference",
        InferencePresetConfig,
        InferenceConfig,
        "`InferencePresetConfig` of `python -m d9d_loop.inference`: the fields above, and these.",
    ),
)


def tabulate_fields(model: type[BaseModel], *, without: type[BaseModel] | None = None) -> str:
    """Return a Markdown table of the keys, except those of `without`, with type, default and description.

    Keys of the items of a list are written as `list[].key`.
    """
    known = {} if without is None else _entries(without)
    lines = ["| Key | Type | Default | What it is for |", "|---|---|---|---|"]
    for name, variants in _entries(model).items():
        if name not in known:
            what = " ".join([*_descriptions(variants), _only_for(variants).strip()]).strip()
            types = " or ".join(f"`{each}`" for each in _types(variants).split(" | "))
            cells = [f"`{name}`", types, _defaults(variants).removeprefix("default "), what]
            lines.append("| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |")
    return "\n".join(lines)


def reference() -> str:
    """Return the page."""
    lines = ["# Configuration", "", "Made from the models of this version; `--help` prints the same."]
    for title, model, without, what in PAGES:
        lines += ["", f"## {title}", "", what, "", tabulate_fields(model, without=without)]
    return "\n".join(lines) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the page; mkdocs calls this hook before it reads pages."""
    files.append(File.generated(config, "reference/configuration.md", content=reference()))
    return files
