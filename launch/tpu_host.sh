#!/usr/bin/env bash
# One TPU host's part; tpu_pod.sh copies it there and calls it over ssh.
#
#   tpu_host.sh install            makes the environment, once
#   tpu_host.sh start ID ARG ...   trains in the background: it survives a dropped ssh
#   tpu_host.sh resume             continues what ran when the machine was restarted
#   tpu_host.sh status             one line: absent, running, lost, `ended STATUS`, `stopped STATUS`
#   tpu_host.sh follow [LINES [ID]]   prints the log until training ends
#   tpu_host.sh stop               sends SIGTERM, and waits until it has saved
#   tpu_host.sh report             this host's name, status and the last line of the log
#
# When the infrastructure fails (status 175) or a signal ends the training, every host starts it again by
# itself, after a pause that grows while it soon fails. The hosts wait four hours for each other, because
# Google may take that long to mend a machine; T5X_DIFFEQ_ARRIVAL_SECONDS changes that. `settings`, beside
# the project, holds what tpu_pod.sh was told: variables (KEY=VALUE, quoted for a shell), and the names of
# secrets, which are read anew at every start.

set -euo pipefail
VENV="${VENV:-$HOME/t5x_diffeq_venv}" # beside the project, which is replaced as a whole
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/forward.sh"
state="$HOME/t5x_diffeq_run"
mkdir -p "$state"

# TPU machines come with Python 3.10 and pip: uv brings the Python that the constraints are for.
install_host() {
  read_settings
  trap 'needs_registry "$?"' EXIT
  export PATH="$state/uv/bin:$PATH"
  export UV_CONSTRAINT="$ROOT/docker/constraints.txt" UV_BUILD_CONSTRAINT="$ROOT/docker/constraints.txt"
  # In a folder of its own, which systems that manage their own Python packages allow too.
  command -v uv >/dev/null ||
    python3 -m pip install --quiet --target "$state/uv" --requirement <(uv_requirement)
  [ -x "$VENV/bin/python" ] || uv venv --quiet --python 3.12 "$VENV"
  setup tpu data gcs trackers
  trap - EXIT
}

# needs_registry STATUS: says what an installation that failed may lack.
needs_registry() {
  echo "$(hostname) could not install the project, which takes packages from PyPI and a Python from GitHub. With" \
    "--internal_ips the network needs Cloud NAT for that, or give mirrors of your own: --env=PIP_INDEX_URL=URL" \
    "--env=UV_DEFAULT_INDEX=URL --env=UV_PYTHON_INSTALL_MIRROR=URL" >&2
  exit "$1"
}

is_running() {
  local pid
  pid="$(cat "$state/pid" 2>/dev/null)" || return 1
  for _ in {1..15}; do # ps shows nothing of a process that is just starting another program
    [ ! -e "$state/status" ] || return 1
    [[ "$(ps -o args= -p "$pid")" != *tpu_host.sh* ]] || return 0
    kill -0 "$pid" 2>/dev/null || return 1
    sleep 0.2
  done
  return 1
}

# start ID ARG ...: starts the training; does nothing if the ID is the same, as after ssh broke off.
start() {
  local id="$1"
  shift
  [ "$(cat "$state/id" 2>/dev/null)" != "$id" ] || return 0
  end_running 120
  printf '%s\0' "$@" >"$state/arguments"
  [ ! -e "$state/log" ] || mv "$state/log" "$state/log.before"
  : >"$state/log"
  begin "$@"
  echo "$id" >"$state/id"
}

# begin ARG ...: trains in the background.
begin() {
  rm -f "$state/status" "$state/stopped"
  setsid nohup bash "${BASH_SOURCE[0]}" run "$@" >>"$state/log" 2>&1 </dev/null &
  echo $! >"$state/pid"
}

# At boot: continues a run that was cut off, or that saved because the machine was shut down.
resume() {
  local arguments=() each
  case "$(status)" in lost | "ended 42") ;; *) return 0 ;; esac
  while IFS= read -r -d '' each; do arguments+=("$each"); done <"$state/arguments"
  echo "the machine was started anew; the run goes on" >>"$state/log"
  begin "${arguments[@]}"
}

# Sets the variables that were given to tpu_pod.sh.
read_settings() {
  [ -e "$ROOT/settings" ] || return 0
  # shellcheck disable=SC1091
  set -a && source "$ROOT/settings" && set +a
}

# Sets these variables and the secrets.
set_up_environment() {
  local each value
  read_settings
  for each in ${T5X_DIFFEQ_SECRETS:-}; do
    value="$(gcloud secrets versions access latest --secret="${each#*=}")" ||
      die "the secret ${each#*=} (--secret=$each) can't be read; this machine's service account needs the role roles/secretmanager.secretAccessor"
    export "${each%%=*}=$value"
  done
}

# Runs in the background: trains, and leaves the exit status for the other commands, even if it ends
# before the training begins.
run_training() {
  local status=0 restarts=0 keeper="" pause="" began
  trap 'leave_status "$?"' EXIT
  cd "$ROOT"
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
  set_up_environment
  export T5X_DIFFEQ_ARRIVAL_SECONDS="${T5X_DIFFEQ_ARRIVAL_SECONDS:-14400}"
  keep_programs "$@"
  keep_log "$@"
  while :; do
    status=0 began="$SECONDS"
    forwarding "$VENV/bin/python" -m t5x_diffeq.train "$@" || status=$?
    next_pause $((SECONDS - began))
    again "$status" || break
  done
  # The status must be left even if the keeper of the log has failed.
  if [ -n "$keeper" ]; then
    kill -TERM "$keeper" 2>/dev/null || true
    wait "$keeper" || true
  fi
  trap - EXIT
  leave_status "$status"
}

leave_status() {
  echo "$1" >"$state/status.new"
  mv "$state/status.new" "$state/status"
}

# keep_log ARG ...: sets `keeper`, which copies the log to the workdir: this machine may be taken away.
keep_log() {
  local each workdir=""
  for each in "$@"; do
    [[ "$each" != --workdir=* ]] || workdir="${each#--workdir=}"
  done
  "$VENV/bin/python" launch/keep_log.py "$state/log" \
    "$workdir/logs/$(date -u +%Y-%m-%dT%H-%M-%S)-$(hostname).log" &
  keeper=$!
}

# again STATUS: whether every host starts the training again: if the infrastructure failed (175) or a signal
# ended the training, unless it was told to end.
again() {
  [ "$1" -ge 129 ] && [ "$1" -ne 130 ] && [ "$restarts" -lt "${T5X_DIFFEQ_RESTARTS:-100}" ] || return 1
  restarts=$((restarts + 1))
  echo "ended with status $1; starting again on this host in $pause s ($restarts of at most ${T5X_DIFFEQ_RESTARTS:-100})"
  signalled=false # a signal while nothing trains; forward.sh sets it
  sleep "${LAUNCH_POLL_SECONDS:-$pause}" &
  wait $! || true
  [ "$signalled" = false ] && [ ! -e "$state/stopped" ]
}

# end_running SECONDS: sends SIGTERM to the training, and SIGKILL if it runs for so many seconds more.
end_running() {
  local left="$1"
  is_running || return 0
  kill -TERM "$(cat "$state/pid")"
  while is_running; do
    [ "$left" -gt 0 ] || { kill -KILL -- "-$(cat "$state/pid")" || true; return 0; }
    left=$((left - 1))
    sleep 1
  done
}

status() {
  local word=ended
  [ ! -e "$state/stopped" ] || word=stopped
  if [ ! -e "$state/id" ]; then
    echo absent
  elif [ -e "$state/status" ]; then
    echo "$word $(cat "$state/status")"
  elif is_running; then
    echo running
  elif [ -e "$state/status" ]; then # it ended between the two looks
    echo "$word $(cat "$state/status")"
  elif [ "$word" = stopped ]; then
    echo "stopped 137" # it had to be killed, or the machine was started anew before it had saved
  else
    echo lost # the machine was started anew, or the process was killed
  fi
}

# gcloud runs its command again after ssh broke off: the log then goes on near its end (the ID is the same).
follow() {
  local lines="${1:-+1}"
  [ -e "$state/log" ] || die "nothing was started on this host"
  if [ -n "${2:-}" ]; then
    [ "$2" != "$(cat "$state/followed" 2>/dev/null)" ] || lines=20
    echo "$2" >"$state/followed"
  fi
  tail --lines="$lines" --follow --pid="$(cat "$state/pid")" "$state/log"
}

command="${1:-}"
shift || true
case "$command" in
  install) install_host ;;
  start) start "$@" ;;
  resume) resume ;;
  run) run_training "$@" ;;
  status) status ;;
  follow) follow "$@" ;;
  stop) touch "$state/stopped"; end_running 600; status ;;
  report) echo "$(hostname): $(status) | $(tail -n 1 "$state/log" 2>/dev/null || true)" ;;
  *) die "tpu_host.sh does not know '$command'" ;;
esac
