#!/usr/bin/env bash
# ODE against baseline at equal steps, equal time and equal parameters (beside tables 1 and 2).
#
#   launch/reproduce/budgets.sh --text=shakespeare=tinyshakespeare.txt [--output=DIR] [--part=0/4]
#   launch/reproduce/budgets.sh --scale=paper --text=openwebtext=openwebtext:ARCHIVE
#
# Each run is done once: the same command again goes on where it was stopped. For times, let no
# other work run beside it. Other flags are those of t5x_diffeq.reproduce.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce budgets "$@"
