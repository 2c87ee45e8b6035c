#!/usr/bin/env bash
# Trains on a Cloud TPU: makes or reuses it, installs, starts all hosts, shows the log, continues after
# preemption. The same command again shows the run that is there, or continues it.
#
#   launch/tpu_pod.sh configs/llama1b.py --type=v5p-128 --workdir=gs://BUCKET/run [--config.x=y ...]
#   launch/tpu_pod.sh status|logs|stop|delete
#
#   --name --zone --project --type --workdir   or TPU_NAME, TPU_ZONE, TPU_PROJECT, TPU_TYPE, WORKDIR;
#                     the defaults of zone and project are gcloud's
#   --mounted         --workdir is a folder that is mounted on every host, as /mnt/filestore/run
#   --slices=2        number of slices of that type, for one run
#   --spot, --reserved, --flex_start with --max_run_duration=24h    its provisioning; default: on demand
#   --service_account=EMAIL, --network=NAME, --subnetwork=NAME, --version=RUNTIME, --labels=KEY=VALUE,...
#   --internal_ips    the hosts have no addresses outside; ssh goes through Google's proxy (IAP)
#   --env=KEY[=VALUE], --secret=KEY[=SECRET]   variables of the training; the latter of Secret Manager,
#                     read on the hosts. Several may be given. Without VALUE: as set here
#   --restarts=100    maximum number of restarts: after preemption, and when a host, a link or a
#                     bucket failed (status 175)
#   --wait_hours=24   maximum wait for the TPU
#   --worker=0        the host whose log `logs` shows
#   --unchecked       skips the check of config, data and mesh on this machine
#   --dry-run         checks, and prints every command
#
# `stop` saves and ends the run, and keeps the TPU; `delete` gives the TPU back.
#
# If this machine sleeps or loses its network, training continues: the hosts restart it by themselves
# when the infrastructure fails and when Google restarts a host, and write their logs to WORKDIR/logs/. But
# a TPU that is preempted, or whose --max_run_duration ends, is gone for good, and its request can't be
# granted twice: a new request needs this script. The same command later continues from the last save; for
# runs of days start it where nothing sleeps (tmux on a small VM).

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/forward.sh"

verb=start
case "${1:-}" in
  start | status | logs | stop | delete) verb="$1"; shift ;;
  *) [[ ! "${1:-}" =~ ^[a-z]+$ || -e "$1" ]] || die "$1 is not understood; there are start, status, logs, stop and delete" ;;
esac
for each in "$@"; do
  case "$each" in start | status | logs | stop | delete) [ -e "$each" ] || die "$each comes first: launch/tpu_pod.sh $each ..." ;; esac
done
mounted=""
name="${TPU_NAME:-}" zone="${TPU_ZONE:-}" project="${TPU_PROJECT:-}" type="${TPU_TYPE:-}"
slices=1 spot="" reserved="" flex_start="" max_run_duration="" labels="" internal_ips=""
service_account="" network="" subnetwork="" version="" restarts=100 wait_hours=24
worker=0 unchecked=""
workdir="${WORKDIR:-}"
parse_options "name zone project type slices max_run_duration labels service_account network subnetwork
  version restarts wait_hours worker env secret" "spot reserved flex_start internal_ips mounted unchecked" "$@"
numbers slices restarts wait_hours
name="${name:-${config:+$(name_of_config)}}"
name="${name:-t5x-diffeq}"
check_name
case "$spot$reserved$flex_start" in
  truetrue*) die "--spot, --reserved and --flex_start exclude each other" ;;
esac
needs gcloud tar
where=(${zone:+--zone="$zone"} ${project:+--project="$project"})
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
known="" # true once gcloud has told a state of the TPU

# ---------------------------------------------------------------- gcloud, and hosts through it

resource() { # resource VERB ...: the queued resource, which holds all slices
  local command="$1"
  shift
  run gcloud compute tpus queued-resources "$command" "$name" ${where[@]+"${where[@]}"} "$@"
}

slice_names() {
  if [ "$slices" -eq 1 ]; then echo "$name"; else seq -f "$name-%.0f" 0 $((slices - 1)); fi
}

# machines VERB ...: ssh or scp to the machines. Only gcloud's alpha version knows the way through IAP.
machines() {
  local command="$1"
  shift
  if [ -n "$internal_ips" ]; then
    run gcloud alpha compute tpus tpu-vm "$command" --tunnel-through-iap ${where[@]+"${where[@]}"} "$@"
  else
    run gcloud compute tpus tpu-vm "$command" ${where[@]+"${where[@]}"} "$@"
  fi
}

# gcloud sets no keep-alive for ssh, so a frozen host would never be noticed.
alive=("-o ServerAliveInterval=15" "-o ServerAliveCountMax=4")

# on SLICE WORKERS COMMAND: runs a shell command on these workers of a slice.
on() { machines ssh "$1" --worker="$2" "${alive[@]/#/--ssh-flag=}" --command="$3" </dev/null; }

# hosts COMMAND: runs a shell command on all hosts.
hosts() {
  local slice failed=0
  for slice in $(slice_names); do on "$slice" all "$1" || failed=$?; done
  return "$failed"
}

# first COMMAND: runs a shell command on process 0's host.
first() { on "$(slice_names | sed -n 1p)" 0 "$1"; }

# Prints the status of the run on process 0's host: the last line, because gcloud prints when it makes a key.
status_of_run() { first "$(here status)" | tail -n 1; }

# invocation VERB: prints this script's command for this TPU, as a user types it.
invocation() {
  quoted "$0" "$1" --name="$name" ${where[@]+"${where[@]}"}
  [ "$slices" -eq 1 ] || printf ' --slices=%s' "$slices"
}

# here WORD ...: prints the command that calls the host's script with these words.
here() { quoted bash t5x_diffeq/launch/tpu_host.sh "$@"; }

# thrice MESSAGE COMMAND ...: tries a command three times, because a host may be out of reach for a moment;
# then fails with the message.
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

# Prints the TPU's state; nothing if there is no TPU of this name.
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

# Sets `chip`, `chips`, `hosts` and `devices` of a slice of this type. The number in a type counts
# cores up to v5p, of which a chip has two, and chips since then.
describe_type() {
  local number="${type##*-}" per_host=4
  [[ "$type" =~ ^v[0-9a-z]+-[1-9][0-9]*$ ]] ||
    die "--type=$type must be a kind of TPU and its size, such as v5p-128, v6e-256 or v5litepod-64"
  case "$type" in
    v2-* | v3-*) chips=$((number / 2)) devices="$number" ;;
    v4-* | v5p-*) chips=$((number / 2)) devices="$chips" ;;
    v5litepod-* | v6e-*) chips="$number" devices="$number" ;;
    v5e-*) die "--type=$type is --type=v5litepod-$number, in gcloud's words" ;;
    *) die "--type=$type is not known to this script; it knows v2, v3, v4, v5litepod, v5p and v6e (a TPU7x is available only on GKE: launch/gke.sh --type=tpu7x)" ;;
  esac
  case "$type" in v5litepod-8 | v6e-8) per_host=8 ;; esac
  hosts=$(((chips + per_host - 1) / per_host))
}

request_tpu() {
  local nodes=(--node-id="$name") track=() duration=""
  [ "$slices" -eq 1 ] || nodes=(--node-count="$slices" --node-prefix="$name")
  if [ -n "$flex_start" ]; then
    # Only gcloud's alpha version knows the two options of flex-start.
    track=(alpha)
    duration="$(seconds_of max_run_duration "$max_run_duration")s"
  fi
  say "requesting $slices x $type as $name"
  run gcloud ${track[@]+"${track[@]}"} compute tpus queued-resources create "$name" \
    ${where[@]+"${where[@]}"} "${nodes[@]}" --accelerator-type="$type" \
    --runtime-version="${version:-$(runtime_version)}" --async \
    --metadata-from-file=startup-script="$ROOT/launch/tpu_boot.sh" \
    ${spot:+--spot} ${reserved:+--reserved} \
    ${flex_start:+--provisioning-model=flex-start --max-run-duration="$duration"} \
    ${network:+--network="$network"} ${subnetwork:+--subnetwork="$subnetwork"} \
    ${internal_ips:+--internal-ips} ${labels:+--labels="$labels"} \
    ${service_account:+--service-account="$service_account"} ||
    fail "the TPU $name can't be requested; the lines above say why (quota, zone, type?)"
}

delete_tpu() {
  resource delete --force --quiet --async || fail "the TPU $name can't be deleted; the lines above say why"
}

# The creation of a reserved TPU takes no zone from gcloud's configuration.
find_zone() {
  [ -z "$zone" ] || return 0
  zone="$(gcloud config get compute/zone 2>/dev/null)" && [ -n "$zone" ] ||
    die "give --zone=us-east5-a, the zone of the TPU; gcloud has none configured"
  where+=(--zone="$zone")
}

# find_state: sets `state`, to `unknown` if gcloud has told a state before but can't now. One failed question
# must not end the wait for a TPU, which would then run, and be billed, unattended.
find_state() {
  if state="$(tpu_state)"; then
    known=true
  elif [ -n "$known" ]; then
    state=unknown
  else
    fail "gcloud can't tell the state of the TPU $name"
  fi
}

# Returns when the TPU is active. Requests it if there is none, and again if it was taken away.
wait_for_tpu() {
  local state before="" deadline=$((SECONDS + wait_hours * 3600))
  while :; do
    find_state
    [ "$state" = "$before" ] || say "TPU $name: ${state:-none}"
    before="$state"
    case "$state" in
      ACTIVE) return ;;
      "") request_tpu; [ -z "$dry_run" ] || return 0 ;;
      unknown) say "asking again; the lines above say why gcloud could not tell it" ;;
      SUSPENDED) delete_tpu ;;
      FAILED)
        resource describe --format="value(state)" >&2 || true
        fail "the TPU $name was refused; '$(invocation delete)' clears it, then try again" ;;
    esac
    [ "$SECONDS" -lt "$deadline" ] || fail "the TPU $name was not granted within $wait_hours hours; it is still requested"
    between_checks 30
  done
}

# ---------------------------------------------------------------- the run

# Writes the settings for the hosts, a file beside the project that only its owner can read.
write_settings() {
  local each
  umask 077
  {
    # The values alone are quoted: $'A=one\ntwo' would be a command.
    for each in ${environment[@]+"${environment[@]}"}; do printf '%s=%q\n' "${each%%=*}" "${each#*=}"; done
    printf '%s=%q\n' T5X_DIFFEQ_RESTARTS "$restarts" T5X_DIFFEQ_SECRETS "${secrets[*]+"${secrets[*]}"}"
  } >"$scratch/settings"
}

copy_project() {
  local slice own=()
  write_settings
  if [ -n "$own_config" ]; then
    mkdir -p "$scratch/own_config"
    cp "$own_config" "$scratch/own_config/"
    own=(own_config)
  fi
  run tar --exclude=__pycache__ -czf "$scratch/t5x_diffeq.tar.gz" \
    -C "$ROOT" LICENSE README.md pyproject.toml configs docker launch t5x_diffeq \
    -C "$scratch" settings ${own[@]+"${own[@]}"}
  offer_key
  for slice in $(slice_names); do
    machines scp "$scratch/t5x_diffeq.tar.gz" "$slice:t5x_diffeq.tar.gz" --worker=all \
      "${alive[@]/#/--scp-flag=}" || return
  done
}

# gcloud refuses to copy to several hosts if an ssh-agent holds keys, but not gcloud's own.
offer_key() {
  local key="$HOME/.ssh/google_compute_engine"
  [ -n "${SSH_AUTH_SOCK:-}" ] && [ -e "$key" ] || return 0
  ssh-add -T "$key.pub" 2>/dev/null || run ssh-add -q "$key" || say "warning: the ssh-agent does not take $key"
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

# Shows the log until the run ends; starts the run again if it is `restartable`.
supervise() {
  local ended lines=+1 dropped=0 began started="$SECONDS" pause=""
  trap 'say "the run goes on; stop it with: $(invocation stop)"; exit 130' INT # gcloud gets it, too, and may end with any status
  while :; do
    began="$SECONDS"
    first "$(here follow "$lines" "$(date +%s)-$RANDOM")" || true # whether the run or only ssh ended is asked next
    [ -z "$dry_run" ] || return 0
    ended="$(status_of_run)" || ended=unreachable
    lines=20
    [ $((SECONDS - began)) -lt 600 ] || dropped=0 # once in a while is no trouble
    case "$ended" in
      "ended 0") say "done; the TPU is still there: $(invocation delete)"; return ;;
      "stopped 0" | "stopped 42" | "stopped 130") say "stopped, saved; the same command continues"; return ;;
      stopped*) fail "stopped, but ended with status ${ended#stopped }; the same command continues from the last checkpoint" ;;
      running) dropped=$((dropped + 1)); say "the connection broke off; the run goes on" ;;
      unreachable) dropped=$((dropped + 1)) ;;
      ended*) restartable "${ended#ended }" || give_up "${ended#ended }" ;;
    esac
    if [ "$ended" = running ] && [ "$dropped" -le 10 ]; then between_checks 10; continue; fi
    if [ "$ended" = unreachable ] && [ "$dropped" -le 10 ]; then
      between_checks 30
      [ "$(tpu_state || echo unknown)" != ACTIVE ] || continue
    fi
    [ "$dropped" -le 10 ] || fail "worker 0 of $name can't be held; '$(invocation logs)' shows the run, if it goes on"
    attempt=$((attempt + 1))
    [ "$attempt" -le "$restarts" ] || fail "started again $restarts times (--restarts) and $ended; the workdir is saved"
    next_pause $((SECONDS - started))
    say "$ended: starting again ($attempt of at most $restarts)"
    between_checks "$pause"
    begin
    lines=+1 dropped=0 started="$SECONDS"
  done
}

# give_up STATUS: prints every host's report, and fails.
give_up() {
  hosts "$(here report)" >&2 || true
  fail "the run ended with status $1; the last line of every host stands above"
}

start() {
  local missing=() each chips=0 hosts=1 devices=0 state=""
  attempt=0
  project_config
  resolve_environment
  local secret_form='^[A-Za-z_][A-Za-z0-9_]*(=[-A-Za-z0-9_]+)?$' # bash 3.2 takes no parentheses after =~
  for each in ${secrets[@]+"${secrets[@]}"}; do
    [[ "$each" =~ $secret_form ]] || die "--secret=$each must be VARIABLE or VARIABLE=SECRET"
  done
  [ -z "$type" ] || describe_type
  [ -n "$type" ] || missing+=("--type=v5p-128, the kind of TPU and its size")
  [ -z "$flex_start" ] || [ -n "$max_run_duration" ] || missing+=("--max_run_duration=24h, for which a flex-start TPU is yours (7d at most)")
  [ -n "$flex_start" ] || [ -z "$max_run_duration" ] || die "--max_run_duration=$max_run_duration is for --flex_start; add that, or leave it out"
  [ -n "$workdir" ] || missing+=("--workdir=gs://BUCKET/FOLDER (or a folder mounted on all hosts, with --mounted): every host needs it")
  case "$workdir" in
    "" | gs://*) ;;
    *) [[ -n "$mounted" && "$workdir" == /* ]] ||
      die "--workdir=$workdir: give --workdir=gs://BUCKET/FOLDER, or a path from / with --mounted if every host has it mounted: all hosts write there" ;;
  esac
  [ -z "$max_run_duration" ] || seconds_of max_run_duration "$max_run_duration" >/dev/null
  check_run tpu "$devices" "$hosts" "$slices" \
    "launch/tpu_pod.sh ${config#own_config/} --type=v5p-128 --zone=us-east5-a --workdir=gs://BUCKET/$name"
  [ ${#missing[@]} -eq 0 ] || die "give ${missing[*]}" # where --unchecked left the check out
  [ -n "$dry_run" ] || { find_zone && find_state; }
  if [ "$state" = ACTIVE ] && [ "$(status_of_run)" = running ]; then
    say "a run is there already: its log (stop it with '$(invocation stop)')"
  else
    begin
  fi
  supervise
}

case "$verb" in
  start) start ;;
  status)
    state="$(tpu_state)"
    [ -n "$dry_run" ] || echo "${state:-none}"
    if [ -n "$dry_run" ] || [ "$state" = ACTIVE ]; then hosts "$(here report)"; fi ;;
  logs)
    trap 'exit 130' INT
    on "$(slice_names | sed -n 1p)" "$worker" "$(here follow 100)" ;;
  stop) hosts "$(here stop)" ;;
  delete) delete_tpu ;;
esac
