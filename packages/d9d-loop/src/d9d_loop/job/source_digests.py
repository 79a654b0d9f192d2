"""Digests of the user's code and of the model's configuration: a resumed run reports those that have changed."""

import hashlib
import sys
import sysconfig
from pathlib import Path


def source_digests(model_folder: Path | None = None) -> dict[str, str]:
    """Return a digest of the source of each loaded module that is neither installed nor a part of d9d, under its name.

    The name of the script that was started is that of its file. The configuration of a model folder is included.
    """
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    digests: dict[str, str] = {}
    if model_folder is not None and (file := model_folder / "config.json").is_file():
        digests["the model's config.json"] = _digest(file)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or not file.endswith(".py") or name.startswith("d9d_"):
            continue
        path = Path(file).resolve()
        if path.is_file() and installed.isdisjoint(path.parents):
            digests[f"the code of {path.name if name == '__main__' else name}"] = _digest(path)
    return digests


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
