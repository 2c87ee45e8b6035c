# shellcheck shell=bash
# Sourced by the scripts beside it: sets up the environment once and repeats an experiment.

source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"

EXTRAS=(analysis)
ABOUT_ALL="Each run is done once: the same command again goes on where it was stopped. Other flags are those of
t5x_diffeq.reproduce."

# reproduce EXPERIMENT [--output=DIR] [flags of t5x_diffeq.reproduce]
reproduce() {
  local experiment="$1" output=reproduced argument arguments=()
  shift
  for argument in "$@"; do
    case "$argument" in
      -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; echo "$ABOUT_ALL"; exit 0 ;;
      --output=*) output="${argument#--output=}" ;;
      *) arguments+=("$argument") ;;
    esac
  done
  setup "${EXTRAS[@]}"
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
  exec "$VENV/bin/python" -m t5x_diffeq.reproduce --experiment="$experiment" --output="$output" \
    ${arguments[@]+"${arguments[@]}"}
}
