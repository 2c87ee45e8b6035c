#!/usr/bin/env bash
# Figure 18 of the paper: one time embedding for all kernels, or one for each, of GPT-large.
#
#   launch/reproduce/shared_time_embedding.sh --text=shakespeare=tinyshakespeare.txt --text=stdlib [--output=DIR] [--part=0/4]
#   launch/reproduce/shared_time_embedding.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce figure18 "$@"
