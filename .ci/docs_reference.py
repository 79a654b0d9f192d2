"""Generate the reference of d9d_loop, one page per topic, while the documentation is built.

The topic of a public name is the folder or module that defines it, so that a new name is on a page as soon as
`d9d_loop` imports it.
"""

import ast
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from d9d_dist.lazy_exports import exports

SOURCE = Path(__file__).resolve().parents[1] / "packages" / "d9d-loop" / "src" / "d9d_loop"
TOPICS = {
    "job": ("Trainer and job", {"job", "engine", "task", "cli_main", "evaluation_mode", "preset_job"}),
    "model": ("Models", {"model"}),
    "config": ("Configuration models", {"config", "section"}),
    "data": ("Data", {"data"}),
    "events": ("Events", {"event_bus", "events"}),
    "optimizers": ("Optimizers", {"optimizers"}),
    "lr": ("Learning rates", {"lr"}),
    "losses": ("Losses", {"losses"}),
    "tasks": ("Tasks", {"tasks"}),
    "jobs": ("Jobs on text", {"jobs", "user_frames"}),
    "inference": ("Inference", {"inference"}),
    "resilience": ("Resilience", {"resilience"}),
    "planning": ("Planning", {"planning"}),
    "testing": ("The oracle", {"testing"}),
}
"""Title of each page, and the modules of d9d_loop that it documents."""

SHADOWED = {"cli_main"}
"""Functions that have the name of their module: the reference finds them only there."""


def exported(package: Path) -> dict[str, str]:
    """Return the public names of a package, each with the module that defines it."""
    path = package / "__init__.py"
    if not path.exists():
        return {}
    return exports(ast.parse(path.read_text(encoding="utf-8")))


def pages() -> dict[str, str]:
    """Return the text of each page by topic; topics without public names have no page."""
    left, texts = exported(SOURCE), {}
    for topic, (title, modules) in TOPICS.items():
        names = sorted(name for name, module in left.items() if module.split(".")[1] in modules)
        for name in names:
            del left[name]
        inner = exported(SOURCE / topic) if topic != "job" else {}
        lines = [f"# {title}", "", "Part of the public interface of `d9d_loop`."]
        lines += [
            line
            for name in names
            if name in SHADOWED
            for line in _directive(f"d9d_loop.{name}.{name}", "show_root_heading: true", "show_root_full_path: false")
        ]
        plain = [name for name in names if name not in SHADOWED and name not in inner]
        lines += _directive("d9d_loop", f"members: [{', '.join(plain)}]") if plain else []
        if inner:
            lines += ["", f"## d9d_loop.{topic}", "", f"Imported from `d9d_loop.{topic}`."]
            lines += _directive(f"d9d_loop.{topic}", "heading_level: 3")
        if names or inner:
            texts[topic] = "\n".join(lines) + "\n"
    outside = {name: module for name, module in left.items() if module.startswith("d9d_loop")}
    assert not outside, f"no page of the reference documents {outside}: add their modules to TOPICS in {__file__}"
    return texts


def _directive(name: str, *options: str) -> list[str]:
    return ["", f"::: {name}", "    options:", *(f"      {option}" for option in options)]


def on_config(config: Any) -> Any:
    """Add the pages to the navigation, beside the page of the package."""
    found = pages()
    for section in config["nav"]:
        for entries in section.values():
            if isinstance(entries, list):
                _replace_loop(entries, found)
    return config


def _replace_loop(entries: list[Any], found: dict[str, str]) -> None:
    for entry in entries:
        if entry == {"d9d_loop": "reference/d9d_loop.md"}:
            entry["d9d_loop"] = [
                "reference/d9d_loop.md",
                *({TOPICS[topic][0]: f"reference/d9d_loop/{topic}.md"} for topic in found),
            ]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages; mkdocs calls this hook before it reads pages."""
    for topic, text in pages().items():
        files.append(File.generated(config, f"reference/d9d_loop/{topic}.md", content=text))
    return files
