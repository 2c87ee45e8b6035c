#!/usr/bin/env bash
# Table 4 and figures 9 and 10 of the paper: tasks of lm-evaluation-harness on GPT-large, ODE,
# baseline, and per-layer weights with the ODE's scheme.
#
#   launch/reproduce/downstream_gpt_large.sh --text=shakespeare=tinyshakespeare.txt [--output=DIR] [--part=0/3]
#   launch/reproduce/downstream_gpt_large.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext
#
# At the paper's scale its eleven tasks, without and with five examples, of models of GPT-large's shape; on a
# laptop, two tasks of the text's own.

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
EXTRAS=(analysis eval)
reproduce table4 "$@"
