#!/usr/bin/env bash
# Table 4 and figures 9 and 10 of the paper: tasks of lm-evaluation-harness on GPT-large, ODE,
# baseline, and per-layer weights with the ODE's scheme.
#
#   launch/reproduce/downstream_gpt_large.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext [--output=DIR] [--part=0/3]
#
# These are the paper's eleven tasks, without and with five examples, of models of GPT-large's shape.
# `python -m studies.own_tasks --text=stdlib` asks small models two tasks of the text's own.

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
EXTRAS=(analysis eval)
reproduce table4 "$@"
