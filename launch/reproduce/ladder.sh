#!/usr/bin/env bash
# Does the lead over the baseline grow with compute? Six models on sizes from 74k to GPT-small's 85M
# parameters in kernels, each trained on 20 tokens per parameter (configs/ladder.py); and phi, the
# recurrence-equivalence exponent.
#
#   launch/reproduce/ladder.sh --text=stdlib [--output=DIR] [--seeds=3] [--part=0/2]
#   timeout 8h launch/reproduce/ladder.sh --text=stdlib
#
# It begins with the smallest size. When it is stopped, it saves the run, and shows and writes the tables
# of what is done; the same command continues.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce ladder "$@"
