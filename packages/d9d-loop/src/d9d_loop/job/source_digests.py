"""Digests of the user's code, by which a resumed run reports that the code has changed."""

import hashlib
import sys
import sysconfig
from pathlib import Path


def source_digests() -> dict[str, str]:
    """Return a digest of the source of each loaded module that is neither installed nor a part of d9d, by module name.

    The script that was started has the name of its file.
    """
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    digests: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or not file.endswith(".py") or name.startswith("d9d_"):
            continue
        path = Path(file).resolve()
        if path.is_file() and installed.isdisjoint(path.parents):
            digests[path.name if name == "__main__" else name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return digests
