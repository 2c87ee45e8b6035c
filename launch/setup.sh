# shellcheck shell=bash
# Sourced by the other scripts: makes $VENV with the project installed, once.
#
#   PYTHON   the interpreter to use (default: the first of python3.12, python3.13, python3.11 and
#            python3 that is there and new enough; of JAX, Python 3.11 gets no new versions)
#   VENV     where the environment lies (default: .venv in the project). One of your own, in which
#            the project runs already, is left as it is.
#
# Packages have the versions of versions.txt. The environment is brought up to date when that,
# pyproject.toml or the extras change; else this takes no time.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
NAMED_VENV="${VENV:-}"
VENV="${VENV:-$ROOT/.venv}"
export PYTHONSAFEPATH=1 # nothing is imported from the current folder (docs/security.md)

die() {
  echo "error: $*" >&2
  exit 2
}

# True for an interpreter of version 3.11 or later.
new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3.11 python3; do
    if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
    [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a Python 3.11 or later"
  done
  die "no Python 3.11 or later was found; install one, or set PYTHON to it"
}

# True for an environment that `setup` has made or installed into, even if the installation failed.
made_here() {
  compgen -G "$VENV/.installed-*" >/dev/null
}

runs_project() {
  PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$VENV/bin/python" -c 'import t5x_diffeq.training.loop' 2>/dev/null
}

# check_flags VERB WORD ...: checks a verb's flags and keys, where there is an environment.
check_flags() {
  local -x PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
  "$VENV/bin/python" -c "import t5x_diffeq.cli.$1" 2>/dev/null || return 0
  "$VENV/bin/python" -c 'import sys; from t5x_diffeq.cli import command_line; from importlib import import_module
command_line.run(int, "", import_module(f"t5x_diffeq.cli.{sys.argv.pop(1)}").FLAGS)' "$@" || exit
}

# has_extras [extra ...]: true if an installation with the versions in $want had these extras, or more.
has_extras() {
  local file each
  for file in "$VENV"/.installed-*; do
    [ "$(cat "$file" 2>/dev/null)" = "$want" ] || continue
    for each in "$@"; do
      [[ ",${file##*/.installed-}," == *",$each,"* ]] || continue 2
    done
    return
  done
  return 1
}

# setup [extra ...]: installs the project, editable, with these extras.
setup() {
  local extras stamp want python
  extras="$(IFS=,; echo "$*")"
  stamp="$VENV/.installed"
  want="$(cat "$ROOT/pyproject.toml" "$ROOT/launch/versions.txt")|$ROOT"
  if [ -x "$VENV/bin/python" ] && has_extras "$@"; then return; fi
  # An environment of the user's, in which the project runs, is left as it is: one that VENV names,
  # and .venv if no extra is asked for.
  if { [ -n "$NAMED_VENV" ] || [ $# = 0 ]; } && ! made_here && runs_project; then
    [ $# = 0 ] || echo "note: $VENV is left as it is; packages of the extras $extras that it lacks are yours to install" >&2
    return
  fi
  python="$(find_python)"
  mkdir -p "$VENV" || die "VENV=$VENV must be a folder, new or with an environment"
  {
    wait_for_lock "$python"
    has_extras "$@" || make_environment
  } 9>"$VENV/.setup-lock" # `.lock` is uv's own
}

# Locks file 9. If two commands set up at once, the second waits, and finds what the first has made.
wait_for_lock() {
  "$1" - <<'END' || true # some network disks have no locks
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("another command is installing; waiting for it ...", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)
END
}

# The installation of `setup`, whose variables it has.
make_environment() {
  echo "installing into $VENV, once ..." >&2
  if [ ! -x "$VENV/bin/python" ]; then
    : >"$stamp-begun"
    "$python" -m venv "$VENV" || die "$python can't make a virtual environment (on Debian: apt install python3-venv)"
  fi
  install "$ROOT${extras:+[$extras]}" || die "the installation into $VENV failed; the lines above say why"
  printf '%s' "$want" >"$stamp-$extras"
}

# uv and its hashes, as a requirement: older versions of pip don't take the hashes of constraints.
uv_requirement() {
  sed -n '/^uv==/,/[^\\]$/p' "$ROOT/docker/constraints.txt"
}

# Installs with uv if it is installed or can be, else with pip, which takes ten times as long. The packages
# that build the project have the versions of versions.txt, too.
install() {
  local uv
  set -- --quiet --editable "$1"
  if [ -z "${UV_CONSTRAINT:-}" ]; then
    set -- --constraint "$ROOT/launch/versions.txt" "$@"
    local -x UV_BUILD_CONSTRAINT="$ROOT/launch/versions.txt" PIP_BUILD_CONSTRAINT="$ROOT/launch/versions.txt"
  fi
  uv="$(command -v uv)" || { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --requirement <(uv_requirement) 2>/dev/null && uv="$VENV/bin/uv"; } || true
  if [ -n "$uv" ] && VIRTUAL_ENV="$VENV" "$uv" pip install "$@"; then
    return
  fi
  # Before version 25.3, pip reads constraints of the building packages from this variable.
  # -P is for pip alone: some packages, such as promise, import what lies beside their setup.py.
  env -u PYTHONSAFEPATH PIP_CONSTRAINT="${PIP_BUILD_CONSTRAINT:-}" \
    "$VENV/bin/python" -P -m pip install --disable-pip-version-check "$@"
}
