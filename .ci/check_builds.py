"""Compile `grouped_gemm` as its own build would, and compare the outcome with the hint that d9d-moe prints.

    uv run --no-sync python .ci/check_builds.py

g++ compiles the source with the headers of torch to an object, without nvcc, for the C++ standard that its `setup.py`
asks for, and for C++20. DeepEP is not compiled here: its host code needs headers of a CUDA toolkit
(`crt/host_defines.h`) that the wheels of torch do not have, and it is installed from a repository.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

from torch.utils.cpp_extension import include_paths

from d9d_moe.grouped_linear import GROUPED_GEMM_INSTALL, _grouped_gemm_hint

PACKAGE = "grouped_gemm==0.3.0"


def source(folder: Path) -> Path:
    """Download the source distribution, and return its folder."""
    command = ["uv", "run", "--no-sync", "--with", "pip", "--with", "setuptools", "python", "-m", "pip", "download"]
    command += ["--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True, env={**os.environ, "TORCH_CUDA_ARCH_LIST": "9.0"})
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def error_of(root: Path, standard: str) -> str:
    """Return the first error of the compiler, or an empty text."""
    headers = [*include_paths(), sysconfig.get_paths()["include"], str(root / "csrc")]
    command = ["g++", "-x", "c++", f"-std={standard}", "-DTORCH_EXTENSION_NAME=built", "-fPIC", "-c"]
    command += [*(f"-I{each}" for each in headers), str(root / "csrc" / "ops.cu"), "-o", str(root / "ops.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    return next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        root = source(Path(temporary))
        found = re.search(r"-std=(c\+\+\d+)", (root / "setup.py").read_text(encoding="utf-8"))
        standard = found[1] if found else "c++20"  # the default of torch's build
        error, modern = error_of(root, standard), error_of(root, "c++20")
    hint = _grouped_gemm_hint()
    print(f"{PACKAGE} with {standard}: {error or 'compiles'}\n... with c++20: {modern or 'compiles'}\nhint: {hint}")
    is_named = GROUPED_GEMM_INSTALL in hint
    return not (is_named is (not error) and not modern)


if __name__ == "__main__":
    sys.exit(main())
