#!/usr/bin/env bash
# Appendix E of the paper: do spectra grow with depth? ODE and baseline.
#
#   launch/reproduce/spectra.sh --text=stdlib [--output=DIR] [--part=0/4]
#   launch/reproduce/spectra.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext --text=wikitext103

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce appendixE "$@"
