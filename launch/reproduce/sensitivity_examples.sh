#!/usr/bin/env bash
# Appendix F of the paper: more examples of figure 3.
#
#   launch/reproduce/sensitivity_examples.sh --text=stdlib [--output=DIR]
#   launch/reproduce/sensitivity_examples.sh --scale=paper --text=openwebtext=stream:Skylion007/openwebtext --text=wikitext103

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
reproduce appendixF "$@"
