"""The job files for clusters start: their flags fit the ranks that they ask for."""

import re
from pathlib import Path

import pytest
from pretrain import PretrainConfig

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
