"""What models gain on users' own text: `python experiments/personalisation.py NAME=RUNS ...`.

RUNS is a pattern of results folders, those of one name being equal but for their seed. Eighty
users who are held out of the commit messages train each model further, as by `tff-dpftrl
personalize --learning-rates 0.03`. Writes results/personalisation.csv: means over the runs with
their standard errors, and the largest standard error of a run's mean gain over the users.
"""

from __future__ import annotations

import argparse
import pathlib

import finetuning_text
import numpy as np

from tff_dpftrl.finetuning import personalisation
from tff_dpftrl.training import trained_model

_TABLE = pathlib.Path(__file__).resolve().parent / "results" / "personalisation.csv"
_DATA = "commits_by_author.jsonl.gz"
_CONFIG = personalisation.PersonalisationConfig(learning_rates=(0.03,))


def _outcomes(folder: pathlib.Path) -> personalisation.Personalisation:
    text = personalisation.read(folder, {"data": _DATA}, "held-out")
    trained = trained_model.find(folder, "last").load()
    return personalisation.personalise(trained, text, _CONFIG)


def _gain(run: personalisation.Personalisation) -> personalisation.Mean:
    gain = run.best.loss_gain
    assert gain is not None  # The users have trained.
    return gain


def _mean(values: list[float]) -> str:
    mean = personalisation.Mean.of(np.array(values))
    error = f" ± {mean.standard_error:.3f}" if len(values) > 1 else ""
    return f"{mean.value:.3f}{error}"


def _row(name: str, runs: list[personalisation.Personalisation]) -> dict[str, str]:
    return {
        "model": name,
        "seeds": str(len(runs)),
        "loss before": _mean([run.before.loss.value for run in runs]),
        "loss after": _mean([run.best.loss.value for run in runs]),
        "gain": _mean([_gain(run).value for run in runs]),
        "over users": f"± {max(_gain(run).standard_error for run in runs):.3f}",
    }


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="NAME=RUNS", help="Patterns by name.")
    runs = {}
    for given in parser.parse_args().models:
        name, _, pattern = given.partition("=")
        runs[name] = sorted(pathlib.Path().glob(pattern))
        if not runs[name]:
            parser.error(f"NAME=RUNS {given}: there is no such folder.")
    rows = [_row(name, [_outcomes(run) for run in folders]) for name, folders in runs.items()]
    finetuning_text.write(_TABLE, rows)


if __name__ == "__main__":
    main()
