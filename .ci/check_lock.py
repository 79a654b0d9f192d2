"""Check that uv.lock refers only to uv's default index, and to one host for its files."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def default_index() -> str:
    """uv's default index, as written in the lock."""
    text = subprocess.run(["uv", "help", "lock"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"default package index \(by default: <(\S+)>\)", text)
    assert found is not None, "uv's help no longer names its default index"
    return found[1]


def problems(lock: dict[str, Any], index: str) -> Iterator[str]:
    """Return all entries of a lock that are not from the index."""
    hosts: set[str] = set()
    for package in lock["package"]:
        name, source = package["name"], package["source"]
        if set(source) - {"registry", "editable", "virtual"} or source.get("registry", index) != index:
            yield f"{name} comes from {source}; expected the default index or the workspace"
        for file in [package.get("sdist"), *package.get("wheels", [])]:
            if file is not None and "hash" not in file:
                yield f"{name} has a file without a hash"
            if file is not None:
                hosts.add(urlsplit(file["url"])._replace(path="", query="", fragment="").geturl())
    if len(hosts) > 1:
        yield f"files come from {', '.join(sorted(hosts))}; expected one host"
    for host in hosts:
        parts = urlsplit(host)
        if parts.scheme != "https" or parts.netloc != parts.hostname or "." not in parts.netloc:
            yield f"files come from {host}; expected https and a plain public host name"


def main() -> int:
    """Print the problems, and return the exit code."""
    lock = tomllib.loads(Path("uv.lock").read_text(encoding="utf-8"))
    found = list(problems(lock, default_index()))
    print("\n".join(found) or f"uv.lock: {len(lock['package'])} packages, all from the default index")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
