"""The check that the tests of a package alone use all of its public names: only a use counts, an import does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "d9d_tiny/__init__.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from d9d_tiny.all_kinds import Base as Base
    from d9d_tiny.all_kinds import Child as Child
    from d9d_tiny.all_kinds import Config as Config
    from d9d_tiny.all_kinds import Failure as Failure
    from d9d_tiny.all_kinds import Kind as Kind
    from d9d_tiny.all_kinds import Point as Point
    from d9d_tiny.all_kinds import double as double
""",
    "d9d_tiny/all_kinds.py": """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Literal
from pydantic import BaseModel
Kind = Literal["a", "b"]
class Base(ABC):
    @abstractmethod
    def run(self) -> None: ...
class Child(Base):
    def run(self) -> None:
        pass
class Config(BaseModel):
    kind: Kind = "a"
class Failure(Exception):
    pass
@dataclass(frozen=True, slots=True)
class Point:
    x: int
@cache
def double(point: Point) -> int:
    return 2 * point.x
""",
    "at_import.py": "from d9d_tiny.all_kinds import Child, Config, Failure, Point, double\n"
    "double(Point(1)), Child().run(), Config(), Failure()\n",
}
NAMES = ["Base", "Child", "Config", "Failure", "Kind", "Point", "double"]


@pytest.mark.parametrize(
    ("script", "used"),
    [
        ("import at_import", []),
        ("from d9d_tiny.all_kinds import double, Point; double(Point(1))", ["Kind", "Point", "double"]),
        ("from d9d_tiny.all_kinds import *; Child().run(); Config.model_validate({}); Failure()", NAMES[:5]),
        (
            "import os\nfrom d9d_tiny.all_kinds import *\nif os.fork():\n  os.wait()\nelse:\n  Point(1); os._exit(0)",
            ["Kind", "Point"],
        ),
        (
            "from d9d_tiny.all_kinds import *\nimport resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)); Point(1)",
            ["Kind", "Point"],
        ),
    ],
)
def test_a_name_that_is_only_imported_is_not_used(tmp_path: Path, script: str, used: list[str]) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "used").mkdir()
    (tmp_path / "test_tiny.py").write_text("from d9d_tiny import Kind\nkind: Kind = 'a'\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / ".ci"), str(tmp_path)))}
    start = f"import used_names\nused_names.record({str(tmp_path / 'used')!r})\n{script}"
    subprocess.run([sys.executable, "-c", start], env=environment, cwd=tmp_path, check=True)
    command = [sys.executable, ROOT / ".ci" / "used_names.py", "d9d_tiny", "used", "test_tiny.py"]
    check = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    unused = [name for name in NAMES if name not in (*used, "Kind")]
    for name in NAMES:
        assert (f"d9d_tiny.{name} (of d9d_tiny.all_kinds)" in check.stderr) == (name in unused), check.stderr
    assert check.returncode == bool(unused)
