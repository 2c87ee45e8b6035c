#!/usr/bin/env bash
# What gpu_slurm.sh and prepare_data.sh give to sbatch; not called by hand.
#
#   slurm_job.sh PROJECT RESTARTS VERB [argument ...]
#
# `train` runs as one process per task, and the job is put back into the queue when it saved: on
# preemption, or on the USR1 that SLURM sends ahead of the time limit. `prepare_data` makes the part
# that the job array says.

set -euo pipefail
ROOT="$1" restarts="$2" verb="$3"
shift 3
# sbatch runs a copy of this file: its own folder says nothing.
source "$ROOT/launch/setup.sh"
source "$ROOT/launch/forward.sh"
python="$VENV/bin/python"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

if [ "$verb" = prepare_data ]; then
  part=()
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || part=(--shard="$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT")
  exec "$python" -m t5x_diffeq.prepare_data "$@" ${part[@]+"${part[@]}"}
fi

XLA_FLAGS="$("$python" "$ROOT/launch/xla_flags.py")"
export XLA_FLAGS NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
gpu_memory

# JAX finds the processes through srun's variables, and takes the GPU of its local number. srun hands
# SIGTERM on to every process: they save after the same step, and end with 42.
status=0
forwarding srun --kill-on-bad-exit=1 "$python" -m "t5x_diffeq.$verb" "$@" || status=$?

if [ "$status" -ne 42 ]; then
  [ "$status" -eq 0 ] || echo "error: $verb ended with status $status; the lines above say why" >&2
  exit "$status"
fi
if [ "${SLURM_RESTART_COUNT:-0}" -ge "$restarts" ]; then
  echo "error: saved, but already started again $restarts times (--restarts); submit it again to go on" >&2
  exit 1
fi
echo "saved; back into the queue" >&2
scontrol requeue "$SLURM_JOB_ID"
