#!/usr/bin/env bash
# The images' installation, into the environment of the `python` on the PATH:
#
#   install.sh requirements tpu|gpu   prints what pyproject.toml, beside it, asks for
#   install.sh dependencies           installs requirements.txt, in the versions of constraints.txt,
#                                     whose hashes are checked
#   install.sh project                needs the sources; what builds it is checked, too; and that
#                                     the program starts

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
[ -e pyproject.toml ] || [ ! -e ../pyproject.toml ] || cd .. # in a clone
constraints=constraints.txt
[ -e "$constraints" ] || constraints="docker/$constraints"

pip_install() {
  python -m uv pip install --quiet --link-mode=copy --python "$(command -v python)" "$@"
}

case "$1" in
  requirements)
    python - "$2" data gcs adaptive analysis trackers <<'PYTHON'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = [project["optional-dependencies"][name] for name in sys.argv[1:]]
print(*sorted([*project["dependencies"], *sum(extras, [])]), sep="\n")
PYTHON
    ;;
  dependencies)
    # As a requirement: older versions of pip don't take the hashes of constraints.
    sed -n '/^uv==/,/[^\\]$/p' "$constraints" >uv.txt
    python -m pip install --quiet --disable-pip-version-check --requirement uv.txt
    pip_install --constraint "$constraints" --requirement requirements.txt
    ;;
  project)
    pip_install --no-deps --build-constraint "$constraints" .
    cd /
    python -m t5x_diffeq --version
    python -m t5x_diffeq.train --help >/dev/null
    ;;
  *) echo "error: install.sh does not know '$1'" >&2; exit 2 ;;
esac
