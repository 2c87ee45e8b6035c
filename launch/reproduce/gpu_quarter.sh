#!/usr/bin/env bash
# A rung of the ladder of sizes on one GPU in a quarter of an hour: seven models of 9.4 million parameters
# of kernels, each on 189 MB of text. It needs no network.
#
#   launch/reproduce/gpu_quarter.sh --text=PATH [--output=reproduced] [--minutes=8] [--at_once=4] [--rehearse]
#
#   --text=PATH     190 MB of text or more: a file, a folder or a glob of .txt, .md or .jsonl files, whose
#                   last tenth validates
#   --minutes=8     after them the trainings are saved and stopped; the same command continues
#   --at_once=4     trainings that share the GPU
#   --rehearse      at a hundredth of the steps and of the parameters, for a CPU

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/../forward.sh"

text='' output=reproduced minutes=8 at_once=4 scale=paper
for argument in "$@"; do
  case "$argument" in
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --text=*) text="${argument#*=}" ;;
    --output=*) output="${argument#*=}" ;;
    --minutes=*) minutes="${argument#*=}" ;;
    --at_once=*) at_once="${argument#*=}" ;;
    --rehearse) scale=laptop ;;
    *) die "$argument is no option of this script; see --help" ;;
  esac
done
[ -n "$text" ] || die "--text=PATH is missing; see --help"
[ -n "$output" ] || die "--output= names no folder; see --help"
for number in "minutes=$minutes" "at_once=$at_once"; do
  [[ "${number#*=}" =~ ^[1-9][0-9]*$ ]] || die "--$number is no whole number above 0"
done
((at_once <= 7)) || die "--at_once=$at_once: there are seven trainings; give at most 7"

setup analysis
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
shards="$output/gpu_quarter_text"
"$VENV/bin/python" -m t5x_diffeq.prepare_data --config="$ROOT/configs/ladder.py:baseline-256" --output="$shards" \
  --config.data.source=text_files --config.data.path="$text"

# Each training takes its share of the GPU's memory, and leaves some to the libraries of CUDA.
gpu_variables "$(printf '.%02d' $((90 / at_once)))"
left=$((minutes * 60 - SECONDS)) parts=() status=0
((left > 0)) || die "--minutes=$minutes were over before the text was prepared; the same command continues"
# Ctrl-C doesn't reach what `timeout` runs, and the shell's `wait` ends at a signal.
trap 'kill -TERM "${parts[@]}" 2>/dev/null || true' INT TERM HUP
for ((part = 0; part < at_once; part++)); do
  timeout --preserve-status --signal=TERM "$left" "$VENV/bin/python" -m studies.gpu_quarter --scale="$scale" \
    --output="$output" --text="english=tokens:$shards" --part="$part/$at_once" >/dev/null &
  parts+=($!)
done
for part in "${parts[@]}"; do
  wait "$part" || status=$?
  while kill -0 "$part" 2>/dev/null; do wait "$part" || status=$?; done
done
cat "$output/gpu_quarter/tables.md" 2>/dev/null || echo "no training is done yet; the same command continues" >&2
exit "$status"
