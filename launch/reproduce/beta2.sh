#!/usr/bin/env bash
# Figure 7 of the paper: Adam's beta2, 0.95 against 0.999, of GPT-large.
#
#   launch/reproduce/beta2.sh --text=shakespeare=tinyshakespeare.txt --text=stdlib [--output=DIR] [--part=0/4]
#   launch/reproduce/beta2.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce figure7 "$@"
