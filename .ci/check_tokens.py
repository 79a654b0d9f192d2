"""Compare `open_tokens` and `write_tokens` with the libraries of the formats, element by element.

    uv run --no-sync python .ci/check_tokens.py            # all libraries
    uv run --no-sync python .ci/check_tokens.py megatron

Each library runs `tokens_of_libraries.py` in an environment of its own, with pinned versions.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from d9d_loop.data import TokenFileWriter, open_tokens, write_tokens

_COMMON = ("torch==2.15.0", "torchvision==0.29.2", "numpy<3")
LIBRARIES = {
    "megatron": ("megatron-core==0.16.1",),
    "streaming": ("mosaicml-streaming==0.13.0",),
    "litdata": ("litdata==0.2.76",),
}
VOCAB_SIZE = 120  # each dtype holds it
_LENGTHS = (5, 0, 1, 300, 2, 17, 0, 40, 8, 9, 1000, 0)


def check(library: str, folder: Path) -> int:
    """Compare the documents of all datasets of a library; return their number."""
    numbers = random.Random(0)  # noqa: S311 - no cryptography
    documents = [[numbers.randrange(VOCAB_SIZE) for _ in range(length)] for length in _LENGTHS]
    (folder / "documents.json").write_text(json.dumps(documents))
    with TokenFileWriter(folder / "own", vocab_size=VOCAB_SIZE) as writer:
        for tokens in filter(None, documents):
            writer.append(tokens)
    write_tokens(open_tokens(folder / "own"), folder / "d9d", "megatron", vocab_size=VOCAB_SIZE)
    command = ["uv", "run", "--isolated", "--no-project", "--python", "3.11"]
    command += [word for each in (*_COMMON, *LIBRARIES[library]) for word in ("--with", each)]
    script = Path(__file__).with_name("tokens_of_libraries.py")
    subprocess.run([*command, "python", str(script), library, str(folder)], check=True, capture_output=True)
    read = json.loads((folder / "read.json").read_text())
    for name, expected in read.items():
        file = open_tokens(folder / name, vocab_size=VOCAB_SIZE)
        found = [file[index]["tokens"].tolist() for index in range(len(file))]
        assert found == expected, f"{library}, {name}: the documents differ"
    return len(read)


def main(libraries: list[str]) -> None:
    """Check the libraries, and print the number of datasets that are equal."""
    for library in libraries or LIBRARIES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{library}: {check(library, Path(folder))} datasets equal", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
