#!/usr/bin/env bash
# Checks the project: lint, format, tests. Sets itself up the first time.
#
#   launch/test.sh [--slow] [pytest arguments ...]
#
# --slow adds the tests that train and kill whole processes; CI=true does too, and installs what they
# run against where it may: libtpu (the TPU's compiler; no TPU is needed), and as root with apt-get
# SLURM and sshd.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

real_programs() {
  local packages=(munge slurmctld slurmd slurm-client openssh-server openssh-client procps)
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then return; fi
  dpkg --status "${packages[@]}" >/dev/null 2>&1 || {
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${packages[@]}"
  } >/dev/null || echo "warning: ${packages[*]} could not be installed; tests that need them are skipped" >&2
}

extras=(test)
case "${CI:-}" in "" | 0 | false) ;; *) extras+=(tpu); real_programs; set -- --slow "$@" ;; esac
setup "${extras[@]}"
cd "$ROOT"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/python" -m pytest --numprocesses=2 --dist=worksteal "$@"
