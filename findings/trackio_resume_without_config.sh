#!/usr/bin/env bash
# trackio: A run that is resumed without a configuration loses its configuration.
# Expected: init(name=..., resume="must") without `config` continues the run with the configuration that it has.
# Happens: The first value that is logged replaces the stored configuration with trackio's own entries.
# Versions: trackio 0.43.0, Python 3.11; seen on 2026-11-29.
# Output seen:
#   trackio 0.43.0
#   before the resume: {'lr': 0.5}
#   after the resume: {}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" trackio==0.43.0
TRACKIO_DIR="$folder/runs" "$folder/env/bin/python" - <<'PYTHON'
import contextlib
import io

import trackio


def log(step: int, **options: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        run = trackio.init("p", name="run", embed=False, auto_log_cpu=False, auto_log_gpu=False, **options)
        run.log({"loss": 1.0}, step=step)
        trackio.finish()


def config() -> dict[str, object]:
    (run,) = trackio.Api().runs("p")
    return {name: value for name, value in run.config.items() if not name.startswith("_")}


print("trackio", trackio.__version__)
log(1, config={"lr": 0.5})
before = config()
log(2, resume="must")
after = config()
print("before the resume:", before)
print("after the resume:", after)
assert before == {"lr": 0.5}, f"changed: {before}"
assert after == {}, f"changed: {after}"
PYTHON
