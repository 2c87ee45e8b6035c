#!/usr/bin/env bash
# Figure 5 of the paper: trained with 18 steps on one text, tuned on another with 9, 12, 18 and 24.
#
#   launch/reproduce/finetune.sh --text=shakespeare=tinyshakespeare.txt [--output=DIR]
#   launch/reproduce/finetune.sh --scale=paper --text=wikitext103 \
#       --text=openwebtext=stream:Skylion007/openwebtext [--part=0/2]
#
# At laptop scale the other text is Python's standard library.

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce figure5 "$@"
