"""`tff-dpftrl sweep`: many runs of `train` or `finetune`, their means, errors and privacy."""

from __future__ import annotations

import argparse
import functools
import pathlib
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tff_dpftrl import durable_files, validation
from tff_dpftrl.accounting import display
from tff_dpftrl.cli import config_flags
from tff_dpftrl.cli import output as output_lib
from tff_dpftrl.finetuning import config as finetuning_config
from tff_dpftrl.runs import joint_runs, manifest
from tff_dpftrl.training import config as training_config
from tff_dpftrl.training import options as options_lib

if TYPE_CHECKING:
    from tff_dpftrl.sweeps import axes as axes_lib
    from tff_dpftrl.sweeps import cells as cells_lib
    from tff_dpftrl.sweeps import folder as folder_lib
    from tff_dpftrl.sweeps import kinds, results_writer
    from tff_dpftrl.sweeps import results as results_lib
    from tff_dpftrl.training import placement as placement_lib

_DESCRIPTION = """\
Train, or with --finetune fine-tune, one model for each combination of options, and compare them:
one run ("cell") for each combination of the values given with --over, averaged over seeds.

The output folder receives cells.csv (a row a cell), summary.csv and summary.md (a row a setting:
mean and standard error over its seeds), curves.png, pareto.png (accuracy against epsilon), and in
cells/ the results of every run, as `tff-dpftrl train` or `finetune` writes them. They are written
anew after every cell.

The same command again goes on: finished cells are kept, begun ones resumed, failed ones tried
again. Values can be added to an axis later (seed=0:5 after seed=0:3).

Ctrl-C loses nothing but the rounds, or steps, that are being run.

With --select, the best of a random number of runs is chosen instead, each with a cell drawn at
random, within one epsilon: winner/ is all that may be published.
"""

_EPILOG = """\
axes:
  --over NAME=VALUE,VALUE,...  any option of `tff-dpftrl train`, with --finetune of
                               `tff-dpftrl finetune`; several axes multiply
  --over seed=0:3              integers from 0 to 2: the end is left out, as in Python
  --over min_sep=none,20       none: not given, for options without a default value; but the
                               mechanism none is the one without noise
  --over noise_multiplier=0.5,1,mechanism=blt,tree,seed=0:3
                               several axes in one
  --over "clip_norm_schedule=none;40:0.3,60:0.1"
                               semicolons, in quotes, between values that have commas
A cell's values overrule the flags, and these the file. As in `train`, noise_multiplier takes
target_epsilon away and the other way round. The mechanism none takes both away: cells of it that
differ in them only are one cell.

examples:
  # Two mechanisms, two noises, three seeds: 12 runs, two at a time.
  tff-dpftrl sweep quickstart --over mechanism=blt,tree --over noise_multiplier=0.5,1 \\
      --over seed=0:3 --jobs 2 --output results/sweep

  # Fine-tuning: group sizes at two ε, with three seeds.
  tff-dpftrl sweep finetune.toml --finetune --over group_size=1,4,16 --over target_epsilon=1,4 \\
      --over seed=0:3 --output results/groups

  # The best of about ten runs by public text, with epsilon 8 for all of it together.
  tff-dpftrl sweep my_run.toml --over server_learning_rate=0.3,1 --over clip_norm=0.3,1 \\
      --target-epsilon 8 --select public.jsonl.gz --select-runs 10 --output results/chosen

docs/how_to/sweeps.md explains the files, and the limits of the numbers.
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "sweep",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, what_is_left=what_is_left)
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="TOML file of options, or a name like quickstart, as for `train --config`; not needed "
        "if flags give all options.",
    )
    parser.add_argument(
        "--finetune",
        action="store_true",
        help="Run `tff-dpftrl finetune`, whose help has the defaults, instead of `train`.",
    )
    parser.add_argument(
        "--over",
        action="append",
        required=True,
        metavar="NAME=V,V,...",
        help="Option and its values. May be given several times.",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="Folder of the results.")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="J",
        help="Number of cells to run at a time. Each takes its own memory; all share "
        "the cores. Default: 1.",
    )
    group = parser.add_argument_group("the best of a random number of runs, within one epsilon")
    group.add_argument(
        "--select",
        metavar="TEXT",
        help="Criterion for the best run. With public text by user, a file or "
        "'standard-library': the fewest bits per character of this text. With 'metrics': the "
        "least loss among those that --metrics-epsilon releases. --target-epsilon is the epsilon "
        "of all runs and the choice together.",
    )
    group.add_argument(
        "--select-runs",
        type=float,
        metavar="K",
        help="Expected number of runs, above 1. Default: 10.",
    )
    group.add_argument(
        "--select-largest",
        type=int,
        metavar="N",
        help="Largest number of runs. Default: 5 K.",
    )
    config_flags.add_placement(parser.add_argument_group("where clients work (of every cell)"))
    config_flags.add_options(parser, also=finetuning_config.FinetuningConfig)
    config_flags.add_options(
        parser,
        finetuning_config.FinetuningConfig,
        without=training_config.TrainingConfig.known(),
        condition=" (with --finetune)",
    )


def what_is_left(args: argparse.Namespace) -> str:
    """Returns what the results folder holds after an interruption, and how to go on."""
    from tff_dpftrl.sweeps import cells as cells_lib
    from tff_dpftrl.sweeps import folder as folder_lib
    from tff_dpftrl.sweeps import selection

    output = pathlib.Path(args.output)
    same = f":\n  {shlex.join(['tff-dpftrl', *sys.argv[1:]])}" if "sweep" in sys.argv else "."
    if selection.exists(output):
        return (
            "Every committed round is kept, and nothing is released yet: only the end of all runs "
            f"makes {output}/{joint_runs.WINNER}. Go on with the same command{same}"
        )
    if not folder_lib.exists(output):
        return "No cell had begun: the same command begins again."
    cells = cells_lib.grid(*folder_lib.read(output))
    states = [folder_lib.state(folder_lib.cell_folder(output, cell)) for cell in cells]
    counts = ", ".join(
        f"{states.count(state)} {state}"
        for state in ("finished", "begun", "failed", "new")
        if state in states
    )
    return (
        f"Of {len(cells)} cells: {counts}. Every committed round is kept; {output}/summary.md has "
        f"what is finished. Go on with the same command{same}"
    )


def run(args: argparse.Namespace) -> int:
    """Sweeps, or goes on with it, and returns the exit status: 1 if a cell failed."""
    from tff_dpftrl.sweeps import axes as axes_lib
    from tff_dpftrl.sweeps import cells as cells_lib
    from tff_dpftrl.sweeps import folder as folder_lib
    from tff_dpftrl.sweeps import kinds, results_writer, running

    validation.integer("--jobs", args.jobs, minimum=1)
    output = pathlib.Path(args.output)
    placement = config_flags.placement_from(args)
    kind = kinds.FINETUNING if args.finetune else kinds.TRAINING
    flags = {
        name: value
        for each in kinds.KINDS.values()
        for name, value in config_flags.given_options(args, each.config_class).items()
    }
    options = config_flags.merged_options(args.config, flags)
    kind.refuse_others(flags, "The command line")
    kind.refuse_others(options, str(args.config))
    options_lib.check_names(options, args.config or "the command line", kind.config_class)
    axes = axes_lib.parse(args.over, _synonyms(), kind)
    if args.select is not None:
        return _select(args, options, axes, kind, output, placement)
    for name in ("select_runs", "select_largest"):
        if getattr(args, name) is not None:
            raise validation.UsageError(
                f"--{name.replace('_', '-')} is for --select TEXT, which is missing: add it."
            )
    axes = folder_lib.check(output, options, axes, kind)
    cells = cells_lib.grid(options, axes, kind)
    digests = _check(args, cells, output, placement)

    output.mkdir(parents=True, exist_ok=True)
    interruption = running.Interruption()
    with folder_lib.lock(output, _progress) as lock:
        # The check is repeated, since another sweep may have begun the run.
        axes = folder_lib.check(output, options, axes, kind)
        folder_lib.bind(output, digests)
        folder_lib.write(output, options, axes, kind)
        writer = results_writer.ResultsWriter(cells, axes, output)
        with interruption.noticing():
            running.run(
                cells,
                output,
                functools.partial(running.command_of, placement_flags=_placement_flags(args)),
                jobs=args.jobs,
                lock=lock,
                interruption=interruption,
                progress=_progress,
                after_each=lambda cell, ending: _after(writer, cell, ending),
                reuse=not _placement_flags(args),
            )
            results = writer.write()
        if interruption.signals:
            signal.raise_signal(interruption.signals[0])
    return _finish(args, results, output)


def _select(
    args: argparse.Namespace,
    options: Mapping[str, Any],
    axes: axes_lib.Axes,
    kind: kinds.RunKind,
    output: pathlib.Path,
    placement: placement_lib.Placement,
) -> int:
    """Chooses the best of a random number of runs, or goes on with it; returns the exit status."""
    from tff_dpftrl.sweeps import axes as axes_lib
    from tff_dpftrl.sweeps import cells as cells_lib
    from tff_dpftrl.sweeps import folder as folder_lib
    from tff_dpftrl.sweeps import population_check, running, selection

    num_runs = selection.num_runs(args.select_runs, args.select_largest)
    cells = cells_lib.grid(options, axes, kind)
    selection.refuse(cells, args.select)
    for cell in cells:
        _check_cell(cell, placement)
    if not selection.exists(output):
        folder_lib.check(output, options, axes, kind)
        if folder_lib.exists(output):
            raise validation.UsageError(
                f"--output {output} holds a sweep without --select, all of whose runs were seen: "
                "name another folder."
            )
        _progress(f"{len(cells)} cells. Reading the data, and planning the noise ...")
    output.mkdir(parents=True, exist_ok=True)
    interruption = running.Interruption()
    with folder_lib.lock(output, _progress) as lock:
        for folder in (output, output / manifest.PRIVATE):
            durable_files.remove_leftovers(folder)
        chosen = selection.open_or_draw(
            output, folder_lib.definition(options, axes, kind), cells, num_runs, args.select
        )
        runs, private = chosen.runs(cells), output / manifest.PRIVATE
        folder_lib.check_cells(private, runs)
        _progress(
            f"The choice has {display.epsilon_at(chosen.plan.epsilon, chosen.delta)}. "
            "How many runs there are is secret, like all that this command prints."
        )
        if left := selection.unfinished(output, runs):
            joint_runs.refuse_changed(chosen.plan.digests, population_check.check(left))
            _progress("The runs have begun. None of them is shown before all have ended.")
            with interruption.noticing():
                running.run(
                    left,
                    private,
                    functools.partial(running.command_of, placement_flags=_placement_flags(args)),
                    jobs=args.jobs,
                    lock=lock,
                    interruption=interruption,
                    progress=_progress,
                    after_each=lambda run, ending: None,  # Their number is secret.
                    reuse=not _placement_flags(args),
                    shows_progress=False,
                )
        if interruption.signals:
            signal.raise_signal(interruption.signals[0])
        failed = selection.unfinished(output, runs)
        for run in failed:
            log = folder_lib.cell_folder(private, run) / folder_lib.LOG
            _progress(f"\n{axes_lib.label(run.values)} failed: see {log}")
        if failed:
            _progress("\nNothing is released. The same command again tries what failed once more.")
            return 1
        selection.release(output, chosen, cells)
    winner = output / joint_runs.WINNER
    if (winner / selection.DIVERGED).exists():
        print(f"The chosen run diverged: {winner / selection.DIVERGED} is all that is released.")
        return 1
    print(f"The best run is in {winner}, the only folder that may be published.")
    output_lib.print_next("Look at it", f"tff-dpftrl report {shlex.quote(str(winner))} --html")
    return 0


def _synonyms() -> dict[str, str]:
    """Returns the names that --over accepts for an option: its shorter flags."""
    return {
        flag.lstrip("-").replace("-", "_"): name
        for name, flags in config_flags.SHORT_FLAGS.items()
        for flag in flags
    }


def _placement_flags(args: argparse.Namespace) -> list[str]:
    """Returns the given flags of `config_flags.add_placement`, for the processes of the cells."""
    flags = []
    if args.ray_workers is not None:
        flags.append(f"--ray-workers={args.ray_workers}")
    if args.ray_address is not None:
        flags.append(f"--ray-address={args.ray_address}")
    return flags


def _check(
    args: argparse.Namespace,
    cells: Sequence[cells_lib.Cell],
    output: pathlib.Path,
    placement: placement_lib.Placement,
) -> dict[str, str]:
    """Refuses, before any work, options that a cell would refuse; returns digests of the data."""
    from tff_dpftrl.sweeps import folder as folder_lib
    from tff_dpftrl.sweeps import population_check

    folder_lib.check_cells(output, cells)
    states = {cell.name: folder_lib.state(folder_lib.cell_folder(output, cell)) for cell in cells}
    unfinished = [cell for cell in cells if states[cell.name] != "finished"]
    for cell in unfinished:
        _check_cell(cell, placement)
    if unfinished:
        _progress(f"{len(cells)} cells, {len(unfinished)} to run. Reading the data ...")
    return population_check.check(unfinished)


def _check_cell(cell: cells_lib.Cell, placement: placement_lib.Placement) -> None:
    from tff_dpftrl.sweeps import axes as axes_lib

    try:
        cell.kind.check(cell.config, placement)
    except ValueError as error:
        raise validation.UsageError(f"The cell {axes_lib.label(cell.values)}: {error}") from error


def _progress(line: str) -> None:
    import tqdm

    tqdm.tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()


def _after(
    writer: results_writer.ResultsWriter, cell: cells_lib.Cell, ending: folder_lib.Ending
) -> None:
    """Writes the results so far after a cell, and prints how it ended."""
    from tff_dpftrl.sweeps import axes as axes_lib
    from tff_dpftrl.sweeps import results as results_lib

    (result,) = (result for result in writer.write() if result.cell.name == cell.name)
    accuracy, loss = map(result.metrics.get, (results_lib.ACCURACY, results_lib.LOSS))
    if ending.status:
        went = f"failed: {ending.last_line}"
    else:
        went = "finished" if accuracy is None else f"top-1 {accuracy:.2%}"
        went += "" if loss is None else f", loss {loss:.4g}"
        went += f" after {len(result.rows)} {cell.kind.unit}s"
    _progress(f"{axes_lib.label(cell.values)}: {went}")


def _finish(
    args: argparse.Namespace, results: Sequence[results_lib.CellResult], output: pathlib.Path
) -> int:
    """Prints the outcome and returns the exit status."""
    from tff_dpftrl.sweeps import axes as axes_lib
    from tff_dpftrl.sweeps import folder as folder_lib
    from tff_dpftrl.sweeps import tables

    print(f"\n{tables.markdown(results)}\n")
    print(f"Results are in {output}/: summary.md, cells.csv, curves.png, pareto.png")
    finished = next((result for result in results if result.state == "finished"), None)
    if finished is not None:
        folder = shlex.quote(str(folder_lib.cell_folder(output, finished.cell)))
        output_lib.print_next(
            "Each cell is a run of its own, such as",
            f"tff-dpftrl report {folder}",
            f"tff-dpftrl audit --run {folder}",
        )
    failed = [result for result in results if result.state == "failed"]
    for result in failed:
        log = folder_lib.cell_folder(output, result.cell) / folder_lib.LOG
        _progress(f"\n{axes_lib.label(result.cell.values)} failed ({log}):\n  {result.failure}")
    if failed:
        _progress("\nThe same command again tries what failed once more.")
    return 1 if failed else 0
