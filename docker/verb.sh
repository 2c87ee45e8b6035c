#!/usr/bin/env bash
# The images' entry point: `train --config=...` is `python -m t5x_diffeq.train --config=...`; no
# argument lists the verbs.

set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=../launch/forward.sh
source "$here/forward.sh"

# Google's logging takes each line of standard error for an error, and most of ours are none.
[ -z "${KUBERNETES_SERVICE_HOST:-}" ] || exec 2>&1

case "${1:-}" in "" | -*) exec python -m t5x_diffeq "$@" ;; esac
verb="$1"
shift
case "${JAX_PLATFORMS:-}" in
  cuda*)
    XLA_FLAGS="$(python "$here/xla_flags.py" gpu)"
    export XLA_FLAGS NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
    gpu_memory ;;
  tpu*)
    LIBTPU_INIT_ARGS="$(python "$here/xla_flags.py" tpu "${T5X_DIFFEQ_TPU:-}")"
    export LIBTPU_INIT_ARGS ;;
esac
# Not `exec`: to the first process of a container SIGTERM means nothing, until it asks for it.
forwarding python -m t5x_diffeq "$verb" "$@"
