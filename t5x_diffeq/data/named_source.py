"""Finds the source that `config.data` names, or the parts of its mixture."""

from collections.abc import Sized
from dataclasses import replace
from math import fsum

from t5x_diffeq.config.config import DataKeys
from t5x_diffeq.config.plugins import call_plugin, check_returns, is_plugin, load_plugin
from t5x_diffeq.data.sources import SOURCES, STREAM, Source, source_of_texts
from t5x_diffeq.system.errors import InputError, describe_foreign

WITHOUT_PATH = ("stdlib", "wikitext103")  # plain text, for which data.path may be left out
_NEED_PATH = ("text_files", "tfds", "huggingface", STREAM)
_WITHOUT_SPLITS = ("stdlib", "text_files")
_LEAST_SHARE = 1e-6  # of the examples; with less, a run would see almost none of the part


def check_paths(data: DataKeys) -> None:
    """Raises an InputError if a path or a split is set that the source doesn't read.

    Runs that began before this check existed may continue.
    """
    if is_plugin(data.source):
        return
    unread = {
        "path": ("stdlib", "mixture"),
        "validation_path": SOURCES.keys() - {"text_files", STREAM} | {"tokens"},
    }
    for key, sources in unread.items():
        if (path := getattr(data, key)) and data.source in sources:
            raise InputError(
                f"data.{key}={path} is set, and data.source={data.source} doesn't read it; "
                f"--config.data.source=text_files does, or leave data.{key} out"
            )
    # `tokens` has no splits either, but a config that names splits may have prepared its shards.
    if data.source in _WITHOUT_SPLITS:
        for key in ("train_split", "validation_split"):
            if (split := getattr(data, key)) != getattr(DataKeys(), key):
                raise InputError(
                    f"data.{key}={split} is set, and data.source={data.source} has no splits; "
                    "leave it out (data.validation_path names the validation text of text_files)"
                )


def part_configs(data: DataKeys) -> list[DataKeys]:
    """The config of each part of the mixture, or of the one source; an InputError if invalid."""
    if data.source != "mixture":
        if data.mixture:
            raise InputError(
                f"data.mixture is set, and data.source is {data.source!r}; set data.source=mixture"
            )
        return [data]
    if not data.mixture:
        raise InputError(
            "data.mixture is not set; data.source=mixture needs its parts: (weight, source, path), "
            "..., such as ((0.7, 'tokens', '/shards/web'), (0.3, 'tokens', '/shards/code'))"
        )
    total = fsum(weight for weight, *_ in filter(_is_part, data.mixture))
    for entry in data.mixture:
        if not _is_part(entry) or entry[0] < total * _LEAST_SHARE:
            raise InputError(
                f"data.mixture has {entry!r}; each part must be (weight, source, path), such as "
                "(0.7, 'tokens', '/shards/web'), and its weight at least "
                f"{_LEAST_SHARE:g} of the sum of all weights"
            )
        if entry[1] == "mixture":
            raise InputError(
                f"data.mixture has {entry!r}; give the parts of that mixture themselves"
            )
    try:
        return [replace(data, source=source, path=path) for _, source, path in data.mixture]
    except InputError as error:
        raise InputError(f"data.mixture: {error}") from error


def _is_part(entry: object) -> bool:
    """Whether `entry` is (weight, source, path), with a positive weight."""
    if not (isinstance(entry, list | tuple) and len(entry) == 3):
        return False
    weight, source, path = entry
    named = isinstance(source, str) and isinstance(path, str | None)
    return named and type(weight) in (int, float) and 0 < weight < float("inf")


def load_source(data: DataKeys) -> Source:
    """The source of `config.data`; an InputError if there is none, or its data is invalid."""
    if data.loss_on == "completion" and data.source in WITHOUT_PATH:
        raise InputError(
            f"data.loss_on=completion needs records with messages, or with prompt and completion, "
            f"and data.source={data.source} is plain text; set data.source or data.loss_on=all"
        )
    if is_plugin(data.source):
        return _from_function(data)
    if data.source not in SOURCES:
        raise InputError(
            f"data.source is {data.source!r}; it can be {', '.join(SOURCES)}, and for training "
            "also tokens or mixture"
        )
    if data.source in _NEED_PATH and not data.path:
        raise InputError(f"data.path is not set; data.source={data.source} needs it")
    return replace(SOURCES[data.source](data), max_unreadable=data.max_unreadable)


def _from_function(data: DataKeys) -> Source:
    """The source that a plug-in returns, as a `Source` or as a pair of splits."""
    make = load_plugin("data.source", data.source)
    check_returns("data.source", data.source, make, Source, tuple, list)
    source = call_plugin("data.source", data.source, make, data)
    if not isinstance(source, Source):
        pair = isinstance(source, tuple | list) and len(source) == 2
        if not pair or any(
            isinstance(split, str | bytes) or not (isinstance(split, Sized) and len(split))
            for split in source
        ):
            raise InputError(
                f"data.source={data.source} returns a {type(source).__name__}; it must return a "
                "t5x_diffeq.data.sources.Source, or two nonempty sequences of texts, such as "
                "lists, for training and for validation"
            )
        try:
            for split in source:
                split[len(split) - 1]
        except Exception as error:
            raise InputError(
                f"data.source={data.source} returns a {type(source[0]).__name__}, whose entries "
                f"can't be had by their number ({describe_foreign(error)}); return lists"
            ) from error
        kinds = {type(text) for split in source for text in split}
        wrong = [kind.__name__ for kind in kinds if not issubclass(kind, str)]
        if wrong:
            names = ", ".join(sorted(wrong))
            raise InputError(
                f"data.source={data.source}: its documents are of type {names}, not str"
            )
        source = source_of_texts(data.source, *source)
    if source.conversations != (data.loss_on == "completion"):
        kind = "conversations" if source.conversations else "texts"
        raise InputError(
            f"data.loss_on={data.loss_on} doesn't fit data.source={data.source}, which returns "
            f"{kind}; change one of them"
        )
    return source
