# shellcheck shell=bash
# Sourced where a script stands between a program and who may end it.

# forwarding COMMAND ...: runs it, hands SIGTERM on (and USR1 and INT, as SIGTERM: it saves), and
# returns its exit status.
forwarding() {
  local status signalled=true
  "$@" &
  child=$!
  trap 'signalled=true; kill -TERM "$child" 2>/dev/null || true' TERM USR1 INT
  while [ "$signalled" = true ]; do # a signal ends `wait` early
    signalled=false status=0
    wait "$child" || status=$?
  done
  return "$status"
}
