#!/usr/bin/env bash
# Trains on Google Kubernetes Engine, on TPU slices or GPU nodes, as a JobSet.
#
#   launch/gke.sh configs/llama1b.py --topology=4x4x4 --workdir=gs://BUCKET/run --build=REPOSITORY \
#       --service_account=NAME [--config.x=y ...]
#   launch/gke.sh configs/llama1b.py --topology=4x4x4 --slices=2 --workdir=... --image=IMAGE
#   launch/gke.sh configs/llama1b.py --gpu=nvidia-h100-80gb --nodes=4 --workdir=... --image=IMAGE
#
#   --build=REPOSITORY   builds the image and pushes it there; --image=IMAGE uses an existing one
#   --type=v5p           type of the TPU: v4, v5e, v5p, v6e, tpu7x, or GKE's own name of an accelerator
#   --chips_per_host=4, --gpus_per_node=8
#   --name --namespace=default
#   --service_account=NAME    Kubernetes account of the pods (Workload Identity). Not for several
#                        slices: their pods use the network of their hosts, and act as the account of
#                        their node pools, which needs access to the bucket (docs/launch/gke.md)
#   --pod_network        several slices use the pods' own network, which is slower, and --service_account
#   --queue=KUEUE_QUEUE, --priority=CLASS    of Kueue
#   --spot, --flex_start, --reservation=NAME    how the nodes are provisioned; default: on demand
#   --max_run_duration=7d    time for which Kueue requests flex-start capacity
#   --restarts=100       maximum number of restarts after 175 (infrastructure failure) and signals;
#                        after 42 (saved on preemption) and lost nodes always, with JobSet 0.10 or later
#   --grace=300          seconds to save in, at the end of a pod; on Spot nodes 15, since GKE gives them
#                        no more (up to 120 if the node pool says so: docs/launch/gke.md)
#   --env=KEY[=VALUE], --secret=NAME    variables, and Kubernetes Secrets whose keys become variables;
#                        several may be given. Without VALUE: as set here
#   --pvc=CLAIM, --mount=/shared    a volume that all pods mount there, for the workdir or the data
#   --gcsfuse            that volume is a bucket, through Cloud Storage FUSE
#   --run_as_root        the pods' programs run as root instead of the image's user, 1000
#   --cache_gib=20       part of each node's disk for copies of token shards
#   --replace            deletes an earlier run of that name first; the run in the workdir continues
#   --unchecked          skips the check of config, data and mesh on this machine
#   --dry-run            prints the commands and the YAML
#
# The manifest is launch/gke/train.yaml; docs/launch/gke.md says how to create a cluster. A config file
# of your own is sent along as a ConfigMap; configs/NAME.py of the project is the image's.

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/kubernetes.sh"

topology="" type="" slices="" chips_per_host=4 gpu="" nodes="" gpus_per_node=8
queue="" priority="" service_account="" spot="" flex_start="" reservation="" max_run_duration=""
restarts=100 grace="" pvc="" mount=/shared cache_gib=20 unchecked="" pod_network="" gcsfuse=""
run_as_root=""
parse_options "topology type slices chips_per_host gpu nodes gpus_per_node image build name namespace
  queue priority service_account reservation max_run_duration restarts grace env secret pvc mount cache_gib" \
  "spot flex_start replace unchecked pod_network gcsfuse run_as_root" "$@"

# ---------------------------------------------------------------- what was asked for

case "$config" in
  status | logs | stop | delete) [ -e "$config" ] || die "$config is no config; kubectl get, logs and delete jobset NAME do that (docs/launch/gke.md)" ;;
esac
case "$spot$flex_start${reservation:+true}" in
  truetrue*) die "--spot, --flex_start and --reservation exclude each other" ;;
esac
if [ -n "$spot" ]; then
  grace="${grace:-15}"
  numbers grace
  [ "$grace" -le 120 ] || die "--grace=$grace: a Spot node gives its pods 15 seconds, and 120 at the most"
  [ "$grace" -le 15 ] ||
    say "--grace=$grace holds on Spot nodes if their pool's shutdownGracePeriodSeconds allows it; by default they give 15"
fi
grace="${grace:-300}"
if [ -n "$gpu" ]; then
  [ -z "$slices$type" ] || die "--gpu=$gpu has neither --slices nor --type, which are of TPUs; give --nodes=N"
  [[ "$gpu" == nvidia-* ]] || die "--gpu=$gpu must be GKE's name of a GPU, such as nvidia-h100-80gb"
else
  [ -z "$nodes" ] || die "--nodes=$nodes is for --gpu; a TPU's --topology says how many hosts a slice has, and --slices=N how many slices there are"
fi
type="${type:-v5p}" slices="${slices:-1}" nodes="${nodes:-1}"
[ "$mount" = /shared ] || [ -n "$pvc" ] || die "--mount=$mount is where --pvc=CLAIM is mounted; give that, too, or leave it out"
[ -n "$gpu" ] || [ "$gpus_per_node" = 8 ] || die "--gpus_per_node=$gpus_per_node is for --gpu; leave it out"
[[ "$mount" == /* ]] || die "--mount=$mount must be a folder from /, such as /shared"
numbers slices chips_per_host nodes gpus_per_node restarts grace cache_gib
max_run_seconds=""
[ -z "$max_run_duration" ] || max_run_seconds="$(seconds_of max_run_duration "$max_run_duration")"
check_secrets
project_config
name="${name:-$(name_of_config)}"
check_name
resolve_environment
# A machine may be away for hours; the pods on the others wait for it.
[[ " ${environment[*]+"${environment[*]}"}" == *" T5X_DIFFEQ_ARRIVAL_SECONDS="* ]] ||
  environment+=(T5X_DIFFEQ_ARRIVAL_SECONDS=14400)

if [ -n "$topology" ] && [ -n "$gpu" ]; then die "--topology (TPU) and --gpu exclude each other"; fi
shape='^([1-9][0-9]*(x[1-9][0-9]*){1,2})?$' # bash 3.2 takes no parentheses after =~
[[ "$topology" =~ $shape ]] || die "--topology=$topology must be like 4x4 or 4x4x4"
[ -n "$topology$gpu" ] || missing+=("--topology=4x4x4 for TPU slices, or --gpu=nvidia-h100-80gb for GPU nodes")
[ -z "$image" ] || [ -z "$build" ] || die "--image and --build exclude each other"
[ -n "$image$build" ] || missing+=("--image=IMAGE, or --build=REPOSITORY to make one and push it there")
[ -n "$workdir" ] || missing+=("--workdir=gs://BUCKET/FOLDER, or a folder of a volume that --pvc=CLAIM mounts")
case "$workdir" in
  "" | gs://* | "$mount"/*) ;;
  *) die "--workdir=$workdir: a pod loses its own folders when it ends; give gs://BUCKET/FOLDER, or --pvc=CLAIM and a folder in $mount" ;;
esac
[[ "$workdir" != "$mount"/* ]] || [ -n "$pvc" ] || missing+=("--pvc=CLAIM, the volume that is mounted at $mount")
[ -z "$gcsfuse" ] || [ -n "$pvc" ] || missing+=("--pvc=CLAIM, the volume that --gcsfuse mounts")

# Sets `accelerator`, `chips` and `hosts` of a slice, and what JAX calls its devices.
describe_slice() {
  chips=$((${topology//x/*}))
  accelerator="$type" devices="$chips"
  case "$type" in
    v4) accelerator="tpu-v4-podslice" ;;
    v5e) accelerator="tpu-v5-lite-podslice" ;;
    v5p) accelerator="tpu-v5p-slice" ;;
    v6e) accelerator="tpu-v6e-slice" ;;
    tpu7x) devices=$((chips * 2)) ;; # of each chip, JAX sees two
    tpu*) ;;
    *) die "--type=$type must be v4, v5e, v5p, v6e, tpu7x, or GKE's name of a TPU, such as tpu-v5-lite-podslice" ;;
  esac
  case "$type:$topology" in
    v5e:*x*x* | v6e:*x*x*) die "--topology=$topology: a $type has two dimensions, such as 4x4" ;;
    v5e:* | v6e:* | tpu-*:* | *:*x*x*) ;;
    *) die "--topology=$topology: a $type has three dimensions, such as 2x2x4" ;;
  esac
  [ "$chips" -ge "$chips_per_host" ] || chips_per_host="$chips"
  [ $((chips % chips_per_host)) -eq 0 ] ||
    die "--topology=$topology has $chips chips, which are not whole hosts of --chips_per_host=$chips_per_host"
  hosts=$((chips / chips_per_host))
}

tpu="" chips="$gpus_per_node" hosts="$nodes" accelerator="$gpu" job=node host_network="" coordinator=""
if [ -n "$gpu" ]; then
  slices=1 coordinator="$name-node-0-0.$name:8476"
elif [ -n "$topology" ]; then
  describe_slice
  tpu=true job=slice chips="$chips_per_host"
  [ "$slices" -eq 1 ] || [ -n "$pod_network" ] || host_network=true
fi
if [ -n "$host_network" ]; then
  # "Pods running on the host network don't use Workload Identity Federation for GKE", says GKE's page on it.
  [ -z "$service_account" ] ||
    die "--service_account=$service_account has no effect on several slices, whose pods use the network of their hosts: leave it out and give the account of the node pools access (docs/launch/gke.md), or add --pod_network, which is slower"
  [ -z "$gcsfuse" ] ||
    die "--gcsfuse: Cloud Storage FUSE can't be mounted on the network of the hosts, which several slices use; add --pod_network, which is slower"
  [[ "$workdir" != gs://* ]] ||
    say "note: the pods of several slices act as the account of their node pools; it needs access to $workdir (docs/launch/gke.md)"
fi
example="launch/gke.sh ${config#own_config/} --topology=4x4x4 --workdir=gs://BUCKET/$name --build=REPOSITORY"
if [ -n "$gpu" ]; then
  check_run gpu "$gpus_per_node" 1 "$nodes" "$example"
else
  check_run "${tpu:+tpu}" "${devices:-0}" "$hosts" "$slices" "$example"
fi
[ ${#missing[@]} -eq 0 ] || die "give ${missing[*]}" # where --unchecked left the check out
needs kubectl

# ---------------------------------------------------------------- what is applied

# Sets `messages` where JobSet's rules can ask for the message of a failure, as they can since 0.10.
tells_reasons() {
  local field=jobset.spec.failurePolicy.rules.onJobFailureMessagePatterns
  messages=true
  if [ -z "$dry_run" ] && ! kube explain "$field" >/dev/null 2>"$said" && grep -q "does not exist" "$said"; then
    messages=""
    say "note: this cluster's JobSet is older than 0.10: preemptions count as restarts, of which there are $restarts"
  fi
}

# An earlier run is looked for before the minutes of a build, and deleted only when there is an image.
[ -n "$replace" ] || make_room jobset
find_image "${gpu:+gpu}${tpu:+tpu}"
[ -z "$replace" ] || make_room jobset
describe_pods
tells_reasons
retries=0
[ -z "$messages" ] || retries=6 # the other failures have rules of their own, and are not counted
template=train.yaml
yaml="$(manifest NAME="$name" NAMESPACE="$namespace" QUEUE="$queue" PRIORITY="$priority" \
  SERVICE_ACCOUNT="$service_account" GRACE="$grace" SPOT="$spot" FLEX_START="$flex_start" \
  RESERVATION="$reservation" MAX_RUN_SECONDS="$max_run_seconds" RESTARTS="$restarts" IMAGE="$image" \
  DESCRIPTION="$config in $workdir" TPU="$tpu" GPU="$gpu" JOB="$job" SLICES="$slices" HOSTS="$hosts" \
  CHIPS="$chips" ACCELERATOR="$accelerator" TOPOLOGY="$topology" \
  COORDINATOR="$coordinator" HOST_NETWORK="$host_network" CLAIM="$pvc" MOUNT="$mount" \
  GCSFUSE="$gcsfuse" MESSAGES="$messages" RETRIES="$retries" \
  CACHE_GIB="$cache_gib" DISK="$((cache_gib + 10))Gi" "${shared[@]}" \
  -- --config="$config" --workdir="$workdir" ${arguments[@]+"${arguments[@]}"})"
apply <<<"$yaml"
pods="jobset.sigs.k8s.io/jobset-name=$name"
follow jobset "$pods" "$pods,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
