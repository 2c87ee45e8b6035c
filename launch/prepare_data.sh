#!/usr/bin/env bash
# Turns documents into token shards on many machines: a SLURM array or an indexed Kubernetes Job.
#
#   launch/prepare_data.sh slurm configs/llama1b.py --output=DIR --parts=64 [--config.data.x=y ...]
#   launch/prepare_data.sh gke configs/llama1b.py --output=DIR --parts=64 --image=IMAGE
#
#   --parts=16           jobs; each makes its share of the shards
#   --shards=64          shards of each split (default: as many as parts)
#   --cpus=8             of each job
#   --dry-run            prints the commands and the YAML
#   --retries=64         maximum number of restarts of a part (slurm) or of pods (gke) that were lost
#   --env=KEY[=VALUE]    a variable for the jobs, given here or taken from this shell; several times
#   slurm: --time=12:00:00 --partition --account --qos --name
#   gke: --image or --build=REPOSITORY, --name --namespace --queue --service_account --spot,
#        --secret=NAME --pvc=CLAIM --mount=/shared --gcsfuse --run_as_root --replace
#
# When all parts are made, one more job checks them and finishes. All machines must see DIR.

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # as after `sh SCRIPT`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/kubernetes.sh"

where="${1:-}"
case "$where" in
  slurm | gke) shift ;;
  -h | --help) usage; exit 0 ;;
  *) die "say where: launch/prepare_data.sh slurm|gke configs/llama1b.py --output=DIR (here: python -m t5x_diffeq.prepare_data)" ;;
esac
output="" parts=16 shards="" cpus=8 time=12:00:00 retries=64
# shellcheck disable=SC2034 # read by name, below
partition="" account="" qos=""
queue="" service_account="" spot="" pvc="" mount=/shared gcsfuse="" run_as_root=""
options="output parts shards cpus name retries env"
case "$where" in
  slurm) parse_options "$options time partition account qos" "" "$@" ;;
  gke) parse_options "$options image build namespace queue service_account secret pvc mount" \
    "spot replace gcsfuse run_as_root" "$@" ;;
esac
[ -z "$workdir" ] || die "--workdir=$workdir is for a training; token shards go to --output=DIR"
shards="${shards:-$parts}"
numbers parts shards cpus retries
[ "$parts" -le $((2 * shards)) ] || die "--parts=$parts need more than --shards=$shards; leave --shards out"
[ -n "$config" ] || die "give a config: launch/prepare_data.sh $where configs/llama1b.py --output=DIR"
[ -n "$output" ] || die "give --output=DIR, where all machines see it"
name="${name:-$(name_of_config)-data}"
[ "$where" != slurm ] || absolute_config
prepare=(--config="$config" --output="$output" --shards="$shards" --workers="$cpus"
  ${arguments[@]+"${arguments[@]}"})

on_slurm() {
  local options=(--parsable --nodes=1 --ntasks=1 --cpus-per-task="$cpus" --time="$time" --requeue)
  local option job last exported
  needs sbatch
  export_environment
  exported="$(IFS=,; echo "${environment[*]+"${environment[*]}"}")"
  [ -z "$exported" ] || options+=(--export="ALL,$exported")
  for option in partition account qos; do
    [ -z "${!option}" ] || options+=(--"$option=${!option}")
  done
  run setup data gcs
  check_flags prepare_data "${prepare[@]}"
  job="$(run sbatch "${options[@]}" --job-name="$name" --array="0-$((parts - 1))" --output="$name-%A-%a.log" \
    "$ROOT/launch/slurm_job.sh" "$ROOT" "$retries" prepare_data -- "${prepare[@]}")" ||
    fail "sbatch did not take the jobs; the lines above say why"
  job="${job:-JOB}" # --dry-run has none
  last="$(run sbatch "${options[@]}" --job-name="$name-finish" --output="$name-finish-%j.log" \
    --dependency="afterok:${job%%;*}" --kill-on-invalid-dep=yes \
    "$ROOT/launch/slurm_job.sh" "$ROOT" "$retries" prepare_data -- "${prepare[@]}")" ||
    fail "sbatch did not take the last job; run it when job ${job%%;*} is done"
  [ -n "$dry_run" ] || say "jobs ${job%%;*} and, to finish, ${last%%;*} are in the queue"
}

# job NAME PARTS SHARD: applied and followed to its end.
job() {
  name="$1"
  make_room job
  describe_pods
  apply <<<"$(manifest NAME="$1" NAMESPACE="$namespace" QUEUE="$queue" SERVICE_ACCOUNT="$service_account" \
    SPOT="$spot" IMAGE="$image" CPUS="$cpus" RETRIES="$retries" PARTS="$2" SHARD="$3" CLAIM="$pvc" \
    MOUNT="$mount" GCSFUSE="$gcsfuse" "${shared[@]}" \
    -- --config="$config" "${prepare[@]:1}")"
  follow job "batch.kubernetes.io/job-name=$1" \
    "batch.kubernetes.io/job-name=$1,batch.kubernetes.io/job-completion-index=0"
}

on_gke() {
  local base="$name"
  needs kubectl
  [ -z "$gcsfuse" ] || [ -n "$pvc" ] || die "give --pvc=CLAIM, the volume that --gcsfuse mounts"
  case "$output" in
    gs://*) ;;
    "$mount"/*) [ -n "$pvc" ] || die "give --pvc=CLAIM, the volume that is mounted at $mount" ;;
    *) die "--output=$output: a pod loses its own folders when it ends; give gs://BUCKET/FOLDER, or --pvc=CLAIM and a folder in $mount" ;;
  esac
  check_secrets
  project_config
  check_name
  find_image tpu
  # shellcheck disable=SC2034 # `manifest` reads it
  template=prepare_data.yaml
  # Kubernetes fills $(PART) in, from the pod's own number.
  [ "$parts" -eq 1 ] || job "$base" "$parts" "--shard=\$(PART)/$parts"
  job "$base-finish" 1 ""
}

"on_$where"
