"""Serve mermaid from the site itself, so that its charts are drawn without a network; remove marks of tests.

`mermaid-tiny-11.17.2.js.gz` is the file `dist/mermaid.tiny.js` of the npm package `@mermaid-js/tiny` 11.17.2 (MIT
license, https://github.com/mermaid-js/mermaid), compressed. The theme loads mermaid from elsewhere only if the page did
not define it before.
"""

import gzip
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

MERMAID = Path(__file__).with_name("mermaid-tiny-11.17.2.js.gz")
SCRIPT = "assets/javascripts/mermaid.js"


_MARK = re.compile(r"^(```\w+) (no-run|exit=\d+)$", re.MULTILINE)  # see integration_tests/snippets.py


def on_page_markdown(markdown: str, **_arguments: Any) -> str:
    """Remove the marks of blocks for the tests: a block with an unknown option would not be rendered as code."""
    return _MARK.sub(r"\1", markdown)


def on_files(files: Files, config: Any) -> Files:
    """Add the script; mkdocs calls this hook before it reads pages."""
    files.append(File.generated(config, SCRIPT, content=gzip.decompress(MERMAID.read_bytes())))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Load the script on pages with a chart, before the theme looks for it."""
    if 'class="mermaid"' not in output:
        return output
    script = f'<script src="{get_relative_url(SCRIPT, page.url)}"></script>'
    head, end, body = output.partition("</head>")
    return f"{head}{script}{end}{body}"
