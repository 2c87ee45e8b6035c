# shellcheck shell=bash
# Sourced by the scripts that train elsewhere: options, quoting, --dry-run, and when to start again.

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

exec 3>&1 # --dry-run prints here, also where a command's output is taken
dry_run=""
config=""
# shellcheck disable=SC2034 # the scripts use it
workdir=""
arguments=()
environment=()

# The run failed: exit status 1. (`die`, status 2, is for what can't be used.)
fail() {
  echo "error: $*" >&2
  exit 1
}

say() { echo "$*" >&2; }

# Words that a shell reads back as they are: spaces, quotes and $(...) included.
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

# needs PROGRAM ...: they are installed.
needs() {
  local program
  [ -z "$dry_run" ] || return 0
  for program in "$@"; do
    command -v "$program" >/dev/null || die "$program is not installed, or not on the PATH"
  done
}

# between_checks SECONDS: the time between two looks at something; LAUNCH_POLL_SECONDS changes it.
between_checks() { sleep "${LAUNCH_POLL_SECONDS:-$1}"; }

# parse_options "VARIABLE ..." "SWITCH ..." ARGUMENT ...: `--variable=value` sets the variable,
# `--switch` sets it to true; --config.KEY=VALUE is collected in `arguments`, each --env=KEY[=VALUE]
# in `environment`, and the one word without dashes is the config. Dashes inside an option's name do
# as well as underscores.
parse_options() {
  local with_value=" ${1//$'\n'/ } workdir " switches=" $2 dry_run " argument key
  shift 2
  for argument in "$@"; do
    key="${argument%%=*}"
    key="${key#--}"
    key="${key//-/_}"
    case "$argument" in
      -h | --help) usage; exit 0 ;;
      --config.*) arguments+=("$argument") ;;
      --*=*)
        [[ "$with_value" == *" $key "* ]] || die "${argument%%=*} is no option of this script; see --help"
        if [ "$key" = env ]; then
          environment+=("${argument#*=}")
        else
          printf -v "$key" '%s' "${argument#*=}"
        fi ;;
      --*)
        [[ "$with_value" != *" $key "* ]] || die "$argument needs a value: $argument=..."
        [[ "$switches" == *" $key "* ]] || die "$argument is no option of this script; see --help"
        printf -v "$key" true ;;
      -*) die "$argument is no option of this script; see --help" ;;
      *)
        [ -z "$config" ] || die "two configs are given: $config and $argument"
        config="$argument" ;;
    esac
  done
}

# The help of a script is the comment at its top.
usage() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"; }

# numbers VARIABLE ...: each holds a positive number.
numbers() {
  local key
  for key in "$@"; do
    [[ "${!key}" =~ ^[1-9][0-9]*$ ]] || die "--$key=${!key} must be a number, at least 1"
  done
}

# Sets `config` to configs/NAME.py[:variant] as every copy of the project has it.
project_config() {
  local file="${config%%:*}" variant=""
  [ -n "$config" ] || die "give a config: $0 configs/llama1b.py"
  [[ "$config" != *:* ]] || variant=":${config#*:}"
  file="configs/$(basename "$file")"
  [ -f "$ROOT/$file" ] || die "$config: the project has no $file"
  config="$file$variant"
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

# Sets `workdir` to its absolute path, unless it is in a bucket.
absolute_workdir() {
  [[ "$workdir" == /* || "$workdir" == *://* ]] || workdir="$PWD/$workdir"
}

# Exports what --env=KEY=VALUE gives, and checks that --env=KEY names a variable of this shell.
# Afterwards `environment` holds the names alone.
export_environment() {
  local given name names=()
  for given in ${environment[@]+"${environment[@]}"}; do
    name="${given%%=*}"
    [[ "$name" =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || die "--env=$given: give KEY=VALUE, or KEY of a variable that is set here"
    if [ "$name" != "$given" ]; then
      export "$name=${given#*=}"
    elif [ -z "${!name+set}" ]; then
      die "--env=$name: $name is not set here; give --env=$name=VALUE"
    else
      export "${name?}"
    fi
    names+=("$name")
  done
  environment=(${names[@]+"${names[@]}"})
}

# A name for the run, from its config, as clouds allow it: llama1b-ode.
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

# Whether a run that ended with this status may be started again: it saved on preemption (42), the
# machinery failed, such as another process that was lost (175), or a signal ended it. It may not after
# 1 (failed), 2 (bad input), and 130 (stopped by a person).
restartable() {
  [ "$1" -eq 42 ] || { [ "$1" -ge 129 ] && [ "$1" -ne 130 ]; }
}
