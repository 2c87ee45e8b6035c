#!/usr/bin/env bash
# The images' entry point: `train --config=...` is `python -m t5x_diffeq.train --config=...`; no
# argument lists the verbs.

set -euo pipefail
# shellcheck source=../launch/forward.sh
source "$(dirname "${BASH_SOURCE[0]}")/forward.sh"

case "${1:-}" in "" | -*) exec python -m t5x_diffeq "$@" ;; esac
verb="$1"
shift
if [[ "${JAX_PLATFORMS:-}" == cuda* ]]; then
  XLA_FLAGS="$(python "$(dirname "${BASH_SOURCE[0]}")/xla_flags.py")"
  export XLA_FLAGS NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
fi
# Not `exec`: to the first process of a container SIGTERM means nothing, until it asks for it.
forwarding python -m "t5x_diffeq.$verb" "$@"
