#!/usr/bin/env bash
# Takes the newest versions of every package, for the clone and for the images:
#
#   launch/lock.sh    needs uv; test what it wrote with launch/test.sh before you commit it
#
# versions.txt has the versions that the scripts install for a clone, for every Python and platform;
# docker/constraints.txt has the images' versions, for their Python, with the hashes of their files.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
compile() { uv pip compile --quiet --upgrade --no-header --no-annotate "$@"; }
# In addition to the project's requirements: the program that installs it, and those that build it.
tools() { printf '%s\n' uv hatchling editables; }
tools | compile --universal --python-version 3.11 --all-extras pyproject.toml - --output-file launch/versions.txt
tools | compile --generate-hashes --python-version 3.12 --python-platform x86_64-manylinux_2_31 \
  pyproject.toml - --extra tpu --extra gpu --extra data --extra gcs --extra adaptive \
  --extra analysis --extra trackers \
  --output-file docker/constraints.txt
