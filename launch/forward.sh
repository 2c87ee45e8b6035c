# shellcheck shell=bash
# Sourced where a script stands between a program and who may end it.

# outlast: waits until `child` ends, also where a signal, whose trap must set `signalled=true`, ends
# bash's `wait` early. Returns the child's exit status.
outlast() {
  local status
  signalled=true
  while [ "$signalled" = true ]; do
    signalled=false status=0
    wait "$child" || status=$?
  done
  return "$status"
}

# forwarding COMMAND ...: runs it, hands SIGTERM on (and USR1 and INT, as SIGTERM: it saves), and
# returns its exit status.
forwarding() {
  "$@" &
  child=$!
  trap 'signalled=true; kill -TERM "$child" 2>/dev/null || true' TERM USR1 INT
  outlast
}
