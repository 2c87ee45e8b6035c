#!/usr/bin/env bash
# Table 5 and figures 11 and 12 of the paper: tasks of lm-evaluation-harness on Llama-1B, ODE,
# baseline, and per-layer weights with the ODE's scheme.
#
#   launch/reproduce/downstream_llama1b.sh --text=shakespeare=tinyshakespeare.txt [--output=DIR] [--part=0/3]
#   launch/reproduce/downstream_llama1b.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext
#
# At the paper's scale its eleven tasks, without and with five examples, of models of Llama-1B's shape; on a
# laptop, two tasks of the text's own.

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
EXTRAS=(analysis eval)
reproduce table5 "$@"
