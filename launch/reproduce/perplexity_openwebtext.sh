#!/usr/bin/env bash
# Table 2 of the paper: perplexity on OpenWebText, ODE, and per-layer weights with each scheme.
#
#   launch/reproduce/perplexity_openwebtext.sh --text=shakespeare=tinyshakespeare.txt --text=stdlib [--output=DIR] [--part=0/4]
#   launch/reproduce/perplexity_openwebtext.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce table2 "$@"
