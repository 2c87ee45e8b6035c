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
case "${JAX_PLATFORMS:-}" in cuda*) gpu_variables ;; esac
[ -z "${KUBERNETES_SERVICE_HOST:-}" ] || keep_programs "$@"
# Not `exec`: to the first process of a container SIGTERM means nothing, until it asks for it.
forwarding python -m t5x_diffeq "$verb" "$@"
