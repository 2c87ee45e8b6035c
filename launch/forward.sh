# shellcheck shell=bash
# Sourced where a script stands between a program and who may end it.

# forwarding COMMAND ...: runs it, hands SIGTERM on (and USR1 and INT, as SIGTERM: it saves), and
# returns its exit status.
forwarding() {
  "$@" &
  child=$!
  trap 'signalled=true; kill -TERM "$child" 2>/dev/null || true' TERM USR1 INT
  wait_for_child
}

# Returns the exit status of $child, when it has ended: a signal to this script, whose trap sets
# `signalled`, ends `wait` early.
wait_for_child() {
  local status
  signalled=true
  while [ "$signalled" = true ]; do
    signalled=false status=0
    wait "$child" || status=$?
  done
  return "$status"
}
