"""Check the scripts of the documentation with mypy and pyright, as a user with either of them would.

Each page's Python blocks are one file. mypy checks the examples strictly, except that a module's call returns Any.
pydantic's mypy plug-in is not used, so defaults of configuration fields are those that `dataclass_transform` reads:
`Field(default=...)`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "integration_tests"))
from snippets import blocks  # noqa: E402

PAGES = ("docs/index.md", "docs/quickstart.md", "packages/d9d-loop/README.md", "packages/d9d-all/README.md")
EXAMPLES = tuple(f"examples/{name}.py" for name in ("quickstart", "source_text", "pretrain", "finetune_lora"))


def script(page: Path) -> str:
    """Return the Python blocks of a page as one file, a titled block instead of an earlier one of its name."""
    return "\n".join(block.code for block in blocks(page.read_text(encoding="utf-8")) if block.runs and block.is_python)


def check(name: str, *command: str) -> bool:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    print(f"{name}: {'passes' if done.returncode == 0 else done.stdout + done.stderr}", flush=True)
    return done.returncode == 0


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        scripts = []
        for page in PAGES:
            path = Path(folder) / f"{page.removesuffix('.md').replace('/', '_').replace('-', '_').lower()}.py"
            path.write_text(script(ROOT / page), encoding="utf-8")
            scripts.append(str(path))
        mypy = ("mypy", "--cache-dir", str(Path(folder) / "cache"), "--follow-imports", "silent")
        pyright = ("pyright", "--pythonpath", sys.executable)
        passed = [
            check("mypy, pages", *mypy, *scripts),
            check("mypy --strict, examples", *mypy, "--strict", "--no-warn-return-any", *EXAMPLES),
            check("pyright, pages and examples", *pyright, *scripts, *EXAMPLES),
        ]
    return not all(passed)


if __name__ == "__main__":
    sys.exit(main())
