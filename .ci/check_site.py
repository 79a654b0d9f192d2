"""Build the site and look at every page in headless Chromium, without a network.

    uv run --group docs --group site python .ci/check_site.py                 # build and check
    uv run --group docs --group site python .ci/check_site.py --site FOLDER   # check a site that is built

Needs Chromium on the PATH (Debian: `apt install chromium`); `--pictures FOLDER` keeps screenshots. Checked are: no page
is wider than a phone of 360 pixels; code of 120 columns is not cut at 1280; no broken picture, link or anchor; charts
are drawn; nothing is requested from elsewhere; the search finds the pages that answer the questions below.
"""

import argparse
import contextlib
import functools
import http.server
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

from playwright.sync_api import Page, TimeoutError, ViewportSize, sync_playwright  # noqa: A004 - playwright's name

ROOT = Path(__file__).resolve().parents[1]
PHONE: ViewportSize = {"width": 360, "height": 740}
DESKTOP: ViewportSize = {"width": 1280, "height": 800}
SHOWN = ("", "quickstart/", "which_layout/", "coming_from/", "support_matrix/", "training/", "reference/configuration/")
QUESTIONS = {
    "resume a killed job": ("job_checkpoints", "training", "quickstart", "resilience"),
    "exit code 75": ("resilience", "when_something_fails"),
    "fine-tune with LoRA": ("peft", "fine_tune", "quickstart"),
    "hugging face model": ("hugging_face_model",),
    "jsonl dataset": ("your_dataset", "data"),
    "kubernetes": ("many_hosts", "resilience"),
    "slurm": ("many_hosts", "resilience"),
    "out of memory": ("when_something_fails",),
    "which layout": ("which_layout",),
    "ring attention": ("parallelism", "attention"),
    "zero bubble schedule": ("pipeline",),
    "expert parallelism": ("moe",),
    "gradient clipping": ("parallelism", "training"),
    "loss spike": ("resilience",),
    "learning rate warmup": ("optimizers", "interfaces"),
    "weights and biases": ("metrics",),
    "packed documents": ("data", "attention"),
    "deepspeed": ("coming_from", "comparison"),
    "float8": ("activation_checkpointing", "comparison"),
    "tied embeddings": ("support_matrix", "heads", "decoders", "own_model", "pipeline"),
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        pass


class Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.targets += [values[name] for name in ("href", "src") if name in values]


def read_links(path: Path) -> Links:
    links = Links()
    links.feed(path.read_text(encoding="utf-8"))
    return links


def broken_links(site: Path) -> Iterator[str]:
    """Yield links to files and anchors that do not exist."""
    pages = {path: read_links(path) for path in sorted(site.rglob("*.html"))}
    for path, links in pages.items():
        if path.name == "404.html":
            continue
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or not target:
                continue
            absolute, fragment = urldefrag(urljoin(f"/{path.relative_to(site).as_posix()}", target))
            file = site / unquote(urlsplit(absolute).path).lstrip("/")
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                yield f"{path.relative_to(site)}: {target} does not exist"
            elif fragment and file in pages and unquote(fragment) not in pages[file].anchors:
                yield f"{path.relative_to(site)}: {target} has no such anchor"


def check_page(page: Page, url: str) -> Iterator[str]:
    """Yield what is wrong with a page at the width of a phone, and of a desktop."""
    page.set_viewport_size(PHONE)
    page.goto(url)
    width = page.evaluate("document.documentElement.scrollWidth")
    if width > PHONE["width"]:
        widest = page.evaluate(
            f"""[...document.querySelectorAll('.md-content *')].filter(e => e.getBoundingClientRect().right >
            {PHONE["width"]} && !e.closest('pre, .md-typeset__scrollwrap')).slice(0, 2).map(
            e => e.tagName + ': ' + e.textContent.trim().slice(0, 60))"""
        )
        yield f"is {width} pixels wide on a phone: {widest}"
    page.set_viewport_size(DESKTOP)
    found: list[str] = page.evaluate(
        """[...document.querySelectorAll('pre > code')].filter(
            e => !e.closest('.compare') && e.scrollWidth > e.clientWidth + 1 &&
            e.textContent.split('\\n').every(line => line.length <= 120)
        ).map(e => 'cuts code: ' + e.textContent.slice(0, 60))"""
    )
    found += page.evaluate(
        """[...document.images].filter(e => e.complete && !e.naturalWidth).map(e => 'broken picture: ' + e.src)"""
    )
    yield from found
    if page.evaluate("document.querySelectorAll('pre.mermaid, div.mermaid').length"):
        page.wait_for_timeout(1500)
        heights = page.evaluate("[...document.querySelectorAll('.mermaid')].map(e => [e.tagName, e.offsetHeight])")
        if any(tag != "DIV" or height < 40 for tag, height in heights):
            yield f"has a chart that is not drawn: {heights}"


def check_search(page: Page, base: str) -> Iterator[str]:
    """Yield the questions whose page is not among the first five results."""
    page.set_viewport_size(DESKTOP)
    for question, expected in QUESTIONS.items():
        page.goto(f"{base}?q={quote(question)}")
        with contextlib.suppress(TimeoutError):
            page.wait_for_selector(".md-search-result__item", state="attached", timeout=20_000)
        found = page.evaluate(
            "[...document.querySelectorAll('.md-search-result__item > a')].slice(0, 5).map(e => e.pathname)"
        )
        if not any(name in path.split("/") for name in expected for path in found):
            yield f"the search for {question!r} finds {found}; expected one of {expected}"


def check(site: Path, pictures: Path | None) -> list[str]:
    """Return all problems of a built site."""
    problems = list(broken_links(site))
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}/"
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page()
            page.set_default_timeout(120_000)  # machines that run tests are busy
            page.on("request", lambda request: outside.add(request.url) if not request.url.startswith(base) else None)
            outside: set[str] = set()
            pages = sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))
            for name in pages:
                url = base if name == "." else f"{base}{name}/"
                problems += [f"{name} {problem}" for problem in check_page(page, url)]
            problems += check_search(page, base)
            problems += [f"is requested from elsewhere: {url}" for url in sorted(outside) if url.startswith("http")]
            if pictures is not None:
                take_pictures(page, base, pictures)
            browser.close()
        server.shutdown()
    print(f"{len(pages)} pages, {len(QUESTIONS)} questions")
    return problems


def take_pictures(page: Page, base: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHOWN:
        for width, size in (("phone", PHONE), ("desktop", DESKTOP)):
            page.set_viewport_size(size)
            page.goto(base + name)
            page.wait_for_timeout(1000)
            page.screenshot(path=folder / f"{name.strip('/').replace('/', '_') or 'index'}_{width}.png")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, help="folder of a built site; built by default")
    parser.add_argument("--pictures", type=Path, help="folder for screenshots")
    options = parser.parse_args(arguments)
    if shutil.which("chromium") is None:
        print("skipped: no chromium on the PATH (Debian: apt install chromium)")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if options.site is None:
            from mkdocs.commands.build import build  # noqa: PLC0415 - not needed for a built site
            from mkdocs.config import load_config  # noqa: PLC0415

            build(load_config(str(ROOT / "mkdocs.yml"), site_dir=folder))
        problems = check(options.site or Path(folder), options.pictures)
    print("\n".join(problems) or "no problem")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
