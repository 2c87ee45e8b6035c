#!/usr/bin/env bash
# The startup script of the TPU machines, which Google runs as root at every boot: it continues a run that
# was under way before a restart of the machine. tpu_pod.sh hands it over when it requests the TPU.
#
# A home is left alone unless one user owns it, its copy of the project and the programs that would run.

set -euo pipefail

# belongs_to OWNER PATH ...: whether OWNER owns all paths, none is a link, and none is writable by everybody.
belongs_to() {
  local owner="$1"
  shift
  [ "$(find "$@" -maxdepth 0 -user "$owner" ! -type l ! -perm -o=w -printf . 2>/dev/null | wc -c)" -eq $# ]
}

for home in "${HOMES:-/home}"/*; do
  copy="$home/t5x_diffeq" venv="$home/t5x_diffeq_venv"
  script="$copy/launch/tpu_host.sh" python="$venv/bin/python"
  [ -e "$script" ] || continue
  owner="$(stat --format=%u "$home")"
  # The Python of an environment is a link to a Python of the owner or of the system.
  if belongs_to "$owner" "$home" "$copy" "$copy/launch" "$script" "$venv" "$venv/bin" &&
    [ -n "$(find -L "$python" -maxdepth 0 "(" -user "$owner" -o -user 0 ")")" ] && name="$(id -nu "$owner")"; then
    runuser --user "$name" -- env HOME="$home" bash "$script" resume ||
      echo "warning: $script could not resume its run" >&2
  else
    echo "warning: $home, its copy of the project and its programs are not one user's; left alone" >&2
  fi
done
