# shellcheck shell=bash
# shellcheck disable=SC2154 # common.sh sets environment and secrets
# Sourced by gke.sh and prepare_data.sh, after common.sh: images, manifests, and following what was applied.

namespace=default name="" template="" image="" build="" replace=""

said="$(mktemp)" # kubectl's errors
trap 'rm -f "$said"' EXIT

kube() { run kubectl --namespace="$namespace" "$@"; }

# Sets `image`: builds docker/$1.Dockerfile and pushes it to --build=REPOSITORY, or takes --image.
find_image() {
  [ -z "$image" ] || [ -z "$build" ] || die "--image and --build exclude each other"
  [ -n "$image$build" ] || die "give --image=IMAGE, or --build=REPOSITORY to make one and push it there"
  [ -n "$build" ] || return 0
  needs docker
  # The same sources have the same name, so that a running image is never replaced.
  image="$build/t5x_diffeq-$1:$(sources | sha256 | cut -c 1-12)"
  run docker build --platform=linux/amd64 --file="$ROOT/docker/$1.Dockerfile" --tag="$image" \
    --build-arg=REVISION="$(revision)" "$ROOT" >&2 ||
    fail "the image can't be built; the lines above say why"
  run docker push "$image" >&2 || fail "the image $image can't be pushed; the lines above say why"
}

# Prints the commit that the image is built from, for its label, with `-dirty` if files differ from it.
revision() { git -C "$ROOT" describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null || echo unknown; }

# macOS has shasum instead of sha256sum.
sha256() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi; }

# Prints the names and contents of all files that an image is made of.
sources() {
  local file
  find "$ROOT/t5x_diffeq" "$ROOT/configs" "$ROOT/docker" "$ROOT/launch/forward.sh" \
    "$ROOT/pyproject.toml" -type f ! -name '*.pyc' | LC_ALL=C sort | while read -r file; do
    echo "${file#"$ROOT"/}"
    cat "$file"
  done
}

# manifest NAME=VALUE ... -- ARGUMENT ...: `template` filled in.
manifest() { "$(find_python)" "$ROOT/launch/gke/render.py" "$ROOT/launch/gke/$template" "$@"; }

# Checks what --secret names, without showing what may be a secret's value.
check_secrets() {
  local each
  for each in ${secrets[@]+"${secrets[@]}"}; do
    [[ "$each" =~ ^[a-z0-9][-.a-z0-9]*$ ]] ||
      die "--secret=${each%%=*}... must be the name of a Kubernetes Secret, whose keys become variables"
  done
}

# Sets `shared`: the values that every manifest has for its run's config, user, variables and secrets.
describe_pods() {
  local each
  resolve_environment
  shared=(CONFIG_NAME="" CONFIG_TEXT="" CONFIG_MAP="")
  if [ -n "$own_config" ]; then
    shared=(CONFIG_NAME="$(basename "$own_config")" CONFIG_TEXT="$(cat "$own_config")" CONFIG_MAP="$name-config")
    # shellcheck disable=SC2034 # the scripts use it
    config="/own_config/$(basename "$own_config")$(variant)" # where the ConfigMap is mounted
  fi
  # shellcheck disable=SC2154 # an option of the scripts
  shared+=(RUN_AS_ROOT="$run_as_root" UNPRIVILEGED="$([ -n "$run_as_root" ] || echo true)")
  for each in ${environment[@]+"${environment[@]}"}; do shared+=("ENV+=$each"); done
  for each in ${secrets[@]+"${secrets[@]}"}; do shared+=("SECRET+=$each"); done
}

# make_room KIND: looks for an earlier run of this name. Kubernetes neither changes the pods of an existing
# run nor starts a finished run again: --replace deletes the run first.
make_room() {
  local object="$1/$name" earlier
  if [ -n "$replace" ]; then
    # With all its pods, because the pods of two runs of one name would have the same names.
    kube delete "$object" "configmap/$name-config" --ignore-not-found --wait --cascade=foreground ||
      fail "$object can't be deleted; the lines above say why"
    return
  fi
  [ -z "$dry_run" ] || return 0
  earlier="$(asked "$object" --ignore-not-found --output='jsonpath={.status.conditions[?(@.status=="True")].type}')" ||
    fail "the cluster can't be asked for $object; the lines above say why (docs/launch/gke.md: is JobSet installed?)"
  case "$earlier" in
    *Failed*) fail "$object failed earlier; --replace deletes it and starts it again: the run continues in its workdir" ;;
    *Complete*) [ "$1" = job ] || fail "$object is done already; --replace deletes it and starts it again" ;;
  esac
}

# apply: applies the manifest on standard input; --dry-run prints it.
apply() {
  if [ -n "$dry_run" ]; then
    kube apply --filename=-
    cat >&3
  else
    kube apply --filename=- ||
      fail "kubectl did not take the manifest; the lines above say why (if a field is immutable, $name is there with other options: --replace deletes it first)"
  fi
}

# asked WHAT ...: prints kubectl's answer. It tries a few times, because the cluster may be out of reach for a
# moment, but only once if the cluster lacks the object or the kind of resource.
asked() {
  local attempt
  for attempt in 1 2 3 4 5; do
    if kube get "$@" 2>"$said"; then return; fi
    cat "$said" >&2
    ! grep -qE "doesn't have a resource type|\(NotFound\)" "$said" || return 1
    [ "$attempt" -eq 5 ] || between_checks 10
  done
  return 1
}

# follow KIND SELECTOR SELECTOR_OF_LOG: shows the log of one pod, and of its successors, until the run `name`
# ends.
follow() {
  local conditions ended waiting stuck=0 object="$1/$name"
  [ -z "$dry_run" ] || { kube logs --follow --tail=-1 --selector="$3"; return 0; }
  trap 'exit 130' INT # kubectl catches it, and ends with 1
  say "following $object; Ctrl-C leaves it running; kubectl --namespace=$namespace delete $object ends it"
  begun=" " whole=" "
  while :; do
    if ! conditions="$(asked "$object" --output='jsonpath={.status.conditions[?(@.status=="True")].type}')"; then
      ! grep -q "(NotFound)" "$said" || fail "$object is gone: it was deleted"
      fail "the cluster can't be reached; the run goes on: kubectl --namespace=$namespace get $object"
    fi
    case "$conditions" in *Failed* | *Complete*) ended=true ;; *) ended="" ;; esac
    waiting="$(asked pods --selector="$2" \
      --output='jsonpath={.items[*].status.containerStatuses[*].state.waiting.reason}')" || waiting=""
    case "$waiting" in
      *ImagePull* | *InvalidImageName* | *CreateContainer*Error*) stuck=$((stuck + 1)) ;;
      *) stuck=0 ;;
    esac
    [ -n "$ended" ] || [ "$stuck" -lt 5 ] || fail "the pods of $object can't start: $waiting (image $image)"
    if [ "$stuck" -eq 0 ] || [ -n "$ended" ]; then show_logs "$3"; fi
    case "$conditions" in
      *Failed*) fail "$object failed: kubectl --namespace=$namespace describe $object; --replace starts it again" ;;
      *Complete*) say "$object is done"; return ;;
    esac
    between_checks 10
  done
}

# show_logs SELECTOR: shows the logs of these pods that were not shown yet, each until the pod ends or, if the
# run has `ended`, as far as the log exists. `begun` has the pods whose logs were shown in part, `whole` the
# pods whose logs were shown to the end. A log that broke off goes on with its last lines.
show_logs() {
  local pods pod phase tail follow=--follow
  [ -z "$ended" ] || follow=--follow=false
  pods="$(asked pods --selector="$1" --sort-by=.metadata.creationTimestamp \
    --output='jsonpath={range .items[*]}{.metadata.name} {.status.phase}{"\n"}{end}')" || return 0
  while read -r pod phase; do
    case "$phase" in
      "" | Pending) continue ;;
      Running) [ -z "$ended" ] || [[ "$whole" != *" $pod "* ]] || continue ;;
      *) [[ "$whole" != *" $pod "* ]] || continue ;;
    esac
    tail=-1
    [[ "$begun" != *" $pod "* ]] || tail=20
    begun+="$pod "
    ! kube logs "$follow" --tail="$tail" "$pod" 2>"$said" || whole+="$pod "
  done <<<"$pods"
}
