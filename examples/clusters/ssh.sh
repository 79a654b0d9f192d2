#!/bin/bash
# A job on hosts that ssh reaches, without a scheduler: RANKS=8 examples/clusters/ssh.sh pretrain node0 node1
#
# The arguments are the name of the run and the hosts. All hosts need this folder and its environment at the same paths,
# and accept a key. Ctrl-C, or SIGTERM to this script, stops the launchers: all ranks save, and the script exits with
# code 75. The same command resumes the run. The store of the job is on the first host, which the others reach by name.
name=$1
hosts=("${@:2}")
ranks=${RANKS:-8}
port=$((20000 + $(cksum <<< "$name" | cut -d ' ' -f 1) % 20000))

# To end ssh does not signal the command on the host. The pattern does not match ssh and pkill, which have this text too.
stop() {
    stopped=yes
    for host in "${hosts[@]}"; do ssh -n "$host" "pkill -TERM -f '^[^ ]*python.* --rdzv-id $name '" & done
}
trap stop INT TERM HUP

processes=()
for host in "${hosts[@]}"; do
    ssh -n -o BatchMode=yes -o ServerAliveInterval=15 "$host" "cd '$PWD' && PATH='$PATH' exec d9d-torchrun \
        --nnodes ${#hosts[@]} --nproc-per-node $ranks --max-restarts 3 \
        --rdzv-id $name --rdzv-backend c10d --rdzv-endpoint ${hosts[0]}:$port \
        examples/pretrain.py --run.name $name --batch.global_size 64 \
        --mesh.data_parallel_replicate ${#hosts[@]} --mesh.data_parallel_shard -1" &
    processes+=($!)
done

code=0
for process in "${processes[@]}"; do
    stopped=
    wait "$process"
    found=$?
    if [ -n "$stopped" ]; then  # a signal has ended the wait, not the process
        wait "$process"
        found=$?
    fi
    # 125 on a host means that a host failed before
    if [ "$found" -ne 0 ] && { [ "$code" -eq 0 ] || [ "$code" -eq 125 ]; }; then code=$found; fi
done
exit "$code"
