#!/usr/bin/env bash
# Makes constraints.txt anew: the versions of everything in the images, for their Python, and the hashes
# of their files.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
echo uv | uv pip compile --quiet --upgrade --generate-hashes --no-header --no-annotate \
  --python-version 3.12 --python-platform x86_64-manylinux_2_31 pyproject.toml - \
  --extra tpu --extra gpu --extra data --extra gcs --extra adaptive --output-file docker/constraints.txt
