#!/usr/bin/env bash
# Figure 13 of the paper: particles under attention alone, whose weights grow as powers of time.
#
#   launch/reproduce/clustering.sh [--output=DIR]
#   launch/reproduce/clustering.sh --scale=paper

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce figure13 "$@"
