#!/usr/bin/env bash
# Tables 1 and 2 of the paper: ODE, baseline and shared weights, each at its best learning rate.
#
#   launch/reproduce/perplexity.sh --text=shakespeare=tinyshakespeare.txt --text=stdlib [--output=DIR] [--part=0/4]
#   launch/reproduce/perplexity.sh --scale=paper --text=openwebtext=tokens:SHARDS
#
# Each run is done once: the same command again goes on where it was stopped. Other flags are those
# of t5x_diffeq.reproduce.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce table1 "$@"
