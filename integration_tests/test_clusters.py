"""The job files for clusters: flags that fit the ranks, and restarts that follow the table of exit codes."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pretrain import PretrainConfig

from d9d_loop.resilience import ExitCode
from d9d_loop.resilience.exit_codes import NOT_RESTARTED, Restart, restart_policy

ROOT = Path(__file__).resolve().parents[1]
NUM_NODES, RANKS_PER_NODE = 2, 8


def _flags(file: str) -> list[str]:
    """Return the flags of the script in a job file, with the variables of a job of two nodes."""
    text = (ROOT / "examples" / "clusters" / file).read_text(encoding="utf-8").replace("\\\n", " ")
    (flags,) = re.findall(r"^[^#\n]*examples/pretrain\.py((?:\s+--[\w.]+ \S+)+)", text, flags=re.MULTILINE)
    return [word.strip('"').replace("$SLURM_JOB_NUM_NODES", str(NUM_NODES)) for word in flags.split()]


@pytest.mark.parametrize("file", ["slurm.sh", "kubernetes.yaml"])
def test_the_mesh_flags_of_a_job_file_match_its_ranks(file: str) -> None:
    flags = _flags(file)
    assert "--mesh.data_parallel_shard" in flags
    config = PretrainConfig.from_cli(ROOT / "examples" / "pretrain.toml", flags)
    mesh = config.mesh.resolve(NUM_NODES * RANKS_PER_NODE)
    assert (mesh.data_parallel_replicate, mesh.data_parallel_shard) == (NUM_NODES, RANKS_PER_NODE)
    assert config.batch.global_size % (NUM_NODES * RANKS_PER_NODE) == 0


_CODES = [0, *ExitCode, 3, 128 + 6, 128 + 9, 128 + 10, 128 + 15]


def _requeues(folder: Path, code: int, *, restarts: int = 0, first: str = "") -> bool:
    """Run the batch script with a `srun` that exits with a code; return True if the script requeues the job."""
    (folder / "srun").write_text(f"#!/bin/sh\n{first}\nexit {code}\n", encoding="utf-8")
    (folder / "scontrol").write_text(f'#!/bin/sh\n[ "$1" != requeue ] || echo > {folder}/requeued\n', encoding="utf-8")
    for name in ("srun", "scontrol"):
        (folder / name).chmod(0o755)
    (folder / "requeued").unlink(missing_ok=True)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "host0",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    subprocess.run(["bash", ROOT / "examples" / "clusters" / "slurm.sh"], cwd=folder, env=environment, check=False)
    return (folder / "requeued").exists()


def test_the_batch_script_requeues_as_the_table_of_exit_codes_says(tmp_path: Path) -> None:
    found = {code: (_requeues(tmp_path, code), _requeues(tmp_path, code, restarts=10)) for code in _CODES}
    expected = {"never": (False, False), "always": (True, True), "limited": (True, False)}
    assert found == {code: expected[restart_policy(code)] for code in _CODES}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scontrol", "srun"], "a folder stayed"


def test_the_batch_script_prefers_the_code_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    write = r"printf '3\n{}' > $D9D_NODE_FOLDER/first_failure"
    assert not _requeues(tmp_path, 143, first=write.format(2))
    assert _requeues(tmp_path, 143, first=write.format(""))


def test_the_failure_policy_of_kubernetes_follows_the_table_of_exit_codes() -> None:
    yaml = pytest.importorskip("yaml", reason="needs yaml, which is optional")
    _, job = yaml.safe_load_all((ROOT / "examples" / "clusters" / "kubernetes.yaml").read_text(encoding="utf-8"))
    rules: list[dict[str, Any]] = job["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert codes == {"FailJob": list(NOT_RESTARTED), "Ignore": [ExitCode.STOPPED]}


def test_the_documentation_has_the_table_of_exit_codes() -> None:
    text = (
        (ROOT / "docs" / "resilience.md").read_text(encoding="utf-8").partition("## Exit codes")[2].partition("##")[0]
    )
    policies: dict[str, Restart] = {"no": "never", "yes": "always", "a limited number of times": "limited"}
    rows = dict(re.findall(r"^\| (\d+|128 \+ n) \|.*\| ([^|]+) \|$", text, flags=re.MULTILINE))
    documented = {int(code): policies[restart] for code, restart in rows.items() if code != "128 + n"}
    assert documented == {code: restart_policy(code) for code in [0, *ExitCode]}
    assert policies[rows["128 + n"]] == restart_policy(128 + 9)
