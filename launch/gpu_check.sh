#!/usr/bin/env bash
# Checks on a new GPU in minutes that results are right and runs resume, and measures speed.
#
#   launch/gpu_check.sh [--minutes=8] [--small] [--output=FILE]
#
# Kernels against float32, the recorded arrays, a training that is stopped and resumed, then Llama-1B's
# block at full width, ODE and baseline in turns beside what `plan` says of this GPU, GPT-small's five
# models in turns, and generation.
# Prints a table in Markdown, on standard output and into FILE (gpu_check.md). Needs one GPU and no
# network; --small uses sizes for a CPU. Sets itself up the first time; VENV=DIR names an environment
# of yours instead.

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/forward.sh"

case "${1:-}" in
  -h | --help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# An environment in which the project runs is checked as it is, whatever else it lacks.
if ! "$VENV/bin/python" -c "import t5x_diffeq.training.loop" 2>/dev/null; then setup gpu data; fi
gpu_variables
exec "$VENV/bin/python" "$ROOT/launch/gpu_check.py" "$@"
