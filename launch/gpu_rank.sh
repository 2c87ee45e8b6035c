#!/usr/bin/env bash
# One process of a GPU run; gpu_nodes.sh starts it, over ssh or where a launcher gives rank and size.
#
#   gpu_rank.sh RANK SIZE COORDINATOR LOCAL_RANK WATCH [train's argument ...]
#
# LOCAL_RANK: the one GPU of this process, or `all`. WATCH: `stdin` ends the run, saved, when standard
# input does, which is how a dropped ssh or a Ctrl-C at its other end is heard of; or `nothing`.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/forward.sh"

rank="$1" size="$2" coordinator="$3" local_rank="$4" watch="$5"
shift 5
cd "$ROOT"
if [ "$size" -gt 1 ]; then
  export JAX_COORDINATOR_ADDRESS="$coordinator" JAX_NUM_PROCESSES="$size" JAX_PROCESS_ID="$rank"
fi
[ "$local_rank" = all ] || export JAX_LOCAL_DEVICE_IDS="$local_rank"
XLA_FLAGS="$("$VENV/bin/python" launch/xla_flags.py)"
export XLA_FLAGS NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
gpu_memory
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

train=("$VENV/bin/python" -m t5x_diffeq.train "$@")
[ "$watch" = stdin ] || exec "${train[@]}"

(while read -r _; do :; done; kill -TERM $$) <&0 2>/dev/null &
watcher=$!
status=0
forwarding "${train[@]}" </dev/null || status=$?
kill "$watcher" 2>/dev/null || true
exit "$status"
