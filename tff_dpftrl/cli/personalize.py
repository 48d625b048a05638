"""`tff-dpftrl personalize`: what a model gains from training on a user's own text."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import sys
import typing

import tqdm

from tff_dpftrl.cli import config_flags, output, trained_run
from tff_dpftrl.finetuning import personalisation
from tff_dpftrl.training import language_config

_DESCRIPTION = """\
Measure what a trained model gains when users train it further on their own text, as on a device
of theirs (Charles et al. 2024, appendix G.2).

Each of some users who did not train begins with the model, trains it by SGD on the first half of
their examples, and is asked how well it predicts the other half, before and after. Of several
learning rates, all users take the same one; the best is marked. The model is not changed.

It works for every folder of train, finetune and pretrain, so that models with and without
privacy can be compared; on the same data, the users are the same ones.

What a user does on their own device with their own text is no part of any privacy statement. The
averages printed here are exact figures of the users who are measured, and covered by none.
"""

_EPILOG = """\
examples:
  # On the run's own data, with users whom it held out for evaluation.
  tff-dpftrl personalize results/finetuned

  # The model that it began with, on the same users.
  tff-dpftrl personalize results/pretrained --data users.jsonl.gz

  # With the rate chosen there, for users whom nothing was chosen on; the numbers to a file.
  tff-dpftrl personalize results/finetuned --users test --learning-rates 0.03 --format csv > out.csv
"""

_HELP = {
    "learning_rates": "Of SGD; each is tried for all users.",
    "epochs": "Passes over the first half of a user's examples.",
    "batch_size": "Examples in a batch.",
    "min_examples": "Users with fewer examples are left out.",
    "max_users": "Users at most.",
    "seed": "Seed of the choice of users and of the order of their examples.",
}


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "personalize",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    trained_run.add_arguments(parser)
    parser.add_argument(
        "--users",
        choices=typing.get_args(personalisation.Part),
        default="held-out",
        help="held-out: the tenth of the users whom runs evaluate on. test: the tenth that runs "
        "do not touch (but pretrain trains on, if the text is the same). Default: held-out.",
    )
    group = parser.add_argument_group("training of a user")
    for field in dataclasses.fields(personalisation.PersonalisationConfig):
        rates = field.name == "learning_rates"
        default = ",".join(map(str, field.default)) if rates else field.default
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            type=_rates if rates else int,
            default=field.default,
            metavar="R,R,..." if rates else "N",
            help=f"{_HELP[field.name]} Default: {default}.",
        )
    group = parser.add_argument_group("data (that of the run, if --data is not given)")
    hints = typing.get_type_hints(language_config.TextConfig)
    for field in dataclasses.fields(language_config.TextConfig):
        if field.name in personalisation.TEXT_OPTIONS:
            config_flags.add_flag(group, field, hints[field.name])
    output.add_format(parser, ("text", "json", "csv"))


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 0.01,0.03,0.1, got {text!r}") from None


def run(args: argparse.Namespace) -> int:
    """Trains and measures, and returns the exit status.

    What is wrong with options and files is found before TensorFlow is imported.
    """
    config = personalisation.PersonalisationConfig(
        **{
            field.name: getattr(args, field.name)
            for field in dataclasses.fields(personalisation.PersonalisationConfig)
        }
    )
    files = trained_run.find(args)
    given = {name: vars(args)[name] for name in personalisation.TEXT_OPTIONS if name in args}
    print("Reading the data ...", file=sys.stderr)
    text = personalisation.read(args.run_folder, given, args.users)
    print("Loading TensorFlow ...", file=sys.stderr)
    trained = files.load()
    with tqdm.tqdm(
        total=min(config.max_users, len(text)),
        unit="user",
        mininterval=0.1 if sys.stderr.isatty() else 10.0,
        dynamic_ncols=True,
        leave=False,
    ) as bar:
        result = personalisation.personalise(trained, text, config, on_user=bar.update)
    facts = {
        "run": args.run_folder,
        "model": args.model,
        "data": text.name,
        "part": args.users,
        "users": result.num_users,
        **dataclasses.asdict(config),
    }
    if args.format == "json":
        report = {
            **facts,
            "users_with_too_few_examples": result.num_too_few,
            "best_learning_rate": result.best.learning_rate,
            "before": result.before.as_dict(),
            "after": [one.as_dict() for one in result.after],
        }
        output.print_json(report)
    elif args.format == "csv":
        del facts["learning_rates"]
        print(_as_csv(facts, result), end="")
    else:
        output.print_table(_table(result), left=0)
        print("\n" + "\n".join(_remarks(args, text.name, result)))
    return 0


def _as_csv(facts: dict[str, object], result: personalisation.Personalisation) -> str:
    """Returns a row for each learning rate, and one without a rate for the model as it is."""
    rows = [facts | one.as_dict() for one in (result.before, *result.after)]
    written = io.StringIO()
    writer = csv.DictWriter(written, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()


def _table(result: personalisation.Personalisation) -> list[list[str]]:
    heading = ["learning rate", "loss", "gain", "top-1 accuracy", "gain"]
    rows = [heading]
    for one in (result.before, *result.after):
        name = "none" if one.learning_rate is None else f"{one.learning_rate:g}"
        rows.append(
            [
                name + (" *" if one is result.best and len(result.after) > 1 else ""),
                _shown(one.loss),
                _shown(one.loss_gain),
                _shown(one.top1, percent=True),
                _shown(one.top1_gain, percent=True),
            ]
        )
    return rows


def _shown(mean: personalisation.Mean | None, *, percent: bool = False) -> str:
    if mean is None:
        return ""
    form, factor, unit = (".2f", 100, " %") if percent else (".3f", 1, "")
    if abs(mean.value) == float("inf"):
        return "diverged"
    if mean.value != mean.value:  # No word of the vocabulary.
        return "-"
    if mean.standard_error != mean.standard_error:
        return f"{factor * mean.value:{form}}{unit}"
    return f"{factor * mean.value:{form}} ± {factor * mean.standard_error:{form}}{unit}"


def _remarks(
    args: argparse.Namespace, data: str, result: personalisation.Personalisation
) -> list[str]:
    best = result.best.learning_rate
    lines = [
        f"Means and standard errors over {result.num_users} {args.users} users of {data}, each of "
        "whom counts the same; the loss is in nats per word or sub-word.",
    ]
    if result.num_too_few:
        lines.append(
            f"Left out: {result.num_too_few} users with fewer than {args.min_examples} examples."
        )
    if len(result.after) > 1:
        lines.append("* The best learning rate, chosen for these very users.")
        if args.users == "held-out":
            lines[-1] += f" On others: --users test --learning-rates {best:g}, all else as here."
        if best in (min(args.learning_rates), max(args.learning_rates)):
            beyond = "lower" if best == min(args.learning_rates) else "higher"
            lines.append(f"It is at the end of what was tried: try {beyond} --learning-rates, too.")
    lines.append("These are exact figures of these users: no statement covers them.")
    return lines
