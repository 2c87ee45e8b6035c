#!/usr/bin/env bash
# Trains on the GPUs of several machines without a scheduler.
#
#   launch/gpu_nodes.sh configs/llama1b.py --workdir=DIR --hosts=a,b,c,d [--config.x=y ...]
#   launch/gpu_nodes.sh configs/llama1b.py --workdir=DIR --rank=R --size=N --coordinator=HOST[:PORT]
#
# Commas, spaces and new lines separate hosts: --hosts="$(scontrol show hostnames)" or "$(cat FILE)".
# The first starts the run over ssh, from any machine, and ends when all have ended; Ctrl-C saves.
# The second is one process of it, under any launcher that gives rank and size: mpirun, a batch system.
#
#   --processes_per_host=1  one process has all GPUs of its machine; 8: one has one of 8
#   --local_rank=L          likewise in the second form: this process has GPU L alone
#   --project=DIR           folder of the installed project on the hosts (default: as here)
#   --port=8476             of process 0
#   --coordinator=HOST      the address of the first host, if it isn't its name in --hosts
#   --ssh_config=FILE       as ssh -F takes it
#   --env=KEY[=VALUE]       a variable for the run, given here or taken from this shell; several times
#   --restarts=100          maximum number of restarts, after preemption, a lost host or process
#   --unchecked             skips the check of config, data and mesh on this machine
#   --dry-run               prints the commands
#
# Workdir and data must be on a file system that the machines share. The config is read on this machine, and
# sent to the hosts.

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/forward.sh"

hosts="" rank="" size="" coordinator="" local_rank=all processes_per_host=1 port=8476 restarts=100
project="$ROOT" ssh_config="" unchecked=""
parse_options "hosts rank size coordinator local_rank processes_per_host port restarts project ssh_config
  env" unchecked "$@"
numbers processes_per_host port restarts
[ "$port" -le 65535 ] || die "--port=$port must be at most 65535"
[ -n "$config" ] || die "give a config: launch/gpu_nodes.sh configs/llama1b.py --workdir=DIR --hosts=a,b"
absolute_config
[ -n "$workdir" ] || die "give --workdir=DIR, on a file system that all machines see"
absolute_workdir
export_environment
train=(--workdir="$workdir" ${arguments[@]+"${arguments[@]}"})

# ---------------------------------------------------------------- one process

[ -z "$hosts" ] || [ -z "$rank$size" ] ||
  die "--hosts starts all processes, and --rank=$rank --size=$size is one of them; leave one of these out"
if [ -z "$hosts" ]; then
  if [ -z "$rank" ] || [ -z "$coordinator" ]; then
    die "give --hosts=a,b, or --rank, --size and --coordinator"
  fi
  [[ "$rank" =~ ^[0-9]+$ ]] || die "--rank=$rank must be a number, from 0"
  numbers size
  [ "$rank" -lt "$size" ] || die "--rank=$rank must be less than --size=$size; the first is 0"
  [ -n "$dry_run" ] || setup gpu data gcs trackers
  [[ "$coordinator" == *:* ]] || coordinator="$coordinator:$port"
  [[ "${coordinator##*:}" =~ ^[0-9]+$ && "${coordinator##*:}" -le 65535 ]] ||
    die "--coordinator=$coordinator: a port is a number up to 65535"
  run exec "$ROOT/launch/gpu_rank.sh" "$rank" "$size" "$coordinator" "$local_rank" nothing \
    --config="$config" "${train[@]}"
  exit
fi

# ---------------------------------------------------------------- all of them, over ssh

needs ssh
[ -z "$ssh_config" ] || [ -f "$ssh_config" ] || die "--ssh_config=$ssh_config: there is no such file"
[ ! -f "$hosts" ] || die "--hosts=$hosts is a file; its content is --hosts=\"\$(cat $hosts)\""
IFS=$', \t\n' read -r -d '' -a machines <<<"$hosts" || true # which wants a NUL at the end
host='^([A-Za-z0-9_][A-Za-z0-9_.-]*@)?([A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:]*)$' # a dash would make it an option of ssh
named=" "
[ ${#machines[@]} -gt 0 ] || die "--hosts names no host; give names, separated by commas or white space"
for machine in "${machines[@]}"; do
  [[ "$machine" =~ $host ]] || die "--hosts: '$machine' is not the name of a host; give names, separated by commas or white space"
  [[ "$named" != *" ${machine#*@} "* ]] || die "--hosts: ${machine#*@} is named twice; --processes_per_host=N starts N processes on each host"
  named+="${machine#*@} "
done
first="${machines[0]#*@}"
case "${coordinator:+given}$first" in
  localhost | 127.* | ::1) [ ${#machines[@]} -eq 1 ] ||
    die "--hosts: no other host finds the first as $first; give the name by which they do, or --coordinator=HOST" ;;
esac
[[ "$first" != *:* ]] || first="[$first]" # an address of IPv6
coordinator="${coordinator:-$first}"
without_port='^(\[.*\]|[^:]*)$' # bash 3.2 takes no parentheses after =~
[[ ! "$coordinator" =~ $without_port ]] || coordinator="$coordinator:$port"
count=$((${#machines[@]} * processes_per_host))
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
mkfifo "$scratch/hold"
ssh=(ssh ${ssh_config:+-F "$ssh_config"} -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15
  -o ServerAliveCountMax=4 --)

# What gpu_rank.sh reads first. On the command line, other users of the host would see these values.
header() {
  local name
  printf '%s\0' "$(basename "$config")" "$(cat "${config%%:*}")" "$PWD"
  for name in ${environment[@]+"${environment[@]}"}; do printf '%s=%s\0' "$name" "${!name}"; done
  printf '\0'
}

# process N: runs process N, and notes its exit status. Its standard input is held open: see gpu_rank.sh.
process() {
  local machine="${machines[$1 / processes_per_host]}" gpu=all status=0
  [ "$processes_per_host" -eq 1 ] || gpu=$(($1 % processes_per_host))
  run "${ssh[@]}" "$machine" "$(quoted bash "$project/launch/gpu_rank.sh" \
    "$1" "$count" "$coordinator" "$gpu" stdin "${train[@]}")" < <(header && exec cat) || status=$?
  echo "$status" >"$scratch/new-$1"
  mv "$scratch/new-$1" "$scratch/ended-$1"
}

ended() { find "$scratch" -name 'ended-*'; }
all_have() { [ "$(ended | wc -l)" -eq "$count" ]; }
all_went_well() { ! ended | xargs cat | grep -qvxE '0|42'; }

# Runs all processes, and notes their exit statuses. When a process is lost, the others are told at once,
# and save if they can. When a process ended well, the others have a minute to end, too.
attempt() {
  local number left=60
  rm -f "$scratch"/ended-*
  exec 9<>"$scratch/hold"
  for ((number = 0; number < count; number++)); do
    process "$number" <"$scratch/hold" 9>&- &
    [ -z "$dry_run" ] || wait
  done
  trap 'say "stopping: all save"; stopping=true; exec 9>&-' INT TERM
  until [ -n "$(ended)" ] || [ -n "$stopping" ]; do sleep 1; done
  while ! all_have && all_went_well && [ "$left" -gt 0 ]; do
    left=$((left - 1))
    sleep 1
  done
  exec 9>&-
  until all_have; do wait || true; done
  trap - INT TERM
}

# Prints the status that matters most: a failure, else a lost process, else saved, else done.
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
    # 1 and 2 are causes. A process that a signal ended was often only waiting for the process at fault.
    if [ "$status" -eq 1 ] || [ "$status" -eq 2 ]; then worst="$status"; fi
    if [ "$worst" -ne 1 ] && [ "$worst" -ne 2 ] && [ "$status" -gt "$worst" ]; then worst="$status"; fi
  done
  echo "$worst"
}

[ "$project" != "$ROOT" ] || run setup gpu data gcs trackers # here, once: the machines see the same environment
# With one process per host, only the hosts know how many GPUs it has: 0 leaves the mesh to the run.
devices=$((processes_per_host > 1 ? processes_per_host : 0))
check_run_here gpu "$devices" "$processes_per_host" $((count / processes_per_host)) \
  "launch/gpu_nodes.sh configs/llama1b.py --workdir=DIR --hosts=a,b"
stopping="" again=0
while :; do
  began="$SECONDS"
  attempt
  [ -z "$dry_run" ] || exit 0
  status="$(outcome)"
  [ "$status" -ne 0 ] || exit 0
  [ -z "$stopping" ] || { say "stopped; the same command continues"; exit "$status"; }
  restartable "$status" || fail "the run ended with status $status; the lines above say why"
  again=$((again + 1))
  [ "$again" -le "$restarts" ] || fail "started again $restarts times (--restarts), last status $status; the workdir is saved"
  say "status $status: starting again ($again of at most $restarts)"
  next_pause $((SECONDS - began))
  between_checks "$pause"
done
