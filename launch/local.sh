#!/usr/bin/env bash
# Trains a config on this machine, evaluates it, and prints a sample of its text.
#
#   launch/local.sh configs/tiny.py [--workdir=DIR] [--config.train.total_steps=50 ...]
#   launch/local.sh --processes=2 --devices_per_process=4 [--restarts=3] configs/tiny.py
#
# The second trains as several processes, each with virtual CPU devices: a real multi-process run,
# restarted at most that often when a process is lost. SIGTERM and Ctrl-C save and end the run.
# --dry-run checks flags and keys where there is an environment, and prints the commands.
# Sets itself up the first time. The same command again continues the run in its workdir, which is
# named after the config if it isn't given.

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/forward.sh"

config=""
workdir=""
arguments=()
several=()
dry_run=""
while [ $# -gt 0 ]; do
  case "$1" in --workdir | --workdir=?*) [ -z "$workdir" ] || die "--workdir is given twice; give it once" ;; esac
  case "$1" in
    -h | --help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --workdir=) die "--workdir= is empty; give a folder, or leave it out" ;;
    --workdir=*) workdir="${1#--workdir=}" ;;
    --workdir) [ $# -ge 2 ] || die "--workdir needs a folder"; workdir="$2"; shift ;;
    --help=*) die "$1 is for the verb: python -m t5x_diffeq.train $1" ;;
    --dry-run | --dry_run) dry_run=true ;;
    --dry-run=* | --dry_run=*) die "$1: ${1%%=*} takes no value; give it alone, or leave it out" ;;
    --processes=* | --devices[-_]per[-_]process=* | --restarts=*)
      [[ "$1" =~ =[1-9][0-9]*$ || "$1" = --restarts=0 ]] || die "$1 must be a number, at least 1"
      several+=("${1/--devices-per-process/--devices_per_process}")
      ;;
    --processes | --devices_per_process | --restarts) die "$1 has no value; write $1=N" ;;
    --config=*) set -- "$1" "${1#--config=}" "${@:2}" ;; # the name is optional here
    --config) ;;
    –* | —*) die "$1 begins with another kind of dash; write --${1#[–—]}" ;;
    -*) arguments+=("$1") ;;
    *://*) die "$1 is an address; download the file, and give its path" ;;
    *.*=*) die "$1 is no config file; did you mean --config.${1#config.}?" ;;
    *=*) die "$1 is not understood; keys are --config.SECTION.NAME=VALUE, and flags --name=value" ;;
    *)
      [ -z "$config" ] ||
        die "two configs are given: $config and $1; a value follows its flag after =, in quotes if it has spaces"
      config="$1" ;;
  esac
  shift
done
case " ${several[*]-}" in
  " " | *" --processes="*) ;;
  *) die "${several[*]} needs --processes=N, the number of processes with virtual CPU devices; leave it out to train as one" ;;
esac
[ -n "$config" ] || die "give a config: launch/local.sh configs/tiny.py"

# A config of the project is found from anywhere.
if [ ! -e "${config%%:*}" ]; then
  [ -e "$ROOT/${config%%:*}" ] ||
    die "${config%%:*}: there is no such file; the project has $(cd "$ROOT" && echo configs/*.py)"
  config="$ROOT/$config"
fi
name="$(basename "${config%%:*}" .py)"
[[ "$config" != *:* ]] || name="$name-${config##*:}"
workdir="${workdir:-workdirs/$name}"

# Every command goes through here; --dry-run prints it instead.
run() {
  if [ -n "$dry_run" ]; then
    printf '+%s\n' "$(printf ' %q' "$@")"
  else
    forwarding_all "$@"
  fi
}

# What the README shows after the training; a user's own environment is left as it is.
extras=(analysis explore export)
[[ "$workdir ${arguments[*]-}" != *gs://* ]] || extras+=(gcs)
if [ -x "$VENV/bin/python" ] && ! made_here; then extras=(); fi
[ -n "$dry_run" ] || setup ${extras[@]+"${extras[@]}"}
python="$VENV/bin/python"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
echo "workdir: $workdir" >&2
train=("$python" -m t5x_diffeq.train --config="$config" --workdir="$workdir" ${arguments[@]+"${arguments[@]}"})
[ -z "$dry_run" ] || check_flags train "${train[@]:3}"
if [ ${#several[@]} -gt 0 ]; then
  train=("$python" "$ROOT/launch/local_processes.py" "${several[@]}" -- "${train[@]}")
fi
run "${train[@]}"
# --trust_plugins: the code that the run names now is what this command has named (`check_config`).
echo "--- evaluation on the whole validation split" >&2
run "$python" -m t5x_diffeq.evaluate --workdir="$workdir" --trust_plugins
echo "--- a sample" >&2
run "$python" -m t5x_diffeq.generate --workdir="$workdir" --trust_plugins --max_tokens=80
