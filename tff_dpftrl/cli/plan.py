"""`tff-dpftrl plan`: what to run, so that privacy and noise come out as wanted."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import itertools
import pathlib

from tff_dpftrl import validation
from tff_dpftrl.accounting import defaults
from tff_dpftrl.cli import config_flags, delta_flag, flags, mechanism_flags, output, sampling_flags
from tff_dpftrl.finetuning import config as finetuning_config
from tff_dpftrl.finetuning import group_size
from tff_dpftrl.mechanisms import table
from tff_dpftrl.training import language_config

_DESCRIPTION = """\
Plan a run before anything is trained: what to run, and with which noise, for a privacy target.

  --population N    How to run with N devices: mechanism, report goal (clients a round), noise
                    multiplier and how often a device may take part; the plans that no other beats
                    in privacy, noise, report goal and memory, and commands for a recommended one.
                    With --sampling, one party draws each round's clients in secret.
  --mechanism NAME  Its smallest noise multiplier for a target, printed as by `account`. Without a
                    target, its best form for a schema; the loss is the stddev of the noise in the
                    sum of all updates so far, at a fixed guarantee.
  --compare NAMES   Strategies, each optimised once, where clients come back sooner, or training
                    runs longer, than planned. With --population, the mechanisms to consider.
  --finetune        Each way to fine-tune with user-level privacy, where all data is in one place.

A client takes part in at most --max-participations rounds, any two of them at least --min-sep apart
(a stride: rounds 7 and 9 are 2 apart). With --sampling, the guarantee rests on the secret.

--population: noise is that in the sum of the averaged updates so far, per unit of clip norm; it
stands for utility by a hypothesis. With --workload it is the noise in the models, per unit of clip
norm and learning rate. Recommended are the fewest clients a round without more noise than Gboard's
production models. If no plan has so little, or noise is the target, twice the clients a round, and
each device twice as often, must lower noise (or mu, with which epsilon grows) by a fifth. With
--sampling, the plan of least noise is printed for each number of clients a round; with cyclic, of
several numbers of bands, up to 64. Bins take seconds for each of --report-goals.

--finetune: B gradients a step are of B sampled examples, at most G of each user in the pool (ELS);
of M sampled users with G examples each, G * M = B (ULS); of M users at a time who take turns, with
correlated noise (passes); or of groups of users that take turns and are sampled, with as many bands
as groups (cyclic). Correlated noise is given as the independent noise whose sums are as noisy. The
better way has less noise relative to the gradient. The mean of G gradients of a user is smaller
than one by nothing if all are equal, by the square root of G if they have nothing in common. That
is measured on public text (--initial-weights), or elsewhere (--gradient-norms); else it is taken
for the fourth root of G, halfway.

With --budget-shares, --target-epsilon is for everything that the run releases. A share of the
budget is one of the squared mu of the Gaussian mechanism that spends it all, or of 1 / sigma^2 of
sampled steps, which add up; epsilon does not. The noise of the weights grows by a factor of
1 / sqrt(1 - shares), and some more for the vocabulary's share of delta.
"""

_EPILOG = """\
mechanisms:
{mechanisms}

examples:
  # All that is known: 4 million devices, 2000 rounds, a target.
  tff-dpftrl plan --population 4000000 --rounds 2000 --target-epsilon 5 --delta 1e-10

  # Keep the noise of a run that was good enough (tree, z 7, 6500 clients); what does it cost?
  tff-dpftrl plan --population 4000000 --rounds 2000 --delta 1e-10 --keep-noise-of tree:7:6500

  # Data in one place: groups take turns, and are sampled in secret, for a run of 500 rounds.
  tff-dpftrl plan --population 1600 --rounds 500 --target-epsilon 4 --delta 1e-5 \\
      --report-goals 64 --sampling cyclic --all

  # The noise of a BLT for 2000 rounds in which a device takes part at most every 400 rounds.
  tff-dpftrl plan --mechanism blt --target-epsilon 5 --delta 1e-10 --rounds 2000 --min-sep 400

  # The BLT of least noise in the models of a server with momentum and a schedule, in a file.
  tff-dpftrl plan --mechanism blt --rounds 2000 --min-sep 400 --output strategy.json \\
      --workload momentum=0.9,warmup=100,decay=cosine

  # Planned for a separation of 400 of 2000 rounds; what if it is anything from 100 to 1000?
  tff-dpftrl plan --compare blt tree bandtoep blt-gboard-b400 --rounds 2000 --min-sep 400 \\
      --vary min-sep --values 100:1000:50 --plot min_sep.png

  # Fine-tune on a file of texts, with the gradients of the model on public text.
  tff-dpftrl plan --finetune --data users.jsonl.gz --initial-weights results/pretrained \\
      --target-epsilon 4 --compute-budget 1024 --steps 500

  # Before there is any data: 10000 users with 50 examples each.
  tff-dpftrl plan --finetune --population 10000 --examples-per-user 50 --target-epsilon 4
"""

_INTEGERS, _NORMS = flags.listed(int, "8,16,32"), flags.listed(float, "8.8,6.6,5.1")
_VARIED = ("min-sep", "rounds", "participations")
_OPTIONS = " ".join(field.name for field in dataclasses.fields(table.Options))
_TEXT = " ".join(field.name for field in dataclasses.fields(language_config.TextConfig))
_STEPS, _BUDGET = finetuning_config.FinetuningConfig.num_steps, group_size.COMPUTE_BUDGET


@dataclasses.dataclass(frozen=True)
class _Question:
    """Question to `plan`: flags that ask it together, the function that answers, other flags.

    Of each tuple in `needs`, one flag is needed.
    """

    asked_by: tuple[str, ...]
    answer: str
    needs: tuple[tuple[str, ...], ...]
    takes: str


_QUESTIONS = (
    _Question(
        ("finetune",),
        "plan_finetune.print_ways",
        (("data", "user_sizes", "population"), ("target_epsilon",)),
        f"{_TEXT} examples_per_user delta budget_shares compute_budget steps smallest_cohort "
        "example_group_sizes initial_weights gradient_norms proxy_data",
    ),
    _Question(
        ("population sampling",),
        "plan_population.print_sampled_plans",
        (("rounds",), ("target_epsilon",)),
        "delta report_goals budget_shares parameters all",
    ),
    _Question(
        ("population",),
        "plan_population.print_plans",
        (("rounds",), ("target_epsilon", "target_rho", "target_noise", "keep_noise_of")),
        "compare delta report_goals budget_shares min_sep min_sep_fraction timer_hours plot all "
        "rounds_per_day max_participations parameters secagg_inflation noise_parties workload",
    ),
    _Question(
        ("compare",),
        "plan_compare.print_comparison",
        (*mechanism_flags.SCHEMA, ("vary",), ("values",)),
        f"max_participations {_OPTIONS} optimize_at_each_point plot",
    ),
    _Question(
        ("sampling",),
        "plan_mechanism.print_noise",
        (("rounds",), ("target_epsilon",)),
        "sampling_probability group_size sampling_groups bins estimate_draws mechanism strategy "
        f"{_OPTIONS} delta neighbours group_of",
    ),
    _Question(
        ("strategy", "mechanism target_epsilon", "mechanism target_rho"),
        "plan_mechanism.print_noise",
        (*mechanism_flags.RUN, ("target_epsilon", "target_rho")),
        f"max_participations {_OPTIONS} restart_every first_restart clip_norm_inflation delta "
        "neighbours group_of",
    ),
    _Question(
        ("mechanism",),
        "plan_mechanism.print_strategy",
        mechanism_flags.SCHEMA,
        f"max_participations {_OPTIONS} output",
    ),
)
"""The first that is asked is answered."""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    listing = "\n".join(f"  {name:13}{row.summary}" for name, row in table.MECHANISMS.items())
    parser = subparsers.add_parser(
        "plan",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(mechanisms=listing),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shares = "Shares of --target-epsilon's budget for what is released besides the weights: "
    shares += "vocabulary (not with --finetune), metrics; a name alone has the default share."
    fraction = "--population: share of the largest possible stride to rely on (production saw 0.14 "
    fraction += "to 0.81). Default: 1."
    names = "Mechanisms; without --population also strategy files, and entries of the zoo."
    flags.add(
        parser,
        ("population", int, "N", "Number of devices that train; with --finetune, of users."),
        ("finetune", bool, "", "Compare the ways to fine-tune."),
        ("target-epsilon", float, "E", "Largest epsilon at --delta."),
        ("target-rho", float, "R", "Largest rho-zCDP."),
        ("target-noise", float, "X", "--population: largest noise, in the unit of the table."),
        ("keep-noise-of", _reference, "MECHANISM:Z:GOAL", "--population: largest noise, as a run."),
        ("budget-shares", str, "PART=SHARE,...", shares),
        ("output", str, "FILE", "Without a target: file for the strategy, as JSON."),
        ("plot", str, "FILE", "--population, --compare: file for a plot: PNG, PDF or SVG."),
    )
    parser.add_argument("--compare", nargs="+", metavar="NAME", help=names)
    delta_flag.add(parser, "; --finetune: n to the power of -1.1 for n examples in all")
    separation = mechanism_flags.add_arguments(parser)
    flags.add(
        separation,
        ("min-sep-fraction", float, "F", fraction),
        ("timer-hours", float, "H", "--population: hours that a device waits after it took part."),
    )
    sampling_flags.add_arguments(parser)
    sampling_flags.add_neighbours(parser)
    output.add_format(parser, ("text", "json", "csv"), when="; csv is for --compare")
    inflation = "Largest factor, such as 1.01, by which the rounding of secure aggregation may "
    inflation += "inflate the clip norm. Default: no secure aggregation."
    parties = "Number of noise parties, each of which adds the whole noise within the secure sums "
    parties += "of a task; with --secagg-inflation. Default: none, the server adds it."
    flags.add(
        parser.add_argument_group("plans, with --population"),
        (
            "report-goals",
            _INTEGERS,
            "M,M,...",
            "Clients a round. Default: 100 to 20000, 10 steps.",
        ),
        ("rounds-per-day", float, "R", "Rounds in a day, with --timer-hours."),
        ("parameters", int, "P", "Number of the model's parameters. Default: 4050000."),
        ("secagg-inflation", float, "F", inflation),
        ("noise-parties", int, "N", parties),
        ("all", bool, "", "Print all plans. Default: the Pareto set, or those of least noise."),
    )
    comparison = parser.add_argument_group("comparisons, with --compare and no --population")
    comparison.add_argument("--vary", choices=_VARIED, help="Parameter that varies.")
    flags.add(
        comparison,
        ("values", _values, "FIRST:LAST:STEP", "Its values: a range with ends, or 100,200,400."),
        ("optimize-at-each-point", bool, "", "Optimise mechanisms anew at every point."),
    )
    weights = "Folder of the model to fine-tune. The norms of its gradients for all weights are "
    weights += "measured on --proxy-data; those of adapters (finetune --adapter-rank) are others."
    norms = "Typical norms of the mean of 1, 2, 4 ... gradients of one user at the initial weights."
    norms += " They must be of public users, or the guarantee does not cover the choice."
    group = parser.add_argument_group("ways to fine-tune, with --finetune")
    flags.add(
        group,
        ("user-sizes", pathlib.Path, "FILE", "Each user's number of examples, one a line."),
        ("examples-per-user", int, "K", "Examples of each of the --population."),
        ("compute-budget", int, "B", f"Gradients that a step computes. Default: {_BUDGET}."),
        ("steps", int, "T", f"Number of steps. Default: {_STEPS}."),
        ("smallest-cohort", int, "M", "Fewest users in a step of ULS. Default: 32."),
        ("example-group-sizes", _INTEGERS, "G,G,...", "Of ELS. Default: around users' median."),
        ("proxy-data", str, "CORPUS", "Public text by user. Default: standard-library."),
    )
    flags.add(
        group.add_mutually_exclusive_group(),
        ("initial-weights", pathlib.Path, "DIR", weights),
        ("gradient-norms", _NORMS, "L,L,...", norms),
    )
    condition = " with --finetune, read as by finetune"
    config_flags.add_options(parser, language_config.TextConfig, condition=condition)
    unset = {"data": None, "delta": None, "parameters": 4_050_000, "smallest_cohort": 32}
    unset |= {"steps": _STEPS, "compute_budget": _BUDGET, "noise_parties": 0, "branches": None}
    parser.set_defaults(run=functools.partial(run, parser), min_sep_fraction=1.0, **unset)


def _reference(text: str) -> tuple[str, float, int]:
    try:
        name, noise_multiplier, report_goal = text.split(":")
        return name, float(noise_multiplier), int(report_goal)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like tree:7:6500, got {text!r}") from None


def _values(text: str) -> list[int]:
    """Reads a range such as 100:1000:50, ends included, or a list."""
    try:
        if ":" in text:
            first, last, step = map(int, text.split(":"))
            values = list(range(first, last + 1, step))
        else:
            values = [int(part) for part in text.split(",")]
    except ValueError:
        expected = "must look like 100:1000:50 or 100,200,400"
        raise argparse.ArgumentTypeError(f"{expected}, got {text!r}") from None
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"must be at least one positive number, got {text!r}")
    return values


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Answers the question that the flags ask; returns the exit status."""
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    asked = ((question, names.split()) for question in _QUESTIONS for names in question.asked_by)
    question, asking = next((pair for pair in asked if given.issuperset(pair[1])), (None, []))
    if question is None:
        raise validation.UsageError(
            "say what to plan: --population N (how to run), --mechanism NAME or --sampling NAME "
            "(its noise for a target), --compare NAMES, or --finetune."
        )
    mechanism_flags.require(args, *question.needs)
    takes = [*asking, *itertools.chain(*question.needs), *question.takes.split()]
    unused = [name for name in vars(args) if name in given - {"command", "format", *takes}]
    if unused:
        names = " with ".join(map(_flag, asking))
        known = ", ".join(map(_flag, dict.fromkeys(takes)))
        raise validation.UsageError(f"{_flag(unused[0])} is not for {names}, which takes {known}.")
    if args.format == "csv" and asking != ["compare"]:
        raise validation.UsageError("--format csv is for --compare: take text or json.")
    if args.delta is None and not args.finetune:
        args.delta = defaults.DELTA
    module, function = question.answer.split(".")
    getattr(importlib.import_module(f"tff_dpftrl.cli.{module}"), function)(args)
    return 0


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
