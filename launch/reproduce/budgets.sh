#!/usr/bin/env bash
# ODE against baseline at equal steps, equal time and equal parameters (beside tables 1 and 2).
#
#   launch/reproduce/budgets.sh --text=shakespeare=tinyshakespeare.txt [--output=DIR] [--part=0/4]
#   launch/reproduce/budgets.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext
#
# For times, let no other work run beside it.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce budgets "$@"
