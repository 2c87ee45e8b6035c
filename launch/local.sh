#!/usr/bin/env bash
# Trains a config on this machine, evaluates it, and prints a sample of its text.
#
#   launch/local.sh configs/tiny.py [--workdir=DIR] [--config.train.total_steps=50 ...]
#
# Sets itself up the first time. The same command again continues the run in its workdir, which is
# named after the config if it isn't given.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

[ $# -ge 1 ] || die "give a config: launch/local.sh configs/tiny.py"
config="$1"
shift
case "$config" in
  -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  -*) die "the config comes first: launch/local.sh configs/tiny.py $config" ;;
esac

# A config of the project is found from anywhere.
if [ ! -e "${config%%:*}" ] && [ -e "$ROOT/${config%%:*}" ]; then
  config="$ROOT/$config"
fi
name="$(basename "${config%%:*}" .py)"
[[ "$config" != *:* ]] || name="$name-${config##*:}"
workdir="workdirs/$name"
arguments=()
while [ $# -gt 0 ]; do
  case "$1" in
    --workdir=*) workdir="${1#--workdir=}" ;;
    --workdir) [ $# -ge 2 ] || die "--workdir needs a folder"; workdir="$2"; shift ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

setup
python="$VENV/bin/python"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
echo "workdir: $workdir" >&2
"$python" -m t5x_diffeq.train --config="$config" --workdir="$workdir" ${arguments[@]+"${arguments[@]}"}
echo "--- evaluation on the whole validation split" >&2
"$python" -m t5x_diffeq.evaluate --workdir="$workdir"
echo "--- a sample" >&2
"$python" -m t5x_diffeq.generate --workdir="$workdir" --max_tokens=80
