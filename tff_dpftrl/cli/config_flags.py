"""Flags and files of the options of runs, which several commands take."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.data import sources, tables
from tff_dpftrl.training import composed, language_config
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import options as options_lib
from tff_dpftrl.training import placement as placement_lib

SHORT_FLAGS = {
    "num_rounds": ["--rounds"],
    "num_steps": ["--steps"],
    "cohort_size": ["--cohort"],
    "num_layers": ["--layers"],
    "num_heads": ["--heads"],
}
"""Shorter flags for some options."""
METAVARS = {
    "data": "CORPUS",
    "clip_norm_schedule": "ROUNDS:NORM,...",
    "proxy_data": "CORPUS",
    "expect": "COMPARISONS",
    "test_python": "PATH",
    "build": "FILE.py:NAME",
    "vocabulary": "SOURCE",
    "without_near_duplicates_of": "CORPUS",
    "strategy": "FILE|NAME",
    "initial_weights": "DIR",
}
"""What stands for an option's value in `--help`."""
WITHOUT_VALUE = {"secure_aggregation": "active-server"}
"""Values of options whose flag may stand alone."""
_WHAT = "what is run"
# Groups of flags, in order, and the groups of options that they hold beside those of their name.
_GROUPS = {
    _WHAT: ("federated learning", "fine-tuning", "run", "tests of the task"),
    "privacy": ("secure aggregation of the devices' reports",),
    "data": (),
    "model": ("model and data of your own",),
    "devices": ("rounds with devices",),
}
_TABLE = [field.name for field in dataclasses.fields(tables.TableOptions)]


class _Help(argparse.Action):
    """Flag that shows the options which most people need first, or with "all" every option."""

    def __init__(self, first: str, **kwargs: Any):
        super().__init__(**kwargs)
        self._first = (self.dest, *first.split())

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Prints the help, and ends the program."""
        others = [] if values else [a for a in parser._actions if a.dest not in self._first]
        for action in others:
            action.help = argparse.SUPPRESS
        parser.print_help()
        if others:
            print(f"\n{parser.prog} --help all shows {len(others)} more options.")
        parser.exit()


def add_help(parser: argparse.ArgumentParser, first: str) -> None:
    """Adds --help to a parser that was made without it; `first` names options, with blanks."""
    text = "Show the options that most people need first, or all, and exit."
    parser.add_argument(
        *("-h", "--help"),
        action=functools.partial(_Help, first),
        nargs="?",
        choices=["all"],
        metavar="all",
        default=argparse.SUPPRESS,
        help=text,
    )


def add_config(
    parser: argparse.ArgumentParser,
    kind: type[composed.Options] = config_lib.TrainingConfig,
) -> None:
    """Adds --config, which names the package's configs that are of a class."""
    names = ", ".join(options_lib.built_in_configs(kind))
    what = f"TOML file of options, or the name of a config of the package: {names}."
    parser.add_argument("--config", metavar="FILE", help=what)


def add_folder_and_source(
    parser: argparse.ArgumentParser,
    kind: type[composed.Options] = config_lib.TrainingConfig,
) -> None:
    """Adds what says where a run's results go, and where its options, of a class, come from."""
    # Not required by argparse, so that one message names everything that is missing.
    parser.add_argument("--output", metavar="DIR", help="Folder of the results; must be given.")
    add_config(parser, kind)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="Go on with the interrupted run in --output; takes no other option.",
    )


def add_options(
    parser: argparse.ArgumentParser,
    kind: type[composed.Options] = config_lib.TrainingConfig,
    *,
    without: Iterable[str] = (),
    also: type[composed.Options] | None = None,
    condition: str = "",
) -> None:
    """Adds the flags of all fields of a config, in groups; those not given have no attribute.

    Flags of the options `without` are left out. Flags take the choices of options of the same names
    in `also`, too. `condition` follows the name of each group.
    """
    groups = {name: parser.add_argument_group(name + condition) for name in _GROUPS}
    others = composed.options_of(also) if also else {}
    names = {of: name for name, held in _GROUPS.items() for of in (name, *held)}
    for name, (field, hint) in composed.options_of(kind).items():
        if name not in without:
            group = groups[names[field.metadata["group"]]]
            add_flag(group, field, hint, others[name].hint if name in others else None)


def add_flag(
    group: argparse._ArgumentGroup, field: dataclasses.Field, hint: object, also: object = None
) -> None:
    """Adds the flag of one field of a config, with choices of its type and of `also`."""
    flags = SHORT_FLAGS.get(field.name, []) + ["--" + field.name.replace("_", "-")]
    default = "" if field.default in (None, "") else f" Default: {field.default}."
    text = (field.metadata["help"] + default).replace("%", "%%")
    words: tuple[str, ...] = ()
    if typing.get_origin(hint) in (typing.Union, types.UnionType):  # with None, or words
        hint, *others = typing.get_args(hint)
        words = tuple(word for other in others for word in typing.get_args(other))
    if hint is bool:
        group.add_argument(
            *flags, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
        return
    choices, kind = None, hint
    if typing.get_origin(hint) is typing.Literal:
        choices, kind = tuple(dict.fromkeys((*typing.get_args(hint), *_choices(also)))), str
    if hint is int:
        words += tuple(word for word in _choices(also) if word not in words)
    if words:
        kind = functools.partial(_number_or_word, words)
    metavar = METAVARS.get(field.name) or {int: "N", float: "X"}.get(hint, "NAME")
    alone = WITHOUT_VALUE.get(field.name)
    group.add_argument(
        *flags,
        dest=field.name,
        nargs=alone and "?",
        const=alone,
        type=kind,
        choices=choices,
        metavar=metavar,
        default=argparse.SUPPRESS,
        help=text,
    )


def _choices(hint: object) -> tuple[str, ...]:
    """Returns the words that a type, or a type with None, allows; none if it is of another kind."""
    for one in (hint, *typing.get_args(hint)):
        if typing.get_origin(one) is typing.Literal:
            return typing.get_args(one)
    return ()


def _number_or_word(words: Sequence[str], text: str) -> int | str:
    """Reads an integer or one of some words."""
    try:
        return text if text in words else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a whole number or {' or '.join(words)}, got {text!r}"
        ) from None


def add_table_options(group: argparse._ArgumentGroup) -> None:
    """Adds the flags that `table_options` reads."""
    for name, (field, hint) in composed.options_of(language_config.TextConfig).items():
        if name in _TABLE:
            add_flag(group, field, hint)


def add_placement(group: argparse._ArgumentGroup) -> None:
    """Adds the flags that `placement_from` reads."""
    group.add_argument(
        "--ray-workers",
        type=int,
        metavar="N",
        help="Number of Ray workers. Needs the extra 'distributed'. Default: one for each core.",
    )
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="Address of a Ray cluster. Default: --ray-workers starts Ray on this machine.",
    )


def given_options(
    args: argparse.Namespace,
    kind: type[composed.Options] = config_lib.TrainingConfig,
) -> dict[str, object]:
    """Values of the flags of `add_options` that were given, by field."""
    names = composed.options_of(kind)
    return {name: value for name, value in vars(args).items() if name in names}


def table_options(args: argparse.Namespace) -> tables.TableOptions:
    """Returns how tables are read, by the flags of `add_table_options`."""
    return tables.TableOptions(**{name: vars(args)[name] for name in _TABLE if name in args})


def placement_from(args: argparse.Namespace) -> placement_lib.Placement:
    """Returns where clients work, by the flags of `add_placement`."""
    return placement_lib.Placement(args.ray_workers, args.ray_address)


def merged_options(file: str | None, flags: Mapping[str, object]) -> dict[str, object]:
    """Returns the options of a new run, not validated yet; flags overrule the TOML file."""
    options = options_lib.read_toml(file) if file else {}
    return options_lib.overrule(options, flags)


def config_from(
    args: argparse.Namespace,
    kind: type[options_lib.Config] = config_lib.TrainingConfig,
) -> options_lib.Config | None:
    """Returns the config of a new run, from file and flags; None with --resume alone."""
    flags = given_options(args, kind)
    problems = []
    if args.output is None:
        problems.append("--output is missing: name the folder of the results.")
    config = None
    if not args.resume:
        options = merged_options(args.config, flags)
        try:
            config = options_lib.config_from_mapping(
                options, args.config or "the command line", kind
            )
        except validation.UsageError as error:
            problems.append(str(error))
        if problems:
            problems += _problems_of_data(options)
    if problems:
        raise validation.UsageError(" ".join(problems))
    if args.resume and (flags or args.config):
        raise validation.UsageError(
            "--resume goes on with the options that the run began with: leave out "
            f"{'--config' if args.config else '--' + next(iter(flags)).replace('_', '-')}."
        )
    return config


def _problems_of_data(options: Mapping[str, object]) -> list[str]:
    """Returns what is wrong with the data, which is else found once the options are right."""
    try:
        text = language_config.TextConfig(
            **{n: options[n] for n in ("data", *_TABLE) if n in options}  # type: ignore
        )
        problem = sources.problem_of(text.data, text.table)
    except validation.UsageError:
        return []  # The config has said it.
    return [problem] if problem else []
