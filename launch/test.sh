#!/usr/bin/env bash
# Checks the project: lint, format, types, declared dependencies, tests. Sets itself up the first time.
#
#   launch/test.sh [--slow] [pytest arguments ...]
#
# --slow adds the tests that compile for long, or train and kill whole processes; CI=true does too,
# and installs what they need where it may: libtpu (the TPU's compiler; no TPU is needed),
# and the packages of launch/ci_packages.sh.

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case " $* " in
  *" -h "* | *" --help "*) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac

extras=(test)
case "${CI:-}" in
  "" | 0 | false) ;;
  *) extras+=(tpu); set -- --slow "$@"; "$ROOT/launch/ci_packages.sh" ;;
esac
setup "${extras[@]}"
cd "$ROOT"
unset PYTHONSAFEPATH # the tests import what lies here
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/deptry" .
"$VENV/bin/mypy"
# One core is left for the processes that tests start; on few cores a third and a fourth worker fill the
# time in which the others wait for such processes.
workers=$(($(getconf _NPROCESSORS_ONLN) - 1))
"$VENV/bin/python" -m pytest --numprocesses=$((workers > 4 ? workers : 4)) --dist=worksteal "$@"
