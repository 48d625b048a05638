"""Runs what the figures of McMahan et al. 2018 vary: `python experiments/dp_fedavg.py [NAME ...]`.

Each name is a sweep of experiments/dp_fedavg.toml with three seeds, in results/NAME, which is then
kept in experiments/results/NAME (`collect.py`). Numbers of figures are those of the paper. Its
σ = z S / C is the noise on the average; z and C are of the run that cohorts of ten stand for. What
was interrupted goes on with the same command. --list shows the commands.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shlex
import sys
from collections.abc import Mapping

_HERE = pathlib.Path(__file__).resolve().parent
CONFIG = _HERE / "dp_fedavg.toml"
_SEEDS = "seed=0:3"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What is varied, and what else is not as in the config.

    Attributes:
      over: Axes besides the seeds, as `--over` takes them.
      options: Options of all runs, as text by name.
    """

    over: tuple[str, ...]
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


_EXACT = {"algorithm": "dp-ftrl", "mechanism": "none"}  # Fixed samples, exact mean, no clipping.
_NO_NOISE = {"noise_multiplier": "0"}
_MANY_WORDS = {"vocabulary_size": "4000"}
# A FedSGD step is one gradient of all that the client has.
_FEDSGD = {"algorithm": "dp-fedsgd", "batch_size": "16"}

SWEEPS = {
    # Figure 1 and Table 2: the cohort with which z = 1 costs no accuracy, against neither noise nor
    # clipping (which is the sweep of cohorts, at ten clients).
    "dp_fedavg_headline": Sweep(("simulate_report_goal=100,1250,5000",)),
    # Figure 2: clipping without noise; the last norm clips nothing.
    "dp_fedavg_clip_only": Sweep(("clip_norm=0.3,1,3,10,1000000",), _NO_NOISE),
    # Figure 3: noise, with flat and with per-layer clipping.
    "dp_fedavg_noise_layers": Sweep(
        ("noise_multiplier=0,4,16,64", "per_layer_clipping=false,true")
    ),
    # Figures 4 and 8: noise and clip norm, at one z, as they are and changed halfway.
    "dp_fedavg_schedule": Sweep(
        ("clip_norm=10,3", "clip_norm_schedule=none,30:1"), {"simulate_report_goal": "1250"}
    ),
    # Figure 5: estimators, with samples of random size.
    "dp_fedavg_estimators": Sweep(
        ("estimator=fixed-denominator,clipped-denominator",), {"clip_norm": "1000000", **_NO_NOISE}
    ),
    # Figure 6: clients in a round, exact means, no noise, no clipping.
    "dp_fedavg_cohorts": Sweep(("clients_per_round=5,10,20",), _EXACT),
    # Figure 7: the same noise on the averages of small and large cohorts.
    "dp_fedavg_same_noise": Sweep(("clients_per_round=5,20",), {"simulate_report_goal": "1250"}),
    # Figures 9 and 10: FedSGD, clipping without noise, and noise.
    "dp_fedsgd_clip_only": Sweep(("clip_norm=0.1,0.3,1,1000000",), {**_FEDSGD, **_NO_NOISE}),
    "dp_fedsgd_noise": Sweep(("noise_multiplier=0,4,16",), {**_FEDSGD, "clip_norm": "1"}),
    # Figures 11 and 12: clipping and noise with a larger dictionary.
    "dp_fedavg_words_clip_only": Sweep(("clip_norm=1,3,10",), {**_MANY_WORDS, **_NO_NOISE}),
    "dp_fedavg_words_noise": Sweep(("noise_multiplier=0,4,16",), _MANY_WORDS),
    # Section 3 has one number of tokens a user, and one learning rate.
    "dp_fedavg_tokens": Sweep(("max_sequences_per_client=4,16,64",)),
    "dp_fedavg_learning_rates": Sweep(("client_learning_rate=1.5,3,6,12",)),
}


def arguments(name: str, data: str, jobs: int) -> list[str]:
    """Returns the arguments of `tff-dpftrl` for a sweep.

    Args:
      name: Key of `SWEEPS`.
      data: File of the commit messages by author.
      jobs: Number of runs at a time.
    """
    sweep = SWEEPS[name]
    flags = [f"--{option.replace('_', '-')}={v}" for option, v in sweep.options.items()]
    over = [word for axis in (_SEEDS, *sweep.over) for word in ("--over", axis)]
    where = ["--data", data, "--jobs", str(jobs), "--output", f"results/{name}"]
    return ["sweep", str(CONFIG), *flags, *over, *where]


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="Sweeps; all if left out.")
    parser.add_argument("--data", default="commits_by_author.jsonl.gz", metavar="FILE")
    parser.add_argument("--jobs", type=int, default=2, metavar="J", help="Runs at a time.")
    parser.add_argument("--list", action="store_true", help="Show the commands only.")
    args = parser.parse_args()
    names = args.names or list(SWEEPS)
    if unknown := sorted(set(names) - set(SWEEPS)):
        parser.error(f"there is no {unknown[0]}; there are {', '.join(SWEEPS)}.")
    if args.list:
        for name in names:
            print(shlex.join(["tff-dpftrl", *arguments(name, args.data, args.jobs)]))
        return
    from tff_dpftrl.cli import main as cli

    sys.path.insert(0, str(_HERE.parent))
    from experiments import collect

    for name in names:
        if status := cli.main(arguments(name, args.data, args.jobs)):
            sys.exit(status)
        collect.collect(pathlib.Path("results") / name, name)


if __name__ == "__main__":
    main()
