# shellcheck shell=bash
# Sourced by the scripts that train elsewhere: options, quoting, --dry-run, and restarts.

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

exec 3>&1 # --dry-run prints to it, even inside $(...)
dry_run=""
config=""
# shellcheck disable=SC2034 # the scripts use it
workdir=""
arguments=()
# shellcheck disable=SC2034 # the scripts use it
environment=() secrets=() missing=() grid=()

# The run failed: exit status 1. (`die`, status 2, is for invalid input.)
fail() {
  echo "error: $*" >&2
  exit 1
}

say() { echo "$*" >&2; }

# quoted WORD ...: the words, quoted so that a shell reads them back unchanged.
quoted() {
  local word line=""
  for word in "$@"; do line+="$(printf '%q' "$word") "; done
  printf '%s' "${line% }"
}

# Every external command goes through here; --dry-run prints it instead.
run() {
  if [ -n "$dry_run" ]; then
    printf '+ %s\n' "$(quoted "$@")" >&3
  else
    "$@"
  fi
}

# needs PROGRAM ...: checks that the programs are installed.
needs() {
  local program
  [ -z "$dry_run" ] || return 0
  for program in "$@"; do
    command -v "$program" >/dev/null || die "$program is not installed, or not on the PATH"
  done
}

# between_checks SECONDS: waits between two checks of a state; LAUNCH_POLL_SECONDS changes the time.
between_checks() { sleep "${LAUNCH_POLL_SECONDS:-$1}"; }

# called_elsewhere OPTION: what other launchers and schedulers call an option, with underscores.
called_elsewhere() {
  case "$1" in
    tasks_per_node) echo "ntasks ntasks_per_node nproc_per_node procs_per_node n" ;;
    nodes) echo "nnodes num_nodes N machines" ;;
    gpus_per_node) echo "gres num_gpus ngpus devices" ;;
    processes_per_host) echo "nproc_per_node gpus_per_node num_processes" ;;
    hosts) echo "nodelist hostfile machinefile nodes w" ;;
    type) echo "topology accelerator_type tpu_type tpu accelerator" ;;
    time) echo "walltime timeout t" ;;
    workdir) echo "output output_dir out_dir logdir bucket" ;;
    name) echo "job_name job tpu_name cluster J" ;;
    project) echo "project_id" ;;
    partition) echo "queue p" ;;
    queue) echo "partition local_queue" ;;
    image) echo "container docker_image" ;;
    container) echo "image docker_image" ;;
    restarts) echo "max_restarts retries" ;;
    slices) echo "num_slices" ;;
    spot) echo "preemptible" ;;
  esac
}

# refuse_option OPTION: an option that the script lacks, for `parse_options`, whose lists of options it reads.
refuse_option() {
  local each near=""
  for each in $with_value $switches; do
    [[ "$each" != *"$key"* && " $(called_elsewhere "$each") " != *" $key "* ]] || near+="${near:+ or }--$each"
  done
  near="${near:+did you mean $near?}"
  die "$1 is not an option of this script; ${near:-see --help}"
}

# parse_options "VARIABLE ..." "SWITCH ..." ARGUMENT ...: `--variable=value` sets the variable,
# `--switch` sets it to true; --config.KEY=VALUE is collected in `arguments`, and the one word
# without dashes is the config, also as `--config=FILE`. An option's name may have dashes in place of
# underscores. `--env`, `--secret` and `--grid` may be given several times: they are collected in
# `environment`, `secrets` and `grid`.
parse_options() {
  local with_value=" ${1//$'\n'/ } workdir " switches=" $2 dry_run " argument key
  local another=',([A-Za-z_][A-Za-z0-9_]*)=' # bash 3.2 takes no parentheses after =~
  shift 2
  for argument in "$@"; do
    key="${argument%%=*}"
    key="${key#--}"
    key="${key//-/_}"
    case "$argument" in
      -h | --help) usage; exit 0 ;;
      –* | —*) die "$argument begins with another kind of dash; write --${argument#[–—]}" ;;
      --config.*) arguments+=("$argument") ;;
      --config=*) take_config "${argument#--config=}" ;;
      --*=*)
        [[ "$switches" != *" $key "* ]] || die "$argument: ${argument%%=*} takes no value; give it alone, or leave it out"
        [[ "$with_value" == *" $key "* ]] || refuse_option "${argument%%=*}"
        [ -n "${argument#*=}" ] || die "$argument is empty; give it a value, or leave it out"
        case "$key" in
          env)
            argument="${argument#*=}" # whose value may be a secret
            [[ ! "$argument" =~ $another ]] ||
              say "note: --env=${argument%%=*}=... is one variable, with ${BASH_REMATCH[1]} in its value; for two, give --env twice"
            environment+=("$argument") ;;
          grid) grid+=("${argument#*=}") ;;
          secret) secrets+=("${argument#*=}") ;;
          *) printf -v "$key" '%s' "${argument#*=}" ;;
        esac ;;
      --*)
        [[ "$with_value" != *" $key "* ]] || die "$argument needs a value: $argument=..."
        [[ "$switches" == *" $key "* ]] || refuse_option "$argument"
        printf -v "$key" true ;;
      -*) die "$argument is not an option of this script; see --help" ;;
      *) take_config "$argument" ;;
    esac
  done
}

# take_config FILE: sets `config`.
take_config() {
  [ -z "$config" ] ||
    die "two configs are given: $config and $1; a value follows its option after =, in quotes if it has spaces"
  config="$1"
}

# The help of a script is the comment at its top.
usage() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"; }

# numbers VARIABLE ...: checks that each variable holds a positive number.
numbers() {
  local key
  for key in "$@"; do
    [[ "${!key}" =~ ^[1-9][0-9]*$ ]] || die "--$key=${!key} must be a number, at least 1"
  done
}

# Sets `config` to a path that every copy of the project understands. Sets `own_config` to the config
# file if it must be sent along, or to nothing if the file is one of the project's.
project_config() {
  local file="${config%%:*}" variant="" folder
  [ -n "$config" ] || die "give a config: $0 configs/llama1b.py"
  [[ "$config" != *:* ]] || variant=":${config#*:}"
  # `configs/NAME.py` is the project's own file, as in Python, unless there is one of that path here.
  [ -e "$file" ] || [[ "$file" != configs/* ]] || file="$ROOT/$file"
  [ -f "$file" ] || die "$config: there is no such file, neither here nor in the project's configs/"
  folder="$(cd "$(dirname "$file")" && pwd -P)"
  # shellcheck disable=SC2034 # the scripts use it
  own_config=""
  if [ "$folder" = "$(cd "$ROOT/configs" && pwd -P)" ]; then
    config="configs/$(basename "$file")$variant"
  else
    own_config="$folder/$(basename "$file")"
    config="own_config/$(basename "$file")$variant"
  fi
}

# Sets `config` to the absolute path of its file, so that the run reads the same file wherever it
# starts: the user's own file if it exists, else the project's.
absolute_config() {
  local file="${config%%:*}" variant=""
  [[ "$config" != *:* ]] || variant=":${config#*:}"
  [ -f "$file" ] || file="$ROOT/$file"
  [ -f "$file" ] || die "$config: there is no such file, neither here nor in $ROOT"
  config="$(cd "$(dirname "$file")" && pwd)/$(basename "$file")$variant"
}

# Sets `workdir` to its absolute path, unless it is in a bucket. No shell fills in the ~ of --workdir=~/run.
absolute_workdir() {
  case "$workdir" in
    gs://?*) ;;
    gs:*) die "--workdir=$workdir names no bucket; write gs://BUCKET/PATH" ;;
    \~ | \~/*) workdir="$HOME${workdir#\~}" ;;
  esac
  [[ "$workdir" == /* || "$workdir" == *://* ]] || workdir="$PWD/$workdir"
}

# Exports the variables of --env; afterwards `environment` holds their names alone.
export_environment() {
  local each names=()
  resolve_environment
  for each in ${environment[@]+"${environment[@]}"}; do
    export "${each?}"
    names+=("${each%%=*}")
  done
  environment=(${names[@]+"${names[@]}"})
}

# resolve_environment: `--env=KEY` becomes `KEY=VALUE`, with the value in this shell. --dry-run, whose
# output people paste elsewhere, doesn't show the value.
resolve_environment() {
  local each key resolved=()
  for each in ${environment[@]+"${environment[@]}"}; do
    key="${each%%=*}"
    [[ "$key" =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || die "--env=$each: $key is not the name of a variable"
    if [ "$each" = "$key" ]; then
      [ -n "${!key+set}" ] || die "--env=$key: there is no variable $key here; give --env=$key=VALUE"
      each="$key=${!key}"
      [ -z "$dry_run" ] || each="$key=NOT_SHOWN_BY_DRY_RUN"
    fi
    resolved+=("$each")
  done
  environment=(${resolved[@]+"${resolved[@]}"})
}

# seconds_of OPTION DURATION: 90s, 30m, 24h or 7d in seconds.
seconds_of() {
  local number="${2%[smhd]}" unit="${2#"${2%?}"}"
  [[ "$2" =~ ^[1-9][0-9]*[smhd]$ ]] || die "--$1=$2 must be like 90s, 30m, 24h or 7d"
  case "$unit" in
    s) echo "$number" ;;
    m) echo $((number * 60)) ;;
    h) echo $((number * 3600)) ;;
    d) echo $((number * 86400)) ;;
  esac
}

# check_run CHIP COUNT HOSTS SLICES EXAMPLE: builds the config with all its overrides and checks it, its
# data and its mesh for machines of `chip` (tpu or gpu). COUNT devices of HOSTS processes make a
# slice; a slice of GPUs is a node. `missing` holds the options that the script misses; all problems
# are reported at once. With --dry-run nothing is installed: an environment that is there checks.
check_run() {
  [ -z "${unchecked:-}" ] || return 0
  if [ -n "${dry_run:-}" ]; then can_check || return 0; else setup data gcs; fi
  checked "$@" || exit
}

# can_check: whether there is an environment in which a config can be checked; says so if not.
can_check() {
  "$VENV/bin/python" -c "import t5x_diffeq.training.setup" 2>/dev/null && return
  say "note: the config is not checked here, because there is no environment in $VENV; the run checks it"
  return 1
}

# check_run_here CHIP COUNT HOSTS SLICES EXAMPLE: `check_run` for machines that share this machine's files,
# with an existing environment. No environment is made: --dry-run makes nothing, and an image needs none.
check_run_here() {
  local status=0
  [ -z "${unchecked:-}" ] || return 0
  can_check || return 0
  checked "$@" --shared || status=$?
  [ "$status" -ne 2 ] || exit 2
  [ "$status" -eq 0 ] || say "warning: the config could not be checked here, as said above; the run checks it"
}

# checked CHIP COUNT HOSTS SLICES EXAMPLE [--shared]: status 2 if anything is wrong, 1 if the check failed.
checked() {
  local each told=()
  for each in ${missing[@]+"${missing[@]}"}; do told+=(--missing="$each"); done
  "$VENV/bin/python" "$ROOT/launch/check_run.py" --chip="$1" --count="$2" --hosts="$3" --slices="$4" \
    --example="$5" ${6:+"$6"} ${dry_run:+--dry_run} ${told[@]+"${told[@]}"} -- \
    --config="${own_config:-$config}${own_config:+$(variant)}" \
    --workdir="$workdir" ${arguments[@]+"${arguments[@]}"}
}

# `:variant` of the config, if it has one.
variant() { [[ "$config" != *:* ]] || printf ':%s' "${config#*:}"; }

# A name for the run, made from its config in the form that clouds allow: llama1b-ode.
name_of_config() {
  local name
  name="$(basename "${config%%:*}" .py)"
  [[ "$config" != *:* ]] || name="$name-${config##*:}"
  name="${name//_/-}"
  printf '%s' "$name" | tr '[:upper:]' '[:lower:]'
}

check_name() {
  local allowed='^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$' # bash 3.2 takes no parentheses after =~
  [[ "$name" =~ $allowed ]] ||
    die "--name=$name must be lower-case letters, digits and dashes, at most 40"
}

# restartable STATUS: whether a run that ended with this status may be started again: it saved on preemption
# (42), the infrastructure failed, such as a lost process (175), or a signal ended it. It may not be started
# again after 1 (failed), 2 (bad input), and 130 (stopped by a person).
restartable() {
  [ "$1" -eq 42 ] || { [ "$1" -ge 129 ] && [ "$1" -ne 130 ]; }
}
