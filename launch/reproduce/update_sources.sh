#!/usr/bin/env bash
# Where the changes of W(t) = W0 + P e(t) come from in the course of a training: from W0, P or e.
#
#   launch/reproduce/update_sources.sh --text=stdlib [--output=DIR]
#   launch/reproduce/update_sources.sh --scale=paper --text=openwebtext=openwebtext:ARCHIVE
#
# Each run is done once: the same command again goes on where it was stopped. Other flags are those
# of t5x_diffeq.reproduce.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce update_sources "$@"
