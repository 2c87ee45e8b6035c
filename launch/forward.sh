# shellcheck shell=bash
# Sourced by scripts that start a program: signals are handed on to it, it gets most of a GPU's memory,
# its compiled programs are kept where all hosts find them, and the pause before a restart grows while
# starts soon fail.

# next_pause SECONDS: sets `pause`, the seconds to wait before the next start, after a start that lasted
# SECONDS: 10 at first, and twice as many after each start of less than ten minutes, up to 320.
next_pause() {
  if [ "$1" -ge 600 ] || [ -z "${pause:-}" ]; then
    pause=10
  elif [ "$pause" -lt 320 ]; then
    pause=$((pause * 2))
  fi
}

# gpu_variables [FRACTION]: JAX takes this fraction of each GPU's memory, 92% by default, instead of its own
# 75%, and NCCL warns, unless the user has chosen.
gpu_variables() {
  export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
  [ -n "${XLA_PYTHON_CLIENT_MEM_FRACTION:-}" ] || # the old name, which must not stand beside the new
    export XLA_CLIENT_MEM_FRACTION="${XLA_CLIENT_MEM_FRACTION:-${1:-0.92}}"
}

# keep_programs ARGUMENT ...: compiled programs are kept beside the --workdir among the arguments, unless
# the user has chosen. There every host of the run finds them after a restart, even with a new home. Beside
# a whole bucket there are only buckets of other people.
keep_programs() {
  local each folder=""
  for each in "$@"; do
    [[ "$each" != --workdir=* ]] || folder="${each#--workdir=}"
  done
  while [[ "$folder" == */ ]]; do folder="${folder%/}"; done
  [[ "${folder#*://}" == */* ]] && [ -z "${JAX_COMPILATION_CACHE_DIR:-}" ] || return 0
  folder="${folder%/*}/compilation_cache"
  if [[ "$folder" != *://* ]]; then # it will hold native code, so nobody else may own it
    { mkdir -p "${folder%/*}" && mkdir -m 700 "$folder"; } 2>/dev/null || [ -O "$folder" ] || return 0
  fi
  export JAX_COMPILATION_CACHE_DIR="$folder"
}

# forwarding COMMAND ...: runs the command, and returns its exit status. SIGTERM, USR1 and INT are handed
# on as SIGTERM, on which the command saves.
forwarding() {
  "$@" &
  child=$!
  trap 'signalled=true; kill -TERM "$child" 2>/dev/null || true' TERM USR1 INT
  wait_for_child
}

# forwarding_all COMMAND ...: `forwarding` on a terminal: Ctrl-C is handed on as SIGINT, also to the
# processes that the command has started.
forwarding_all() {
  set -m # a group of its own, in which SIGINT isn't ignored
  "$@" &
  child=$!
  set +m
  trap 'signalled=true; kill -TERM "$child" 2>/dev/null || true' TERM
  trap 'signalled=true; kill -INT -- "-$child" 2>/dev/null || true' INT
  wait_for_child
}

# Waits until $child has ended, and returns its exit status. A signal to this script, whose trap sets
# `signalled`, ends `wait` early; then it waits again.
wait_for_child() {
  local status
  signalled=true
  while [ "$signalled" = true ]; do
    signalled=false status=0
    wait "$child" || status=$?
  done
  return "$status"
}
