#!/usr/bin/env bash
# Figures 15, 16 and table 6 of the paper: time, memory and parameters against T, of GPT-medium.
#
#   launch/reproduce/cost.sh [--output=DIR] [--part=0/4]
#   launch/reproduce/cost.sh --scale=paper

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce figure15 "$@"
