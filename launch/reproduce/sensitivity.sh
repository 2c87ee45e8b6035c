#!/usr/bin/env bash
# Figure 3 of the paper: which tokens the next word depends on, by Lyapunov exponents.
#
#   launch/reproduce/sensitivity.sh --text=stdlib [--output=DIR]
#   launch/reproduce/sensitivity.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce figure3 "$@"
