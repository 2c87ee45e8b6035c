#!/usr/bin/env bash
# ODE, compact ODE, baseline and shared weights at their best learning rates, with and without a
# penalty on the velocity, after equal steps and in equal time, with a batch at which a step of the
# ODE takes about the baseline's time (configs/workstation.py).
#
#   launch/reproduce/equal_time.sh --text=stdlib --text=shakespeare=tinyshakespeare.txt
#   launch/reproduce/equal_time.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext
#
# The steps are timed first, for which no other work should run beside it.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce equal_time "$@"
