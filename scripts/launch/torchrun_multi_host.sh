#!/bin/bash
# Train on several machines with torchrun. Start the same line on every machine:
#   HOSTS=2 HEAD=10.0.0.1 JOB=first scripts/launch/torchrun_multi_host.sh data=jsonl data.path=/data/train.jsonl
# HEAD is one of the machines, JOB any word that two runs do not share. runs/ and the data must lie
# on a disk that all machines share. A machine that is lost ends the run after dist_timeout seconds;
# the same line goes on from the newest checkpoint (resume=auto).
set -u
: "${HOSTS:?how many machines}" "${HEAD:?name or address of one of them}"
GPUS="${GPUS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
# one thread per process, or the processes of a machine fight for its cores
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# torchrun that ends with what its processes end with: 75 where they can be resumed
python -m specheads.torchrun --nnodes "$HOSTS" --nproc-per-node "$GPUS" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id "${JOB:-specheads}" \
    -m specheads.train +recipe=medusa1 deepspeed=zero2 name="${JOB:-multi_host}" resume=auto \
    checkpoint.every=500 "$@"
