#!/usr/bin/env bash
# Figure 14 of the paper: the width T of the time embedding, of GPT-large, and its baseline.
#
#   launch/reproduce/time_embedding_width.sh --text=shakespeare=tinyshakespeare.txt --text=stdlib [--output=DIR] [--part=0/4]
#   launch/reproduce/time_embedding_width.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce figure14 "$@"
