#!/usr/bin/env bash
# Figure 8 of the paper: loss over the steps of training of Llama's block, ODE and baseline.
#
#   launch/reproduce/loss_curves_llama1b.sh --text=shakespeare=tinyshakespeare.txt --text=stdlib [--output=DIR] [--part=0/4]
#   launch/reproduce/loss_curves_llama1b.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce figure8 "$@"
