#!/usr/bin/env bash
# Trains on the GPUs of several machines without a scheduler.
#
#   launch/gpu_nodes.sh configs/llama1b.py --workdir=DIR --hosts=a,b,c,d [--config.x=y ...]
#   launch/gpu_nodes.sh configs/llama1b.py --workdir=DIR --rank=R --size=N --coordinator=HOST[:PORT]
#
# The first starts the run over ssh, from any machine, and ends when all have ended; Ctrl-C saves.
# The second is one process of it, under any launcher that gives rank and size: mpirun, a batch system.
#
#   --processes_per_host=1  one process has all GPUs of its machine; 8: one has one of 8
#   --local_rank=L          likewise in the second form: this process has GPU L alone
#   --project=DIR           where the project lies on the hosts, installed (default: as here)
#   --port=8476             of process 0
#   --restarts=100          starts at most so often again, after preemption or a lost connection
#   --dry-run               prints the commands
#
# Project, workdir and data lie on a file system that the machines share.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

hosts="" rank="" size="" coordinator="" local_rank=all processes_per_host=1 port=8476 restarts=100
project="$ROOT"
parse_options "hosts rank size coordinator local_rank processes_per_host port restarts project" "" "$@"
numbers processes_per_host port restarts
[ -n "$config" ] || die "give a config: launch/gpu_nodes.sh configs/llama1b.py --workdir=DIR --hosts=a,b"
[ -n "$workdir" ] || die "give --workdir=DIR, on a file system that all machines see"
train=(--config="$config" --workdir="$workdir" ${arguments[@]+"${arguments[@]}"})

# ---------------------------------------------------------------- one process

if [ -z "$hosts" ]; then
  [[ "$rank" =~ ^[0-9]+$ ]] && [ -n "$coordinator" ] || die "give --hosts=a,b, or --rank, --size and --coordinator"
  numbers size
  [ -n "$dry_run" ] || setup gpu data gcs
  [[ "$coordinator" == *:* ]] || coordinator="$coordinator:$port"
  run exec "$ROOT/launch/gpu_rank.sh" "$rank" "$size" "$coordinator" "$local_rank" nothing "${train[@]}"
  exit
fi

# ---------------------------------------------------------------- all of them, over ssh

needs ssh
IFS=, read -r -a machines <<<"$hosts"
count=$((${#machines[@]} * processes_per_host))
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
mkfifo "$scratch/hold"
ssh=(ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 -o ServerAliveCountMax=4)

# process N: starts it, and notes how it ended. Its standard input is held open: see gpu_rank.sh.
process() {
  local machine="${machines[$1 / processes_per_host]}" gpu=all status=0
  [ "$processes_per_host" -eq 1 ] || gpu=$(($1 % processes_per_host))
  run "${ssh[@]}" "$machine" "$(quoted bash "$project/launch/gpu_rank.sh" \
    "$1" "$count" "${machines[0]}:$port" "$gpu" stdin "${train[@]}")" || status=$?
  echo "$status" >"$scratch/new-$1"
  mv "$scratch/new-$1" "$scratch/ended-$1"
}

ended() { find "$scratch" -name 'ended-*'; }
all_have() { [ "$(ended | wc -l)" -eq "$count" ]; }
all_went_well() { ! ended | xargs cat | grep -qvxE '0|42'; }

# Runs all processes, and notes how they ended. When one is lost, the others are told at once, and
# save if they can; when one ended well, they have a minute to do so too.
attempt() {
  local number left=60
  rm -f "$scratch"/ended-*
  exec 9<>"$scratch/hold"
  for ((number = 0; number < count; number++)); do
    process "$number" <"$scratch/hold" 9>&- &
    [ -z "$dry_run" ] || wait
  done
  trap 'say "stopping: all save"; stopping=true; exec 9>&-' INT TERM
  wait -n || true
  while ! all_have && all_went_well && [ "$left" -gt 0 ]; do
    left=$((left - 1))
    sleep 1
  done
  exec 9>&-
  until all_have; do wait || true; done
  trap - INT TERM
}

# The status that says most: a failure, else a lost one, else saved, else done.
outcome() {
  local number status worst=0
  for ((number = 0; number < count; number++)); do
    status="$(cat "$scratch/ended-$number")"
    case "$status" in
      0) ;;
      255) say "process $number: ssh to ${machines[number / processes_per_host]} failed or broke off" ;;
      42) ;;
      *) say "process $number on ${machines[number / processes_per_host]} ended with status $status" ;;
    esac
    # 1 and 2 are reasons; what a signal ended was often waiting for the one that had the reason.
    if [ "$status" -eq 1 ] || [ "$status" -eq 2 ]; then worst="$status"; fi
    if [ "$worst" -ne 1 ] && [ "$worst" -ne 2 ] && [ "$status" -gt "$worst" ]; then worst="$status"; fi
  done
  echo "$worst"
}

[ "$project" != "$ROOT" ] || run setup gpu data gcs # here, once: the machines see the same environment
stopping="" again=0
while :; do
  attempt
  [ -z "$dry_run" ] || exit 0
  status="$(outcome)"
  [ "$status" -ne 0 ] || exit 0
  [ -z "$stopping" ] || { say "stopped; the same command continues"; exit "$status"; }
  restartable "$status" || fail "the run ended with status $status; the lines above say why"
  again=$((again + 1))
  [ "$again" -le "$restarts" ] || fail "started again $restarts times (--restarts), last status $status; the workdir is saved"
  say "status $status: starting again ($again of at most $restarts)"
  between_checks 20
done
