#!/usr/bin/env bash
# Table 5 and figures 11 and 12 of the paper: tasks of lm-evaluation-harness on Llama-1B, ODE,
# baseline, and per-layer weights with the ODE's scheme.
#
#   launch/reproduce/downstream_llama1b.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext [--output=DIR] [--part=0/3]
#
# These are the paper's eleven tasks, without and with five examples, of models of Llama-1B's shape.
# `python -m studies.own_tasks --text=stdlib` asks small models two tasks of the text's own.

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
EXTRAS=(analysis eval)
reproduce table5 "$@"
