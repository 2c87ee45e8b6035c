#!/usr/bin/env bash
# One process of a GPU run; gpu_nodes.sh starts it, over ssh or where a launcher gives rank and size.
#
#   gpu_rank.sh RANK SIZE COORDINATOR LOCAL_RANK WATCH [train's argument ...]
#
# LOCAL_RANK: the one GPU of this process, or `all`. WATCH: `nothing`; or `stdin`, over ssh. Standard
# input then begins with words that end in a NUL: the config's name, its text, the folder where the user
# stands, variables as NAME=VALUE, and an empty word. Standard input ends when the connection breaks or at
# a Ctrl-C: then the run saves and ends.
#
# The process runs where the user stands, for relative paths among its arguments, or in the project if the
# host has no such folder.

set -euo pipefail
# word: reads the next word from standard input into `word`; if there is none, the connection is lost.
word() { IFS= read -r -d '' word || exit 255; }

if [ "$5" = stdin ]; then
  word; config_name="$word"
  word; config_text="$word"
  word; here="$word"
  word
  while [ -n "$word" ]; do
    export "${word?}"
    word
  done
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/forward.sh"

rank="$1" size="$2" coordinator="$3" local_rank="$4" watch="$5"
shift 5
[ "$watch" != stdin ] || cd "$here" 2>/dev/null || cd "$ROOT"
if [ "$size" -gt 1 ]; then
  export JAX_COORDINATOR_ADDRESS="$coordinator" JAX_NUM_PROCESSES="$size" JAX_PROCESS_ID="$rank"
fi
[ "$local_rank" = all ] || export JAX_LOCAL_DEVICE_IDS="$local_rank"
if [ "${JAX_PLATFORMS:-}" != cpu ]; then
  gpu_variables
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
keep_programs "$@"

train=("$VENV/bin/python" -m t5x_diffeq.train)
[ "$watch" = stdin ] || exec "${train[@]}" "$@"

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
printf '%s\n' "$config_text" >"$folder/${config_name%%:*}"
(while read -r _; do :; done; kill -TERM $$) <&0 2>/dev/null &
watcher=$!
status=0
forwarding "${train[@]}" --config="$folder/$config_name" "$@" </dev/null || status=$?
kill "$watcher" 2>/dev/null || true
exit "$status"
