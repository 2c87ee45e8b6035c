#!/usr/bin/env bash
# Trains on Google Kubernetes Engine: TPU slices as a JobSet, GPU nodes as an indexed Job.
#
#   launch/gke.sh configs/llama1b.py --topology=4x4x4 --slices=2 --workdir=gs://BUCKET/run \
#       --build=REPOSITORY [--config.x=y ...]
#   launch/gke.sh configs/llama1b.py --gpu=nvidia-h100-80gb --nodes=4 --workdir=... --image=IMAGE
#
#   --build=REPOSITORY   builds the image and pushes it there; or --image=IMAGE takes one
#   --type=v5p           of the TPU: v4, v5e, v5p, v6e, or GKE's own name of an accelerator
#   --chips_per_host=4, --gpus_per_node=8
#   --memory_fraction=0.92   of each GPU's memory, for JAX to take
#   --name --namespace=default --queue=KUEUE_QUEUE --service_account=NAME
#   --spot, --reservation=NAME
#   --restarts=100       starts at most so often again: after 42 (saved on preemption), 175 (a
#                        machine, a link or a bucket failed) and signals
#   --grace=300          seconds to save in, at the end of a pod
#   --dry-run            prints the commands and the YAML
#
# The manifests are launch/gke/*.yaml. The workdir is a bucket, or a folder mounted in every pod.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/kubernetes.sh"

topology="" type=v5p slices=1 chips_per_host=4 gpu="" nodes=1 gpus_per_node=8 memory_fraction=0.92
queue="" service_account="" spot="" reservation=""
restarts=100 grace=300
parse_options "topology type slices chips_per_host gpu nodes gpus_per_node memory_fraction image build name namespace
  queue service_account reservation restarts grace" spot "$@"
numbers slices chips_per_host nodes gpus_per_node restarts grace
project_config
name="${name:-$(name_of_config)}"
check_name
[ -n "$workdir" ] || die "give --workdir=gs://BUCKET/FOLDER, or a folder that every pod has"
if [ -n "$topology" ] && [ -n "$gpu" ]; then die "--topology (TPU) and --gpu exclude each other"; fi
needs kubectl

common=(NAME="$name" NAMESPACE="$namespace" QUEUE="$queue" SERVICE_ACCOUNT="$service_account"
  GRACE="$grace" SPOT="$spot" RESERVATION="$reservation")
train=(--config="$config" --workdir="$workdir" ${arguments[@]+"${arguments[@]}"})

# Sets `accelerator` and `hosts` of a slice.
describe_slice() {
  local chips=$((${topology//x/*}))
  case "$type" in
    v4) accelerator=tpu-v4-podslice ;;
    v5e) accelerator=tpu-v5-lite-podslice ;;
    v5p) accelerator=tpu-v5p-slice ;;
    v6e) accelerator=tpu-v6e-slice ;;
    *) accelerator="$type" ;;
  esac
  [ "$chips" -ge "$chips_per_host" ] || chips_per_host="$chips"
  [ $((chips % chips_per_host)) -eq 0 ] ||
    die "--topology=$topology has $chips chips, which are not whole hosts of --chips_per_host=$chips_per_host"
  hosts=$((chips / chips_per_host))
}

if [[ "$topology" =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]]; then
  describe_slice
  find_image tpu
  template=tpu.yaml kind=jobset
  # shellcheck disable=SC2034 # where `manifest` reads it
  yaml="$(manifest "${common[@]}" IMAGE="$image" SLICES="$slices" HOSTS="$hosts" CHIPS="$chips_per_host" \
    ACCELERATOR="$accelerator" TOPOLOGY="$topology" RESTARTS="$restarts" -- "${train[@]}")"
  pods="jobset.sigs.k8s.io/jobset-name=$name"
  first="$pods,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
elif [ -n "$gpu" ]; then
  find_image gpu
  template=gpu.yaml kind=job
  yaml="$(manifest "${common[@]}" IMAGE="$image" NODES="$nodes" GPUS="$gpus_per_node" \
    MEMORY_FRACTION="$memory_fraction" ACCELERATOR="$gpu" COORDINATOR="$name-0.$name:8476" RETRIES=$((restarts * nodes)) -- "${train[@]}")"
  pods="batch.kubernetes.io/job-name=$name"
  first="$pods,batch.kubernetes.io/job-completion-index=0"
else
  die "give --topology=4x4x4 for TPU slices, or --gpu=nvidia-h100-80gb for GPU nodes"
fi

apply <<<"$yaml"
follow "$kind" "$pods" "$first"
