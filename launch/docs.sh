#!/usr/bin/env bash
# Builds or serves the documentation site of docs/. Sets itself up the first time.
#
#   launch/docs.sh          serves it on http://127.0.0.1:8000, and builds it again after each change
#   launch/docs.sh build    builds it in build/site, readable without a network; its search needs a
#                           server, such as python -m http.server
#
# Both run the examples first, which takes a few minutes, and show what they print; EXAMPLES= runs
# none, and EXAMPLES=own_hook,own_block these.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case "${1:-serve}" in
  -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  serve) command=(serve) ;;
  build) command=(build --strict) ;;
  *) die "$1 is neither serve nor build; see --help" ;;
esac
setup docs
cd "$ROOT"
export NO_MKDOCS_2_WARNING=1 # the theme is supported until May 2027; zensical reads the same mkdocs.yml
exec "$VENV/bin/mkdocs" "${command[@]}" "${@:2}"
