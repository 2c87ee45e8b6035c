#!/usr/bin/env bash
# Loss against learning rate at 4, 8, 16 and 32 steps or layers: does one rate suit them all?
#
#   launch/reproduce/depth_transfer.sh --text=stdlib [--output=DIR]
#   launch/reproduce/depth_transfer.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce depth_transfer "$@"
