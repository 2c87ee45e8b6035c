"""Messages for mistakes on the command line: one line that names the mistake and the way out."""

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from math import inf
from os.path import isdir

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq.config.config import KEYS, check_key, keys_meant
from t5x_diffeq.config.config_files import CONFIGS
from t5x_diffeq.config.keys.values import Values
from t5x_diffeq.system.errors import InputError

_FEW = 3  # verbs, which are named
# What verbs don't have flags for: of the verb with a flag, names of other projects, the way out.
_WITHOUT_FLAG = (
    ("max_tokens", "output out output_file save", "the text goes to standard output: > FILE"),
    (
        "tasks",
        "data data_path path dataset split test_file eval_file",
        "the run's validation text is evaluated; in Python, load(DIR).loss(TEXT) takes any other",
    ),
)


def explain_unknown_flag(
    name: str,
    verb_flags: flags.FlagValues,
    verbs_with: Callable[[str], Sequence[str]] = lambda _: (),
) -> str:
    """One line for a flag that a verb doesn't have: the flags or keys that may be meant.

    Args:
      verbs_with: the verbs that have a flag.
    """
    for flag, names, way_out in _WITHOUT_FLAG:
        if flag in verb_flags and name.rpartition(".")[2] in names.split():
            return f"--{name} is not a flag of this verb; {way_out}"
    has_config = any(config_flags.is_config_flag(verb_flags[each]) for each in verb_flags)
    meant = keys_meant(name) or (nearest(name, KEYS) if "." in name else [])
    meant = [f"--config.{each}" if each in KEYS else each for each in meant]
    if "--workdir" in meant:
        meant = [*meant, "--output"]  # a verb has one of these folders, or both
    if name.startswith("no_") and name[3:] in verb_flags and verb_flags[name[3:]].boolean:
        switch = f"--{name[3:]}"
        return f"--{name} is not a flag of this verb; leave {switch} out, or write {switch}=false"
    # A flag that is given already isn't meant.
    flag_of = {x: re.split(r"[.=]", x[2:])[0] for x in meant if x[:2] == "--"}
    near = [x for x in meant if x not in flag_of or flag_of[x] in verb_flags]
    near = [x for x in near if "." in x or not _is_given(flag_of.get(x), verb_flags)]
    near = near or [f"--{each}" for each in nearest(name.rpartition(".")[2], verb_flags)]
    of_config = name == "config" or (name.startswith("config.") and not near)
    if of_config and "workdir" in verb_flags:
        return f"--{name} is not a flag of this verb, which takes the run's config; leave it out"
    keys_too = ", and --help=keys for the keys of a config" if has_config else ""
    verbs = [] if "." in name else verbs_with(name)
    has = f"{' and '.join(verbs)} {'have' if len(verbs) > 1 else 'has'} it"
    hint = has if 0 < len(verbs) <= _FEW else f"see --help{keys_too}"
    hint = f"did you mean {' or '.join(near)}?" if near else hint
    return f"--{name} is not a flag of this verb; {hint}"


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The names that begin with `name`, which may be cut short, or else the most similar one."""
    names = list(names)
    begun = [each for each in names if each.startswith(name) and len(name) > 1]
    return begun or get_close_matches(name, names, n=1, cutoff=0.7)


def _is_given(name: str | None, verb_flags: flags.FlagValues) -> bool:
    return name is not None and bool(verb_flags[name].present)


def explain_argument(argument: str, verb_flags: flags.FlagValues) -> str:
    """One line for an argument that isn't a flag."""
    argument, hint = argument.replace(f"{CONFIGS}/", "configs/"), "flags are --name=value"
    name, bare = (
        argument.partition("=")[0],
        argument.lstrip("-\u2010\u2011\u2012\u2013\u2014\u2212"),
    )
    if argument.startswith("--"):
        return f"argument {argument!r} comes after -- alone, which ends the flags; leave the -- out"
    if argument.lstrip().startswith("--"):
        return f"argument {argument!r} begins with a space; take it out (a \\ ends a line only)"
    if bare != argument:  # a dash of another kind, such as a word processor makes of two
        return f"argument {argument!r} begins with another kind of dash; write --{bare}"
    if name != argument and (name in verb_flags or name.startswith("config.")):
        hint = f"did you mean --{argument}?"
    elif name.lstrip("+") in KEYS and "config" in verb_flags:
        hint = f"did you mean --config.{argument.lstrip('+')}?"
    elif re.search(r"\.py(:\w*)?$", argument) and "config" in verb_flags:
        hint = f"did you mean --config={argument}?"
    elif ("/" in argument or isdir(argument)) and "workdir" in verb_flags:
        flag = "input" if "input" in verb_flags and verb_flags["workdir"].present else "workdir"
        hint = f"did you mean --{flag}={argument}?"
    elif "grid" in verb_flags:
        hint = "values are separated by commas, without spaces: --grid=KEY=V1,V2"
    elif "what" in verb_flags:
        hint = "the analysis is one word and comes first, and a text is put in --prompt='TEXT'"
    elif "prompt" in verb_flags:
        hint = "flags are --name=value, and a text with spaces is put in quotes: --prompt='TEXT'"
    elif "experiment" in verb_flags and not verb_flags["experiment"].present:
        hint = f"did you mean --experiment={argument}?"
    return f"argument {argument!r} is not understood; {hint}"


def explain_range(message: str, verb_flags: flags.FlagValues) -> str | None:
    """One line for a flag whose value is out of bounds; None if the error is another one."""
    match = re.match(r"flag --(\w+)=(.*?): ", " ".join(message.split()))
    if not match or match[1] not in verb_flags:
        return None
    parser = verb_flags[match[1]].parser
    if not isinstance(parser, flags.IntegerParser | flags.FloatParser):
        return None
    kind = int if isinstance(parser, flags.IntegerParser) else float
    least = -inf if parser.lower_bound is None else parser.lower_bound
    try:
        fault = Values(kind, least, parser.upper_bound).fault(parser.convert(match[2]))
    except ValueError:
        fault = Values(kind).fault(match[2])
    return fault and f"--{match[1]}={match[2]}{fault.removeprefix('it')}"


def check_arguments(argv: list[str], verb_flags: flags.FlagValues) -> None:
    """Raises an InputError if a `--config.KEY` doesn't exist, or has no config to change."""
    for flag, value in pairwise(argv[1:]):
        if flag.startswith("--config.") and value.startswith("="):
            raise InputError(f"{flag} {value} has a space before the =; write {flag}=VALUE")
    without = "config" in verb_flags and verb_flags["config"].value is None
    for argument in argv[1:]:
        without = without and not re.match("--?config(=|$)", argument)
        if key := re.fullmatch(r"--?config\.([\w.-]+)(=.*)?", argument, re.DOTALL):
            check_key(key[1])
            if KEYS[key[1]].values.type is tuple and str(key[2]).startswith("={"):
                raise InputError(
                    f"{argument} gives a dict, whose values would be lost; write a tuple, as in "
                    f"docs/keys.md#{key[1]}"
                )
            if key[2] == "=None" and KEYS[key[1]].values.optional:
                raise InputError(f"{argument}: only a config file can set a key to None")
            if without:
                raise InputError(
                    f"--config.{key[1]} changes a config, and none is given before it; give "
                    "--config=configs/tiny.py, or another file, first"
                )
        elif re.match(r"--?config\.[\w.]+\s+=", argument):
            raise InputError(f"{argument} has a space before the =; take it out")
        elif re.match(r"--?config[.\[]", argument):
            raise InputError(f"{argument} is no key; write it as --config.model.num_steps=VALUE")


def explain_parse_error(message: str) -> str:
    """One line for an error of the flag and config libraries."""
    message = " ".join(message.split())
    if missing := re.fullmatch(r"Missing value for flag (--\S+)", message):
        return f"{missing[1]} has no value; write {missing[1]}=VALUE"
    if switch := re.match(r"flag (--\w+=.*?): \('Non-boolean", message):
        return f"{switch[1]} must be true or false, or without a value"
    value = re.match(r"flag --config\.([\w.]+)=(.*?): ", message)
    if not value or value[1] not in KEYS:
        return message
    key = KEYS[value[1]]
    example = f", such as its default, {key.default!r}" if key.default is not None else ""
    return f"config.{value[1]}={value[2]} is invalid; {key.values.fault_of_type()}{example}"
