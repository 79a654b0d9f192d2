#!/bin/bash
# A job that resumes after Slurm stops it: sbatch examples/clusters/slurm.sh
#
# Two minutes before the end of the time limit every rank gets SIGUSR1, and SIGTERM when the job is preempted. The ranks
# agree on a step, save, and exit with code 75; then this script requeues the job. The model is sharded over the ranks of
# a node and replicated over nodes; for another model, choose another mesh (docs/which_layout.md).
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

# One task per rank; the job's store is on the first host of the step. srun signals tasks, but not the processes that a
# launcher starts in them. A requeued job keeps its job ID, so it has the same run name and finds its checkpoints.
# srun takes --cpus-per-task only from its own options or from this variable (Slurm 22.05 and newer).
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# srun returns the largest exit code of all tasks. The ranks write the code of the rank that failed first to this folder.
# Slurm may kill this script; the run that it requeues then removes the folder.
export D9D_NODE_FOLDER=$PWD/.first-failure-$SLURM_JOB_ID
trap 'rm -rf "$D9D_NODE_FOLDER"' EXIT
rm -rf "$D9D_NODE_FOLDER"
mkdir "$D9D_NODE_FOLDER"
srun --kill-on-bad-exit=1 python examples/pretrain.py --run.name "pretrain-$SLURM_JOB_ID" \
    --mesh.data_parallel_replicate "$SLURM_JOB_NUM_NODES" --mesh.data_parallel_shard -1 --batch.global_size 64
code=$?
first=$(sed -n 2p "$D9D_NODE_FOLDER/first_failure" 2> /dev/null)
if [ "$code" -ne 0 ]; then code=${first:-$code}; fi

# The last job of an array has the ID of the array, and to requeue this ID requeues all of its jobs.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

case $code in  # the table of docs/resilience.md
    0 | 2 | 130) ;;  # finished, a user error, or Ctrl-C
    75) scontrol requeue "$job" ;;  # stopped by a signal, after a save
    *)  # an exception, or a rank that hung or was killed: restart, a limited number of times
        if [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then scontrol requeue "$job"; fi ;;
esac
exit $code
