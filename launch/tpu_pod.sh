#!/usr/bin/env bash
# Trains on a Cloud TPU: makes or reuses it, installs, starts all hosts, shows the log, goes on after
# preemption. The same command again shows the run that is there, or continues it.
#
#   launch/tpu_pod.sh configs/llama1b.py --type=v5p-128 --workdir=gs://BUCKET/run [--config.x=y ...]
#   launch/tpu_pod.sh status|logs|stop|delete
#
#   --name --zone --project --type --workdir   or TPU_NAME, TPU_ZONE, TPU_PROJECT, TPU_TYPE, WORKDIR;
#                     zone and project otherwise as gcloud is configured
#   --mounted         --workdir is a folder that is mounted on every host, as /mnt/filestore/run
#   --slices=2        several of that type, as one run
#   --spot, --reserved, --service_account=EMAIL, --network=NAME, --version=RUNTIME
#   --restarts=100    starts at most so often again: after preemption, and when a host, a link or a
#                     bucket failed (status 175)
#   --wait_hours=24   for the TPU to be granted
#   --worker=0        whose log `logs` shows
#   --dry-run         prints every command
#
# `stop` saves and ends the run, and leaves the TPU; `delete` gives the TPU back.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

verb=start
case "${1:-}" in start | status | logs | stop | delete) verb="$1"; shift ;; esac
mounted=""
name="${TPU_NAME:-}" zone="${TPU_ZONE:-}" project="${TPU_PROJECT:-}" type="${TPU_TYPE:-}"
slices=1 spot="" reserved="" service_account="" network="" version="" restarts=100 wait_hours=24
worker=0
workdir="${WORKDIR:-}"
parse_options "name zone project type slices service_account network version restarts wait_hours worker" \
  "spot reserved mounted" "$@"
numbers slices restarts wait_hours
name="${name:-${config:+$(name_of_config)}}"
name="${name:-t5x-diffeq}"
check_name
[ -z "$spot" ] || [ -z "$reserved" ] || die "--spot and --reserved exclude each other"
needs gcloud tar
where=(${zone:+--zone="$zone"} ${project:+--project="$project"})
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

# ---------------------------------------------------------------- gcloud, and hosts through it

resource() { # resource VERB ...: the queued resource, which holds all slices
  local command="$1"
  shift
  run gcloud compute tpus queued-resources "$command" "$name" ${where[@]+"${where[@]}"} "$@"
}

slice_names() {
  if [ "$slices" -eq 1 ]; then echo "$name"; else seq -f "$name-%.0f" 0 $((slices - 1)); fi
}

# on SLICE WORKERS COMMAND: a shell's command on these of its workers.
on() {
  run gcloud compute tpus tpu-vm ssh "$1" --worker="$2" ${where[@]+"${where[@]}"} \
    --command="$3" </dev/null
}

# hosts COMMAND: on all.
hosts() {
  local slice failed=0
  for slice in $(slice_names); do on "$slice" all "$1" || failed=$?; done
  return "$failed"
}

# first COMMAND: on process 0's host.
first() { on "$(slice_names | sed -n 1p)" 0 "$1"; }

# here WORD ...: the host's script, each word as it is.
here() { quoted bash t5x_diffeq/launch/tpu_host.sh "$@"; }

# thrice MESSAGE COMMAND ...: a host that can't be reached may come back; not forever.
thrice() {
  local message="$1" attempt
  shift
  for attempt in 1 2 3; do
    if "$@"; then return; fi
    [ "$attempt" -eq 3 ] || { say "again in a moment ($attempt of 3 failed)"; between_checks 20; }
  done
  fail "$message"
}

# ---------------------------------------------------------------- the TPU

# Prints its state; nothing if there is none.
tpu_state() {
  if resource describe --format="value(state.state)" 2>"$scratch/said"; then return; fi
  grep -q NOT_FOUND "$scratch/said" || { cat "$scratch/said" >&2; return 1; }
}

runtime_version() {
  case "$type" in
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) echo tpu-ubuntu2204-base ;;
  esac
}

request_tpu() {
  local nodes=(--node-id="$name")
  [ "$slices" -eq 1 ] || nodes=(--node-count="$slices" --node-prefix="$name")
  [ -n "$type" ] || die "there is no TPU $name yet; give --type, such as v5p-128, to request it"
  say "requesting $slices x $type as $name"
  resource create "${nodes[@]}" --accelerator-type="$type" \
    --runtime-version="${version:-$(runtime_version)}" --async \
    ${spot:+--spot} ${reserved:+--reserved} ${network:+--network="$network"} \
    ${service_account:+--service-account="$service_account"} ||
    fail "the TPU $name can't be requested; the lines above say why (quota, zone, type?)"
}

delete_tpu() {
  resource delete --force --quiet --async || fail "the TPU $name can't be deleted; the lines above say why"
}

# Returns when the TPU is there; requests it first if it isn't, anew if it was taken away.
wait_for_tpu() {
  local state before="" deadline=$((SECONDS + wait_hours * 3600))
  while :; do
    state="$(tpu_state)" || fail "gcloud can't tell the state of the TPU $name"
    [ "$state" = "$before" ] || say "TPU $name: ${state:-none}"
    before="$state"
    case "$state" in
      ACTIVE) return ;;
      "") request_tpu; [ -z "$dry_run" ] || return 0 ;;
      SUSPENDED) delete_tpu ;;
      FAILED)
        resource describe --format="value(state)" >&2 || true
        fail "the TPU $name was refused; '$0 delete --name=$name' clears it, then try again" ;;
    esac
    [ "$SECONDS" -lt "$deadline" ] || fail "the TPU $name was not granted within $wait_hours hours; it is still requested"
    between_checks 30
  done
}

# ---------------------------------------------------------------- the run

copy_project() {
  local slice
  run tar -C "$ROOT" --exclude=__pycache__ -czf "$scratch/t5x_diffeq.tar.gz" \
    LICENSE README.md pyproject.toml configs docker launch t5x_diffeq
  for slice in $(slice_names); do
    run gcloud compute tpus tpu-vm scp "$scratch/t5x_diffeq.tar.gz" "$slice:t5x_diffeq.tar.gz" \
      --worker=all ${where[@]+"${where[@]}"} || return
  done
}

install_project() {
  hosts "rm -rf t5x_diffeq && mkdir t5x_diffeq && tar -xzf t5x_diffeq.tar.gz -C t5x_diffeq && $(here install)"
}

begin() {
  wait_for_tpu
  thrice "the project can't be copied to every host of $name" copy_project
  thrice "not every host of $name can be reached and installed" install_project
  thrice "not every host of $name can be reached and started" hosts \
    "$(here start "$(date +%s)-$attempt" --config="$config" --workdir="$workdir" ${arguments[@]+"${arguments[@]}"})"
}

# Shows the log until the run ends; starts it again where that helps.
supervise() {
  local ended lines=+1 dropped=0 began
  while :; do
    began="$SECONDS"
    first "$(here follow "$lines")" || true # that it ended, or that ssh did, is asked next
    [ -z "$dry_run" ] || return 0
    ended="$(first "$(here status)")" || ended=unreachable
    lines=20
    [ $((SECONDS - began)) -lt 600 ] || dropped=0 # once in a while is no trouble
    case "$ended" in
      "ended 0") say "done; the TPU is still there: $0 delete --name=$name"; return ;;
      stopped*) say "stopped, saved; the same command continues"; return ;;
      running) dropped=$((dropped + 1)); say "the connection broke off; the run goes on" ;;
      unreachable) dropped=$((dropped + 1)) ;;
      ended*) restartable "${ended#ended }" || give_up "${ended#ended }" ;;
    esac
    if [ "$ended" = running ] && [ "$dropped" -le 10 ]; then between_checks 10; continue; fi
    if [ "$ended" = unreachable ] && [ "$dropped" -le 10 ]; then
      between_checks 30
      [ "$(tpu_state || echo unknown)" != ACTIVE ] || continue
    fi
    [ "$dropped" -le 10 ] || fail "worker 0 of $name can't be held; '$0 logs --name=$name' shows the run, if it goes on"
    attempt=$((attempt + 1))
    [ "$attempt" -le "$restarts" ] || fail "started again $restarts times (--restarts) and $ended; the workdir is saved"
    say "$ended: starting again ($attempt of at most $restarts)"
    begin
    lines=+1 dropped=0
  done
}

# give_up STATUS: says what every host says.
give_up() {
  hosts "$(here report)" >&2 || true
  fail "the run ended with status $1; the last line of every host stands above"
}

start() {
  attempt=0
  project_config
  [[ "$workdir" == gs://* ]] || [[ -n "$mounted" && "$workdir" == /* ]] ||
    die "--workdir=$workdir: give --workdir=gs://BUCKET/FOLDER, or a path from / with --mounted if every host has it mounted: all hosts write there"
  if [ -z "$dry_run" ] && [ "$(tpu_state)" = ACTIVE ] && [ "$(first "$(here status)")" = running ]; then
    say "a run is there already: its log (stop it with '$0 stop --name=$name')"
  else
    begin
  fi
  supervise
}

case "$verb" in
  start) start ;;
  status) tpu_state; hosts "$(here report)" ;;
  logs) on "$(slice_names | sed -n 1p)" "$worker" "$(here follow 100)" ;;
  stop) hosts "$(here stop)" ;;
  delete) delete_tpu ;;
esac
