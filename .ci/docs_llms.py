"""Generate llms.txt: one line per page of the site, for readers that are programs (https://llmstxt.org)."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HEAD = """# d9d

> Distributed training for PyTorch in eight small packages. A layout changes where the numbers are computed, and the
> numbers only by rounding. Models are plain nn.Modules; parallelism is DTensor on DeviceMesh; the same script runs on
> one CPU and on a cluster. Everything has run on CPUs over gloo, nothing on an accelerator yet.

The packages are installed from a checkout with `pip install ./packages/*`. They are not on PyPI, where the name `d9d`
belongs to another project. Distribution `d9d-x` is imported as `d9d_x`.
"""


def first_sentence(text: str) -> str:
    """Return the first sentence of a page, without links."""
    paragraphs = [each.strip() for each in re.sub(r"```.*?```", "", text, flags=re.DOTALL).split("\n\n")]
    plain = [each for each in paragraphs if each and not each.startswith(("#", "|", ":::", "<", "!", "-"))]
    if not plain:
        return ""
    sentence = re.sub(r"\s+", " ", re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", plain[0])).replace("**", "")
    return re.split(r"(?<=\.) ", sentence)[0]


def entries(nav: list[Any], files: dict[str, str], depth: int = 2) -> list[str]:
    """Return the lines of a part of the navigation."""
    lines = []
    for item in nav:
        for title, value in item.items() if isinstance(item, dict) else [("", item)]:
            if isinstance(value, list):
                lines += ["", f"{'#' * depth} {title}", "", *entries(value, files, depth + 1)]
            elif value in files:
                url = "" if value == "index.md" else f"{value.removesuffix('.md')}/"
                what = first_sentence(files[value])
                lines.append(f"- [{title or value.removesuffix('.md')}](./{url})" + (f": {what}" if what else ""))
    return lines


def on_files(files: Files, config: Any) -> Files:
    """Add the file; mkdocs calls this hook after those that generate pages."""
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    text = "\n".join([HEAD, *entries(config["nav"], texts)]) + "\n"
    files.append(File.generated(config, "llms.txt", content=re.sub(r"\n{3,}", "\n\n", text)))
    return files


if __name__ == "__main__":
    print(first_sentence(Path("docs/index.md").read_text(encoding="utf-8")))
