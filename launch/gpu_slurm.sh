#!/usr/bin/env bash
# Trains on the GPUs of a SLURM cluster, one process per GPU; saves and goes on across time limits.
#
#   launch/gpu_slurm.sh configs/llama1b.py --workdir=DIR --nodes=4 [--config.x=y ...]
#
#   --nodes=1 --gpus_per_node=8   one process per GPU
#   --time=24:00:00               limit of one job; --grace seconds ahead of it the run saves, and
#   --grace=300                   the job goes back into the queue
#   --restarts=100                how many times it may
#   --partition --account --qos --constraint --name    as sbatch takes them
#   --dry-run                     prints the commands
#
# The project and the workdir lie on a file system that the nodes share. scancel --signal=TERM JOBID.0
# stops a run after it has saved (and requeues it); scancel JOBID ends it.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

nodes=1 gpus_per_node=8 time=24:00:00 grace=300 restarts=100
# shellcheck disable=SC2034 # read by name, below
partition="" account="" qos="" constraint="" name=""
parse_options "nodes gpus_per_node time grace restarts partition account qos constraint name" "" "$@"
numbers nodes gpus_per_node grace restarts
[ -n "$config" ] || die "give a config: launch/gpu_slurm.sh configs/llama1b.py --workdir=DIR"
[ -n "$workdir" ] || die "give --workdir=DIR, on a file system that all nodes see"
name="${name:-$(name_of_config)}"
needs sbatch

options=(--job-name="$name" --nodes="$nodes" --ntasks-per-node="$gpus_per_node"
  --gpus-per-node="$gpus_per_node" --time="$time" --requeue --open-mode=append
  --signal="B:USR1@$grace" --output="$name-%j.log")
for option in partition account qos constraint; do
  [ -z "${!option}" ] || options+=(--"$option=${!option}")
done

run setup gpu data gcs # here, once: the nodes see the same environment
job="$(run sbatch --parsable "${options[@]}" "$ROOT/launch/slurm_job.sh" "$ROOT" "$restarts" train \
  --config="$config" --workdir="$workdir" ${arguments[@]+"${arguments[@]}"})" ||
  fail "sbatch did not take the job; the lines above say why"
[ -n "$dry_run" ] || say "job ${job%%;*} is in the queue; its log: $name-${job%%;*}.log"
