# shellcheck shell=bash
# Sourced by gke.sh and prepare_data.sh: images, manifests, and following what was applied.

namespace=default name="" template="" image="" build=""

kube() { run kubectl --namespace="$namespace" "$@"; }

# Sets `image`: builds docker/$1.Dockerfile and pushes it to --build=REPOSITORY, or takes --image.
find_image() {
  [ -z "$image" ] || [ -z "$build" ] || die "--image and --build exclude each other"
  [ -n "$image$build" ] || die "give --image=IMAGE, or --build=REPOSITORY to make one and push it there"
  [ -n "$build" ] || return 0
  needs docker
  # The same sources have the same name, so that a running image is never replaced.
  image="$build/t5x_diffeq-$1:$(sources | sha256sum | cut -c 1-12)"
  run docker build --file="$ROOT/docker/$1.Dockerfile" --tag="$image" "$ROOT" >&2 ||
    fail "the image can't be built; the lines above say why"
  run docker push "$image" >&2 || fail "the image $image can't be pushed; the lines above say why"
}

# What an image is made of.
sources() {
  local file
  find "$ROOT/t5x_diffeq" "$ROOT/configs" "$ROOT/docker" "$ROOT/launch/forward.sh" \
    "$ROOT/launch/xla_flags.py" "$ROOT/pyproject.toml" -type f ! -name '*.pyc' | LC_ALL=C sort | while read -r file; do
    echo "${file#"$ROOT"/}"
    cat "$file"
  done
}

# manifest NAME=VALUE ... -- ARGUMENT ...: `template` filled in.
manifest() { "$(find_python)" "$ROOT/launch/gke/render.py" "$ROOT/launch/gke/$template" "$@"; }

# apply: what stands on standard input; --dry-run prints it.
apply() {
  if [ -n "$dry_run" ]; then
    kube apply --filename=-
    cat >&3
  else
    kube apply --filename=- || fail "kubectl did not take the manifest; the lines above say why"
  fi
}

# asked WHAT ...: kubectl's answer, tried a few times; the cluster may be out of reach for a moment.
asked() {
  local attempt
  for attempt in 1 2 3 4 5; do
    if kube get "$@"; then return; fi
    [ "$attempt" -eq 5 ] || between_checks 10
  done
  return 1
}

# follow KIND SELECTOR SELECTOR_OF_LOG: shows the log of one pod until the run `name` ends.
follow() {
  local ended waiting stuck=0 lines=-1 object="$1/$name"
  [ -z "$dry_run" ] || { kube logs --follow --tail=-1 --selector="$3"; return 0; }
  say "following $object; Ctrl-C leaves it running; kubectl --namespace=$namespace delete $object ends it"
  while :; do
    ended="$(asked "$object" --output='jsonpath={.status.conditions[?(@.status=="True")].type}')" ||
      fail "the cluster can't be reached; the run goes on: kubectl --namespace=$namespace get $object"
    case "$ended" in
      *Failed*) fail "$object failed: kubectl --namespace=$namespace describe $object" ;;
      *Complete*) say "$object is done"; return ;;
    esac
    waiting="$(asked pods --selector="$2" \
      --output='jsonpath={.items[*].status.containerStatuses[*].state.waiting.reason}')" || waiting=""
    case "$waiting" in
      *ImagePull* | *InvalidImageName* | *CreateContainer*Error*) stuck=$((stuck + 1)) ;;
      *) stuck=0 ;;
    esac
    [ "$stuck" -lt 5 ] || fail "the pods of $object can't start: $waiting (image $image)"
    # Ends at once while there is no pod, and when one ends: then its successor is waited for.
    if [ "$stuck" -eq 0 ] && kube logs --follow --tail="$lines" --selector="$3" 2>/dev/null; then
      lines=20
    fi
    between_checks 10
  done
}
