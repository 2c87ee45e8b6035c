#!/usr/bin/env bash
# The startup script of the TPU machines, which Google runs at every boot: a run that was under way when
# the machine was started anew goes on. tpu_pod.sh hands it over when it requests the TPU.

set -euo pipefail

for script in "${HOMES:-/home}"/*/t5x_diffeq/launch/tpu_host.sh; do
  [ -e "$script" ] || continue
  home="${script%/t5x_diffeq/launch/tpu_host.sh}"
  owner="$(stat --format=%U "$script")"
  runuser --user "$owner" -- env HOME="$home" bash "$script" resume
done
