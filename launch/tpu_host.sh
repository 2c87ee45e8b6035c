#!/usr/bin/env bash
# One TPU host's part; tpu_pod.sh copies it there and calls it over ssh.
#
#   tpu_host.sh install            makes the environment, once
#   tpu_host.sh start ID ARG ...   trains in the background: a dropped ssh does it no harm
#   tpu_host.sh status             one line: absent, running, lost, `ended STATUS`, `stopped STATUS`
#   tpu_host.sh follow [LINES]     prints the log until training ends
#   tpu_host.sh stop               SIGTERM, and waits: it saves
#   tpu_host.sh report             status and the last line of the log

set -euo pipefail
VENV="${VENV:-$HOME/t5x_diffeq_venv}" # beside the project, which is replaced as a whole
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/forward.sh"
state="$HOME/t5x_diffeq_run"
mkdir -p "$state"

# TPU machines come with Python 3.10 and pip: uv brings the Python that the constraints are for.
install_host() {
  export PATH="$HOME/.local/bin:$PATH"
  export UV_CONSTRAINT="$ROOT/docker/constraints.txt" PIP_CONSTRAINT="$ROOT/docker/constraints.txt"
  command -v uv >/dev/null || python3 -m pip install --quiet --user uv
  [ -x "$VENV/bin/python" ] || uv venv --quiet --python 3.12 "$VENV"
  setup tpu data gcs
}

is_running() {
  local pid
  pid="$(cat "$state/pid" 2>/dev/null)" || return 1
  [ ! -e "$state/status" ] && [[ "$(ps -o args= -p "$pid")" == *tpu_host.sh* ]]
}

# What is asked for twice, because ssh broke off, is done once.
start() {
  local id="$1"
  shift
  [ "$(cat "$state/id" 2>/dev/null)" != "$id" ] || return 0
  end_running 120
  rm -f "$state/status" "$state/stopped"
  [ ! -e "$state/log" ] || mv "$state/log" "$state/log.before"
  : >"$state/log"
  setsid nohup bash "${BASH_SOURCE[0]}" run "$@" >>"$state/log" 2>&1 </dev/null &
  echo $! >"$state/pid"
  echo "$id" >"$state/id"
}

# In the background: trains, and leaves the exit status for the other commands to find.
run_training() {
  local status=0
  cd "$ROOT"
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
  forwarding "$VENV/bin/python" -m t5x_diffeq.train "$@" || status=$?
  echo "$status" >"$state/status.new"
  mv "$state/status.new" "$state/status"
}

# end_running SECONDS: SIGTERM; SIGKILL after so long.
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
  else
    echo lost # the machine was started anew, or the process was killed
  fi
}

follow() {
  [ -e "$state/log" ] || die "nothing was started on this host"
  tail --lines="${1:-+1}" --follow --pid="$(cat "$state/pid")" "$state/log"
}

command="${1:-}"
shift || true
case "$command" in
  install) install_host ;;
  start) start "$@" ;;
  run) run_training "$@" ;;
  status) status ;;
  follow) follow "$@" ;;
  stop) touch "$state/stopped"; end_running 600; status ;;
  report) echo "$(status) | $(tail -n 1 "$state/log" 2>/dev/null || true)" ;;
  *) die "tpu_host.sh does not know '$command'" ;;
esac
