#!/usr/bin/env bash
# Trains on a SLURM cluster, one process per GPU; saves and continues across time limits.
#
#   launch/gpu_slurm.sh configs/llama1b.py --workdir=DIR --nodes=4 [--config.x=y ...]
#
#   --nodes=1 --gpus_per_node=8   one process per GPU; 0: CPU nodes, with one process each
#   --tasks_per_node=N       processes per node, which share its GPUs, if not one per GPU
#   --cpus_per_task=N        of each process (default: the node's CPUs, shared by its GPUs)
#   --mem=400G, --exclusive  as sbatch takes them
#   --time=24:00:00          limit of one job; --grace seconds ahead of it the run saves, and
#   --grace=300              the job goes back into the queue
#   --restarts=100           maximum number of restarts: after it saved, a lost process or node,
#                            a passed limit
#   --env=KEY[=VALUE]        a variable for the run, given here or taken from this shell; several times
#   --container=IMAGE        runs in this image of docker/gpu.Dockerfile (by pyxis and enroot)
#   --container_mounts=A:B,C:D   folders in it, beside those of the workdir and the config
#   --partition --account --qos --constraint --name    as sbatch takes them
#   --unchecked              skips the check of config, data and mesh on this machine
#   --grid=KEY=V1,V2 --seeds=3 --output=DIR    instead of --workdir: a sweep (t5x_diffeq.sweep); --grid
#                            several times. It is a job array, one process on one node each, of
#   --jobs=4                 so many jobs, among which the runs are divided
#   -- OPTION ...            further options of sbatch, last: -- --reservation=R --mail-type=END
#   --dry-run                prints the commands
#
# The project, the config and the workdir must be on a file system that the nodes share.
# scancel --signal=TERM JOB makes a run save and go back into the queue; with --signal=INT it saves and
# ends; scancel JOB ends it.

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

own=() further=()
while [ $# -gt 0 ]; do
  if [ "$1" = -- ]; then
    shift
    further=("$@")
    break
  fi
  own+=("$1")
  shift
done
output="" jobs="" seeds=""
nodes=1 gpus_per_node=8 tasks_per_node="" cpus_per_task="" time=24:00:00 grace=300 restarts=100
container="" container_mounts="" exclusive="" unchecked=""
# shellcheck disable=SC2034 # read by name, below
mem="" partition="" account="" qos="" constraint="" name=""
parse_options "output jobs seeds grid nodes gpus_per_node tasks_per_node cpus_per_task mem time grace restarts
  env container container_mounts partition account qos constraint name" "exclusive unchecked" ${own[@]+"${own[@]}"}
# A sweep: its runs take turns in one process on one node.
a_sweep() {
  verb=sweep
  [ -z "$workdir" ] || die "--workdir=$workdir is for one run; a sweep has --output=DIR"
  [ -n "$output" ] || die "a sweep needs --output=DIR, on a file system that all nodes see"
  [[ "$output" != *://* ]] || die "--output=$output is in a bucket; name a folder that all nodes see"
  [ "$nodes" = 1 ] || die "--nodes=$nodes: each run of a sweep has one node; leave it out, give --jobs=N"
  tasks_per_node="${tasks_per_node:-1}" workdir="$output"
  [ "$tasks_per_node" = 1 ] || die "--tasks_per_node=$tasks_per_node: a sweep has one process per node"
  jobs="${jobs:-1}"
  numbers jobs
}

verb=train
[ -z "${grid[*]-}$seeds$output" ] || a_sweep
[ "$verb" = sweep ] || [ -z "$jobs" ] || die "--jobs=$jobs is for a sweep, with --grid=KEY=V1,V2 and --output=DIR; leave it out"
[ -z "$container_mounts" ] || [ -n "$container" ] || die "--container_mounts=$container_mounts needs --container=IMAGE"
for each in ${further[@]+"${further[@]}"}; do
  [[ "$each" != --config.* ]] || die "$each comes after --, where options of sbatch are; give it before"
done
[[ "$container" != *.sif ]] ||
  die "--container=$container is an image of Apptainer; pyxis takes one of enroot (FILE.sqsh) or of a registry (HOST#NAME:TAG)"
[[ "$container" != *.sqsh || -e "$container" ]] ||
  say "note: --container=$container is not on this machine; all nodes must have it"
[ "$gpus_per_node" = 0 ] || numbers gpus_per_node
tasks_per_node="${tasks_per_node:-$((gpus_per_node > 0 ? gpus_per_node : 1))}"
numbers nodes tasks_per_node grace restarts
[ $((gpus_per_node % tasks_per_node)) -eq 0 ] ||
  die "--tasks_per_node=$tasks_per_node processes can't share --gpus_per_node=$gpus_per_node evenly; give a divisor of that"
[ -z "$cpus_per_task" ] || numbers cpus_per_task
[ -n "$config" ] || die "give a config: launch/gpu_slurm.sh configs/llama1b.py --workdir=DIR"
absolute_config
[ -n "$workdir" ] || die "give --workdir=DIR, on a file system that all nodes see"
absolute_workdir
export_environment
name="${name:-$(name_of_config)}"
needs sbatch sinfo srun
words=(--config="$config")
if [ "$verb" = sweep ]; then
  words+=(--output="$workdir" ${seeds:+--seeds="$seeds"})
  for each in ${grid[@]+"${grid[@]}"}; do words+=(--grid="$each"); done
else
  words+=(--workdir="$workdir")
fi
words+=(${arguments[@]+"${arguments[@]}"})

# The seconds that sbatch's --time means: minutes, [hours:]minutes:seconds, days-hours[:minutes[:seconds]].
limit_seconds() {
  awk -v time="$time" 'BEGIN {
    days = (time ~ /-/) ? time + 0 : 0
    count = split((time ~ /-/) ? substr(time, index(time, "-") + 1) : time, part, ":")
    if (time ~ /-/ || count == 3) print days * 86400 + part[1] * 3600 + part[2] * 60 + part[3]
    else print part[1] * 60 + part[2]
  }'
}

# Prints the CPUs of a process: its GPU's share of the node with the fewest CPUs in the partition. Prints
# nothing if sinfo doesn't tell: the processes of the job then share its CPUs.
cpus_of_task() {
  run sinfo --noheader --Node --format='%c %G' ${partition:+--partition="$partition"} |
    awk -v wanted="$gpus_per_node" -v tasks="$tasks_per_node" '{
      gpus = 0
      for (n = split($2, kinds, ","); n > 0; n--)
        if (kinds[n] ~ /^gpu/) { sub(/\(.*/, "", kinds[n]); sub(/.*:/, "", kinds[n]); gpus += kinds[n] }
      if (gpus < wanted) next
      cpus = int($1 * (wanted ? wanted / gpus : 1) / tasks)
      if (!least || cpus < least) least = cpus
    } END { if (least) print least }'
}

# Checks the grid on this machine, if there is an environment: the commands are made, but not run.
check_sweep_here() {
  local commands runs
  [ -z "$unchecked" ] || return 0
  "$VENV/bin/python" -c "import t5x_diffeq.training.setup" 2>/dev/null || return 0
  commands="$("$VENV/bin/python" -m t5x_diffeq.sweep "${words[@]}" --dry_run)" || exit
  runs="$(wc -l <<<"$commands")"
  [ "$jobs" -le "$runs" ] || die "--jobs=$jobs: the sweep has $runs runs; give at most as many jobs"
}

case "$time" in
  infinite | INFINITE | unlimited | UNLIMITED) ;;
  *) [[ "$time" =~ ^[0-9][0-9:-]*$ ]] || die "--time=$time must be like 24:00:00, 1-12:00 or infinite" ;;
esac
if [[ "$time" =~ ^[0-9] ]] && [ "$(limit_seconds)" -le "$grace" ]; then
  die "--time=$time leaves nothing to train in: the run saves --grace=$grace seconds ahead of it"
fi
[[ ! "$time" =~ ^[0-9]+$ ]] || say "note: sbatch takes --time=$time for minutes; hours are --time=$time:00:00"
[[ ! "$mem" =~ ^[0-9]+$ ]] || say "note: sbatch takes --mem=$mem for megabytes; gigabytes are --mem=${mem}G"
if [ -z "$cpus_per_task$exclusive" ]; then
  cpus_per_task="$(cpus_of_task)"
  [ -z "$dry_run" ] || cpus_per_task=CPUS # --dry-run asks nothing
fi
log="$name-%j.log" array=()
[ "$verb" = train ] || { log="$name-%A-%a.log"; array=(--array="0-$((jobs - 1))"); }
options=(--job-name="$name" --nodes="$nodes" --ntasks-per-node="$tasks_per_node" --time="$time"
  --requeue --open-mode=append --signal="B:USR1@$grace" --output="$log" ${array[@]+"${array[@]}"} ${exclusive:+--exclusive}
  ${cpus_per_task:+--cpus-per-task="$cpus_per_task"})
[ "$gpus_per_node" = 0 ] || options+=(--gpus-per-node="$gpus_per_node")
for option in mem partition account qos constraint; do
  [ -z "${!option}" ] || options+=(--"$option=${!option}")
done
exported="$(IFS=,; echo "${environment[*]+"${environment[*]}"}")"
[ -z "$exported" ] || options+=(--export="ALL,$exported")
extras=(gpu data gcs trackers)
[ "$gpus_per_node" != 0 ] || extras=(data gcs trackers)
[ "$verb" = train ] || extras+=(analysis) # its figures

step=()
if [ -n "$container" ]; then
  [ -n "$dry_run" ] || srun --help | grep -q -e --container-image ||
    die "--container=$container: the srun of this cluster has no --container-image (pyxis is not installed)"
  folder="$(dirname "${config%%:*}")"
  mounts="$folder:$folder${container_mounts:+,$container_mounts}"
  if [[ "$workdir" != *://* ]]; then
    run mkdir -p "$workdir"
    mounts+=",$workdir:$workdir"
  fi
  step=(--container-image="$container" --container-mounts="$mounts" ${exported:+--container-env="$exported"})
else
  run setup "${extras[@]}" # here, once: the nodes see the same environment
fi
# CPU nodes have as many devices as XLA_FLAGS says: 0 leaves their mesh to the run.
if [ "$verb" = sweep ]; then
  check_sweep_here
else
  check_run_here gpu "$gpus_per_node" "$tasks_per_node" "$nodes" \
    "launch/gpu_slurm.sh configs/llama1b.py --workdir=DIR --nodes=4"
fi
job="$(run sbatch --parsable "${options[@]}" ${further[@]+"${further[@]}"} \
  "$ROOT/launch/slurm_job.sh" "$ROOT" "$restarts" "$verb" ${step[@]+"${step[@]}"} -- "${words[@]}")" ||
  fail "sbatch did not take the job; the lines above say why"
[ "$verb" = train ] && log="$name-${job%%;*}.log" || log="$name-${job%%;*}-*.log"
[ -n "$dry_run" ] || say "job ${job%%;*} is in the queue; its log: $log"
