#!/usr/bin/env bash
# The documentation site of docs/. Sets itself up the first time.
#
#   launch/docs.sh          serves it on http://127.0.0.1:8000, and builds it again after each change
#   launch/docs.sh build    builds it in build/site, whose pages need neither a server nor a network
#
# Both run the examples first, which takes a few minutes, and show what they print.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case "${1:-serve}" in
  -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  serve) command=(serve) ;;
  build) command=(build --strict) ;;
  *) die "$1 is neither serve nor build; see --help" ;;
esac
setup docs
cd "$ROOT"
exec "$VENV/bin/mkdocs" "${command[@]}" "${@:2}"
