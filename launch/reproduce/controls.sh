#!/usr/bin/env bash
# Where the ODE's lead comes from: models between it and the baseline, each at its best learning rate
# (`sweep_controls` in t5x_diffeq/experiments/beyond_paper.py says which).
#
#   launch/reproduce/controls.sh --text=stdlib [--output=DIR] [--part=0/4]
#   launch/reproduce/controls.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce controls "$@"
