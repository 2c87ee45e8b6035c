#!/usr/bin/env bash
# Figure 2 of the paper: spectra of QK and OV over depth, and particles that cluster or don't.
#
#   launch/reproduce/internal_dynamics.sh --text=stdlib [--output=DIR]
#   launch/reproduce/internal_dynamics.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce figure2 "$@"
