#!/bin/bash
# Train on the machines of a hostfile with DeepSpeed's own launcher, from one of them:
#   scripts/launch/deepspeed_hostfile.sh hostfile data=jsonl data.path=/data/train.jsonl
# The hostfile has a line per machine, "worker-1 slots=8"; all of them are reached by ssh without a
# password, through pdsh, which has to be installed here, and have this folder at the same place.
# What they need of the environment is named in ~/.deepspeed_env or in .deepspeed_env here
# (HF_HOME=..., WANDB_MODE=...).
set -u
hostfile="${1:?name the hostfile}"
shift
# --no_local_rank: the rank is in the environment, where it is read from
deepspeed --hostfile "$hostfile" --no_local_rank \
    --module specheads.train +recipe=medusa1 deepspeed=zero2 name=hostfile resume=auto \
    checkpoint.every=500 "$@"
