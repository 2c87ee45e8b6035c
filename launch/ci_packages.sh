#!/usr/bin/env bash
# Installs Debian's packages of the programs that the slow tests use: launch/test.sh calls this in CI. If
# they can't be installed, the tests that need them say why they are skipped.

set -euo pipefail
packages=(munge slurmctld slurmd slurm-client openssh-server openssh-client procps buildah debootstrap
  chromium chromium-driver)

[ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || exit 0
export DEBIAN_FRONTEND=noninteractive
if ! apt-get install --yes --quiet --no-install-recommends "${packages[@]}" >/dev/null 2>&1; then
  apt-get update --quiet >/dev/null &&
    apt-get install --yes --quiet --no-install-recommends "${packages[@]}" >/dev/null ||
    echo "warning: ${packages[*]} can't be installed; their tests are skipped" >&2
fi
