#!/usr/bin/env bash
# Figure 4 of the paper: loss over the steps of training on WikiText-103, ODE, and per-layer weights with
# each scheme.
#
#   launch/reproduce/loss_curves.sh --text=shakespeare=tinyshakespeare.txt --text=stdlib [--output=DIR] [--part=0/4]
#   launch/reproduce/loss_curves.sh --scale=paper --text=wikitext103

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce figure4 "$@"
