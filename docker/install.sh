#!/usr/bin/env bash
# The images' installation, into the environment of the `python` on the PATH:
#
#   install.sh dependencies tpu|gpu   needs pyproject.toml and constraints.txt beside it
#   install.sh project                needs the sources; checks that the program starts

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
[ -e pyproject.toml ] || cd .. # in a clone
constraints=constraints.txt
[ -e "$constraints" ] || constraints="docker/$constraints"

pip_install() {
  python -m uv pip install --quiet --no-cache --python "$(command -v python)" \
    --constraint "$constraints" "$@"
}

case "$1" in
  dependencies)
    python -m pip install --quiet --no-cache-dir --disable-pip-version-check --constraint "$constraints" uv
    pip_install --requirement pyproject.toml --extra "$2" --extra data --extra gcs --extra adaptive
    ;;
  project)
    pip_install --no-deps .
    cd /
    python -m t5x_diffeq --version
    python -m t5x_diffeq.train --help >/dev/null
    ;;
  *) echo "error: install.sh does not know '$1'" >&2; exit 2 ;;
esac
