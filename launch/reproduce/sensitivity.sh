#!/usr/bin/env bash
# Figure 3 of the paper: which tokens the next word depends on, by Lyapunov exponents.
#
#   launch/reproduce/sensitivity.sh --text=stdlib [--output=DIR]
#   launch/reproduce/sensitivity.sh --scale=paper --text=openwebtext=openwebtext:ARCHIVE
#
# Each run is done once: the same command again goes on where it was stopped. Other flags are
# those of t5x_diffeq.reproduce.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce figure3 "$@"
