#!/usr/bin/env bash
# Builds or serves the documentation site of docs/. Sets itself up the first time.
#
#   launch/docs.sh             serves it on http://127.0.0.1:8000, and builds it after each change
#   launch/docs.sh build       builds it in build/site, in seconds, readable without a network; its
#                              search needs a server, such as python -m http.server
#   launch/docs.sh examples    executes the examples, which takes minutes; the site shows what they
#                              print until their scripts change. Or some: examples own_hook own_block
#
# After launch/notebooks.py, zensical builds it from the same mkdocs.yml (0.0.73, on 2026-11-27):
#   pip install zensical 'mkdocstrings[python]' && zensical build --strict

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case "${1:-serve}" in
  -h | --help) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  serve) command=(serve) ;;
  build) command=(build --strict) ;;
  examples) ;;
  *) die "$1 is not serve, build or examples; see --help" ;;
esac
setup docs
cd "$ROOT"
if [ "${1:-}" = examples ]; then
  exec "$VENV/bin/python" launch/notebooks.py --execute "${@:2}"
fi
"$VENV/bin/python" launch/notebooks.py
export NO_MKDOCS_2_WARNING=1 # the theme is supported until May 2027
exec "$VENV/bin/mkdocs" "${command[@]}" "${@:2}"
