#!/usr/bin/env bash
# mlflow: The last value of a metric stays that of the highest step after a run goes back.
# Expected: run.data.metrics holds what was logged last, so that a run that resumes at an earlier step shows
#   its new value.
# Happens: It holds the value of the highest step ever logged. After a return from step 3 to step 2 the run
#   table and searches show the loss of the abandoned steps until the run passes them, and the history holds
#   both values of a step.
# Versions: mlflow-skinny 3.17.2, sqlalchemy 2.1.9, alembic 1.20.1, Python 3.11; seen on 2026-11-28.
# Output seen:
#   mlflow 3.17.2
#   last value after steps 1, 2, 3, and 2 again: 30.0
#   history: step 1: 10.0, step 2: 20.0, step 3: 30.0, step 2: 25.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" mlflow-skinny==3.17.2 sqlalchemy==2.1.9 alembic==1.20.1
"$folder/env/bin/python" - <<'PYTHON'
import os
import tempfile

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
import mlflow

print("mlflow", mlflow.__version__)

with tempfile.TemporaryDirectory() as folder:
    mlflow.set_tracking_uri(f"sqlite:///{folder}/runs.db")
    with mlflow.start_run() as run:
        for step, value in ((1, 10.0), (2, 20.0), (3, 30.0), (2, 25.0)):
            mlflow.log_metric("loss", value, step=step)
    client = mlflow.MlflowClient()
    last = client.get_run(run.info.run_id).data.metrics["loss"]
    history = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")]
print("last value after steps 1, 2, 3, and 2 again:", last)
print("history:", ", ".join(f"step {step}: {value}" for step, value in history))
assert last == 30.0, f"changed: {last}"
assert sorted(history) == [(1, 10.0), (2, 20.0), (2, 25.0), (3, 30.0)], f"changed: {history}"
PYTHON
