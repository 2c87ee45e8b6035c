#!/usr/bin/env bash
# The job script that gpu_slurm.sh and prepare_data.sh give to sbatch; it isn't called by hand.
#
#   slurm_job.sh PROJECT RESTARTS VERB [srun's option ...] -- [the verb's argument ...]
#
# `train` runs as one process per task, `prepare_data` and `sweep` as one process per element of a job
# array. The job puts itself back into the queue, at most RESTARTS times, when the run saved (42), the infrastructure
# failed (175), a signal ended a process, or the time limit passed.

set -euo pipefail
ROOT="$1" restarts="$2" verb="$3"
shift 3
# sbatch runs a copy of this file, so the project isn't found by this file's folder.
source "$ROOT/launch/common.sh"
source "$ROOT/launch/forward.sh"
# The last element of a job array has the array's own ID, with which SLURM would apply a command to the whole array.
job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
job="${job:-$SLURM_JOB_ID}"
step=()
while [ "$1" != -- ]; do
  step+=("$1")
  shift
done
shift

# task GPUS COMMAND ...: one task of the step. srun ends with the highest status of its tasks, but a failure
# (1 or 2) must win over the statuses that it causes in the other processes: so it becomes 251 or 252.
# SLURM sends signals to every process of a task, so this shell only waits. A task that has several GPUs is
# told which, because JAX itself takes one, that of its local number.
task() {
  local gpus="$1" first=$(($1 * ${SLURM_LOCALID:-0}))
  shift
  [ "$gpus" -le 1 ] ||
    export JAX_LOCAL_DEVICE_IDS="${JAX_LOCAL_DEVICE_IDS:-$(seq -s, "$first" $((first + gpus - 1)))}"
  trap 'signalled=true' TERM USR1 INT
  "$@" &
  child=$!
  local status=0
  wait_for_child || status=$?
  case "$status" in 1 | 2) status=$((250 + status)) ;; esac
  exit "$status"
}

# keep_programs_in_container ARGUMENT ...: `keep_programs`; the container gets the folder that it chooses.
keep_programs_in_container() {
  local chosen="${JAX_COMPILATION_CACHE_DIR:-}" number
  keep_programs "$@"
  [ -z "$chosen" ] && [[ "${JAX_COMPILATION_CACHE_DIR:-}" == /* ]] || return 0
  for number in "${!step[@]}"; do
    [[ "${step[number]}" != --container-mounts=* ]] ||
      step[number]+=",$JAX_COMPILATION_CACHE_DIR:$JAX_COMPILATION_CACHE_DIR"
  done
}

# Starts the processes in the background.
start() {
  local program=("$VENV/bin/python" -m "t5x_diffeq.$verb") tasks="${SLURM_NTASKS_PER_NODE:-1}"
  if [ "$verb" = prepare_data ]; then
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || set -- "$@" --shard="$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
    "${program[@]}" "$@" &
    return
  fi
  # The runs of a sweep are trainings: like `train` it is a step of srun, to which signals are sent.
  if [ "$verb" = sweep ] && [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    set -- "$@" --part="$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
  fi
  if [[ " ${step[*]+"${step[*]}"}" == *" --container-image="* ]]; then
    program=(/opt/t5x_diffeq/verb.sh "$verb") # sets the variables itself
    keep_programs_in_container "$@"
  else
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    [ -z "${SLURM_GPUS_ON_NODE:-}" ] || gpu_variables
    keep_programs "$@"
  fi
  # JAX finds the processes through srun's variables. srun must leave a process the time to save after
  # another has ended (--kill-on-bad-exit, --wait). It does not take --cpus-per-task from the job (since
  # 22.05), nor the environment after sbatch --export.
  srun --export=ALL --kill-on-bad-exit=0 --wait=120 \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE / tasks))}" ${step[@]+"${step[@]}"} \
    bash -c "$(declare -f wait_for_child task); task \"\$@\"" task \
    "$((${SLURM_GPUS_ON_NODE:-0} / tasks))" "${program[@]}" "$@" &
}

# back_into_the_queue WHY
back_into_the_queue() {
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "$restarts" ]; then
    fail "$1, but the job was already started again $restarts times (--restarts); submit it again to go on"
  fi
  say "$1; the job goes back into the queue"
  scontrol requeue "$job"
}

# USR1 comes --grace seconds before the time limit. scancel sends SIGTERM to the steps; srun would answer
# a SIGTERM by killing them.
save() {
  signalled=true
  say "the time limit is near: the run saves"
  scancel --signal=TERM "$job" || true
}

# SIGTERM means that SLURM is ending the job: at the time limit, when a person cancelled it, or when it
# was preempted (SLURM then requeues it).
end() {
  signalled=true ending=true
  if [ "$(squeue --noheader --states=all --jobs="$job" --format=%r)" = TimeLimit ]; then
    back_into_the_queue "the time limit has passed"
  fi
}

ending="" child=""
trap save USR1
trap end TERM
start "$@"
child=$!
status=0
wait_for_child || status=$?
[ -z "$ending" ] || exit "$status"
case "$status" in
  0) exit 0 ;;
  130) say "stopped and saved; submit it again to go on"; exit 130 ;;
  251 | 252) status=$((status - 250)) ;; # see `task`
  1) [ "$verb" = prepare_data ] || status=175 ;; # srun's own status, not a task's: srun lost a node
esac
restartable "$status" || { echo "error: $verb ended with status $status; the lines above say why" >&2; exit "$status"; }
[ "$status" -eq 42 ] && why="saved" || why="$verb ended with status $status"
back_into_the_queue "$why"
