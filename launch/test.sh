#!/usr/bin/env bash
# Checks the project: lint, format, tests. Sets itself up the first time.
#
#   launch/test.sh [--slow] [pytest arguments ...]
#
# --slow adds the tests that train and kill whole processes; CI=true does too.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

setup test
cd "$ROOT"
case "${CI:-}" in "" | 0 | false) ;; *) set -- --slow "$@" ;; esac
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/python" -m pytest --numprocesses=2 --dist=worksteal "$@"
