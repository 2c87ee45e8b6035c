#!/usr/bin/env bash
# Table 1 of the paper: perplexity on WikiText-103, ODE, baseline and shared weights, and
# per-layer weights with the ODE's scheme. On a laptop each is at its best learning rate.
#
#   launch/reproduce/perplexity.sh --text=shakespeare=tinyshakespeare.txt --text=stdlib [--output=DIR] [--part=0/4]
#   launch/reproduce/perplexity.sh --scale=paper --text=wikitext103

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce table1 "$@"
