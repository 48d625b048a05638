"""ELS, ULS, passes and turns on text, Figures 4 to 8 of Charles et al. 2024.

    python experiments/finetuning_text.py FIGURE CORPUS --data users.jsonl.gz \
        --initial-weights results/pretrained --seeds 0,1,2

fine-tunes a pretrained model once for each cell of a figure and each seed, and appends a row to
experiments/results/finetuning_CORPUS_FIGURE.csv when it is done. Cells that have their row are
left out: an interrupted figure goes on, and several processes may share one (`--share 0/2`).
What choices rest on, L(G) and the numbers of users and examples, is kept in
experiments/results/finetuning_CORPUS.csv.

What is measured is what `tff-dpftrl finetune` runs: its plans, batches and steps, without
its books. But gradient norms are those of users of the same corpus who are kept for a test, a tenth
of all, and take no other part, where `finetune` takes other public text; and the group size of
ELS is by the exact median, not by a private one that is part of ε. Noise and samples come from
the seed, so that a cell can be repeated: nothing here is private, and nothing has to be, the
corpora being public.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import fcntl
import functools
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tff_dpftrl.data import sequences
from tff_dpftrl.finetuning import (
    amplified,
    choosing,
    example_sampling,
    group_size,
    passes,
    plan,
    proxies,
    run,
    run_privacy,
)
from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.runs import privacy
from tff_dpftrl.training import corpus, text_task, trained_model

_RESULTS = pathlib.Path(__file__).resolve().parent / "results"
_HELD_OUT = 4000
_EPSILONS, _BUDGETS = (1.0, 4.0, 16.0, 64.0), (256, 1024, 64)
_LARGEST_GROUP, _FIRST_RATE = 64, 0.004
FIGURES = {
    "epsilon": 60,
    "map": 60,
    "group": 60,
    "users": 60,
    "large_map": 40,
    "long": 1000,
    "turns": 240,
}
"""Number of steps of each figure's runs."""
ELS, ULS, PASSES, NONE = "ELS", "ULS", "passes", "no privacy"
CYCLIC, BINS = "cyclic", "bins"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One fine-tuning run.

    Attributes:
      method: ELS, ULS, passes (BLT noise), cyclic (bands, group size and cohort of least noise),
        bins (BLT noise) or "no privacy" (ULS without noise).
      epsilon: Its target; infinite for no privacy.
      budget: B.
      group: G; None for the power of two nearest to the median (ELS) or
        Estimate-and-Double (the others).
      users_scale: The accounting has so many times the users.
      seed: Of noise and samples.
      learning_rate: Learning rate; that of all cells if None.
    """

    method: str
    epsilon: float
    budget: int
    group: int | None = None
    users_scale: int = 1
    seed: int = 0
    learning_rate: float | None = None


def cells(figure: str, seed: int) -> Iterator[Cell]:
    """The cells of a figure with one seed."""
    match figure:
        case "epsilon":  # Figures 6 and 7, and passes, which the paper has not.
            for budget in _BUDGETS:
                for method in (ULS, ELS, PASSES):
                    for epsilon in _EPSILONS:
                        yield Cell(method, epsilon, budget, seed=seed)
                yield Cell(NONE, math.inf, budget, seed=seed)
        case "map":  # Figures 5, 14 and 15.
            for epsilon in (1.0, 16.0):
                for budget in (64, 128, 256, 512):
                    for group, _ in group_size.splits(budget):
                        yield Cell(ULS, epsilon, budget, group, seed=seed)
        case "large_map":  # The same, as far as the paper's smallest pictures go.
            for epsilon in (1.0, 64.0):
                for budget in (64, 128, 256, 512, 1024, 2048):
                    for group, _ in group_size.splits(budget):
                        yield Cell(ULS, epsilon, budget, group, seed=seed)
        case "group":  # Figure 4.
            for epsilon in (1.0, 16.0):
                for group in (1, 4, 16, 32, 64, 256):
                    yield Cell(ELS, epsilon, 256, group, seed=seed)
        case "long":  # Figure 4 again, where the pool is passed several times.
            for epsilon in (*_EPSILONS[1:], math.inf):
                for group in (1, 8, 32, 128):
                    yield Cell(ELS, epsilon, 64, group, seed=seed)
        case "turns":  # Correlated noise with secret samples, beside either alone.
            for method in (ULS, ELS, PASSES, CYCLIC, BINS):
                for epsilon in (1.0, 2.0, 4.0, 8.0, 16.0):
                    yield Cell(method, epsilon, 256, seed=seed)
        case "users":  # Figure 8.
            for budget in _BUDGETS:
                for method in (ULS, ELS):
                    yield Cell(method, 4.0, budget, users_scale=10, seed=seed)


class Corpus:
    """Users, a pretrained model and what its gradients are like: what cells share."""

    def __init__(self, num_steps: int, looks: Sequence[int] = (), **options: object):
        """Reads the text and the model.

        Args:
          num_steps: Number of steps of each run.
          looks: Steps after which the loss is measured too.
          **options: Options of `finetune`: data, initial_weights, learning_rate and others.
        """
        self.num_steps, self._looks, self._options = num_steps, looks, options
        self._sums, self._best_turns = {}, {}
        config = self._config(sampling="user", group_size=1, cohort_size=1)
        text = corpus.read_users(config.text)
        initial = trained_model.find(pathlib.Path(config.initial_weights)).load()
        self.model, self.weights = initial.model, initial.weights
        spec = sequences.SequenceSpec(self.model.sequence_length, split_long_texts=False)
        self.task = text_task.TextTask(
            **text_task.sequences_of(
                text.train, text.validation, initial.words, spec, max_held_out=_HELD_OUT
            ),
            num_untouched_users=len(text.test),
            model=self.model,
        )
        self.users = run.users_of(self.task)
        self.kept = sequences.SequenceCorpus(text.test, initial.words, spec)
        self.proxies = proxies.measure(
            self.kept,
            self.model,
            self.weights,
            largest_group=_LARGEST_GROUP,
            seed=0,
            source="users kept for a test",
        )

    def _config(self, **options: object) -> config_lib.FinetuningConfig:
        kwargs = {"noise_multiplier": 0.0} | self._options | options
        return config_lib.FinetuningConfig(num_steps=self.num_steps, **kwargs)

    @property
    def facts(self) -> list[dict[str, object]]:
        """What the choices rest on, a row for each group size that L is known for."""
        norms, sizes = self.proxies.gradient_norms, self.users.num_examples
        return [
            {
                "G": group,
                "L(G)": f"{norm:.5g}",
                "users": len(sizes),
                "examples": int(sizes.sum()),
                "median": f"{np.median(sizes):g}",
                "pretrained loss": f"{self.pretrained['loss']:.5g}",
            }
            for group, norm in zip(norms.group_sizes, norms.norms, strict=True)
        ]

    @functools.cached_property
    def pretrained(self) -> dict[str, float]:
        """Metrics of the pretrained model on held-out users."""
        return self.task.evaluate(self.weights)

    def _split(self, cell: Cell) -> tuple[int, int]:
        """G and M."""
        if cell.method == ELS:
            return cell.group or group_size.median_choice(self.users.num_examples).group_size, 1
        if cell.group is not None:
            return cell.group, cell.budget // cell.group
        num_users = len(self.users) * cell.users_scale
        sigma = plan.noise_multiplier_of_cohort(
            num_users,
            num_steps=self.num_steps,
            target_epsilon=min(cell.epsilon, 16.0),  # Without noise as with little.
            delta=self._delta(cell),
        )
        split = group_size.estimate_and_double(
            self.proxies.gradient_norms, sigma, compute_budget=cell.budget, num_users=num_users
        )
        return split.group_size, split.cohort_size

    def _delta(self, cell: Cell) -> float:
        return plan.default_delta(int(self.users.num_examples.sum()) * cell.users_scale)

    def _privacy(self, cell: Cell, group: int, cohort: int) -> privacy.PrivacyPlan:
        rows = 1 if cell.method == ELS else group
        clip_norm = choosing.CLIP_FACTOR * self.proxies.gradient_norms(rows)
        if cell.method == PASSES:
            options = {
                "sampling": "passes",
                "group_size": group,
                "cohort_size": cohort,
                "noise_multiplier": None,
                "target_epsilon": cell.epsilon,
                "delta": self._delta(cell),
                "clip_norm": clip_norm,
                "deterministic_noise_seed": cell.seed,
            }
            sampling = self._config(**options).part(choosing.SamplingOptions)
            return choosing.choose(sampling, self.users, None, self.model.num_parameters).privacy
        has_noise = math.isfinite(cell.epsilon)
        made = plan.make_plan(
            self.users,
            sampling=plan.EXAMPLE if cell.method == ELS else plan.USER,
            group_size=group,
            expected_units=cell.budget if cell.method == ELS else cohort,
            num_steps=self.num_steps,
            target_epsilon=cell.epsilon if has_noise else None,
            noise_multiplier=None if has_noise else 0.0,
            delta=self._delta(cell),
            users_scale=cell.users_scale,
        )
        return run_privacy.SampledFinetuning.of(
            made, clip_norm=clip_norm, deterministic_seed=cell.seed
        )

    def _turns(self, cell: Cell) -> tuple[int, int, privacy.PrivacyPlan]:
        """G, M and privacy of least noise, relative to the gradients, of users' turns."""
        norms, setting = self.proxies.gradient_norms, (cell.method, cell.epsilon, cell.budget)
        if setting not in self._best_turns:  # The seed makes no difference.
            plans = amplified.choices(
                self.users,
                compute_budget=cell.budget,
                num_steps=self.num_steps,
                target_epsilon=cell.epsilon,
                delta=self._delta(cell),
                sampling=cell.method,
            )
            self._best_turns[setting] = amplified.best(plans, norms).asked
        asked = self._best_turns[setting]
        request = asked.asked(
            self.users,
            clip_norm=choosing.CLIP_FACTOR * norms(asked.group_size),
            deterministic_seed=cell.seed,
        )
        private = request.plan(len(self.users), self.model.num_parameters)
        return asked.group_size, asked.units_per_step, private

    def row(self, cell: Cell) -> dict[str, object]:
        """Runs a cell, and measures it on held-out users."""
        begin = time.monotonic()
        if cell.method in (CYCLIC, BINS):
            group, cohort, private = self._turns(cell)
        else:
            group, cohort = self._split(cell)
            private = self._privacy(cell, group, cohort)
        rows = 1 if cell.method == ELS else group
        rate = cell.learning_rate
        config = self._config(
            sampling="user",
            group_size=group,
            cohort_size=cohort,
            deterministic_noise_seed=cell.seed,
            **({} if rate is None else {"learning_rate": rate}),
        )
        steps = run.steps_of(
            config.part(config_lib.StepOptions), private, group, self.model, self.weights
        )
        # With a small model these are most of the time: a sum is traced once for all cells with as
        # many rows a unit, and Adam is traced, too.
        steps._sum = self._sums.setdefault(rows, steps._sum)
        _trace(steps._optimizer, steps._weights)
        batches = passes.batches_of(private, self.users, group, cell.seed)
        state = steps.initial_state()
        course = {}
        for step in range(self.num_steps):
            state = self._step(steps, state, batches(step))
            if step + 1 in self._looks:
                loss = self._evaluate(state)["loss"]
                course[f"loss after {step + 1}"] = f"{loss:.5g}"
        measured = self._evaluate(state)
        if isinstance(private, run_privacy.SampledFinetuning):
            relative = private.plan.noise_of_average
        else:
            relative = run_privacy.noise_of_average(private)
        relative *= self.proxies.gradient_norms(rows)
        return {
            **key(cell),
            "G": group,
            "units a step": private.clients_per_round,
            "σ": f"{private.noise_multiplier:.4g}",
            "clip norm": f"{private.clip_norm:.4g}",
            # Correlated noise cancels over steps: that of independent noise which is as much.
            "noise": f"{relative:.4g}",
            **course,
            **{name: f"{measured[name]:.5g}" for name in ("loss", "top1_in_vocab")},
            "seconds": f"{time.monotonic() - begin:.0f}",
        }

    def _evaluate(self, state) -> dict[str, float]:
        return self.task.evaluate(state["global_model_weights"]["trainable"])

    def _step(self, steps, state, batch: example_sampling.Batch):
        train = self.task.train
        drawn = [
            train.sequences(self.users.ids[user])[example]
            for user, example in zip(batch.row_users, batch.examples, strict=True)
        ]
        drawn = np.reshape(drawn, [-1, self.model.sequence_length + 1]).astype(np.int32)
        return steps.step(state, batch.row_splits, lambda a, b: (drawn[a:b, :-1], drawn[a:b, 1:]))[
            0
        ]


def _trace(optimizer, variables: Sequence[tf.Variable]) -> None:
    """Has an optimizer take its steps on some variables in a graph."""
    eager = optimizer.apply_gradients
    traced = tf.function(lambda gradients: eager(zip(gradients, variables, strict=True)))
    optimizer.apply_gradients = lambda pairs: traced([gradient for gradient, _ in pairs])


def key(cell: Cell) -> dict[str, str]:
    """The columns that tell the cells of a figure from each other."""
    return {
        "method": cell.method,
        "ε": f"{cell.epsilon:g}",
        "B": str(cell.budget),
        "G asked": "" if cell.group is None else str(cell.group),
        "users": f"× {cell.users_scale}",
        "seed": str(cell.seed),
        **({} if cell.learning_rate is None else {"learning rate": f"{cell.learning_rate:g}"}),
    }


def done(path: pathlib.Path) -> set[tuple[str, ...]]:
    """The cells that a file has, by the values of `key`."""
    names = list(key(Cell(ELS, 1.0, 1, learning_rate=1.0)))
    return {tuple(row[name] for name in names if name in row) for row in read(path)}


def with_own_rates(
    cells: Iterable[Cell], path: pathlib.Path, run: Callable[[Cell], None]
) -> Iterator[Cell]:
    """Gives each cell the learning rate of least loss with seed 0, found by doubling and halving.

    The noise of one step, by which Adam divides, is larger where it cancels in later ones: a rate
    for all methods would be wrong for most of them.

    Args:
      cells: Cells, those of a method with growing ε.
      path: File of results, from which the search goes on.
      run: Runs a cell, and adds its row to the file.

    Yields:
      The cells, each with its rate; the search for it is done by then.
    """
    found, starts = {}, {}
    for cell in cells:
        tried = dataclasses.replace(cell, seed=0)

        def loss(rate: float, tried: Cell = tried) -> float:
            asked = dataclasses.replace(tried, learning_rate=rate)
            if tuple(key(asked).values()) not in done(path):
                run(asked)
            wanted = key(asked).items()
            return next(float(row["loss"]) for row in read(path) if wanted <= row.items())

        if cell.method == BINS:  # Close to cyclic, and longer to plan: its rates are taken.
            found[BINS, cell.epsilon] = found[CYCLIC, cell.epsilon]
        if (cell.method, cell.epsilon) not in found:
            rate = starts.get(cell.method, _FIRST_RATE)
            while loss(2 * rate) < loss(rate):
                rate *= 2
            while loss(rate / 2) < loss(rate):
                rate /= 2
            found[cell.method, cell.epsilon] = starts[cell.method] = rate
        rate = found[cell.method, cell.epsilon]
        yield dataclasses.replace(cell, learning_rate=rate)


def read(path: pathlib.Path) -> list[dict[str, str]]:
    """Returns the rows of a file, none if there is none."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path: pathlib.Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Writes rows to a file, in place of what it had."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def append(path: pathlib.Path, row: dict[str, object]) -> None:
    """Adds a row to a file that other processes may add to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", newline="", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        table = csv.DictWriter(file, row, lineterminator="\n")
        if not path.stat().st_size:
            table.writeheader()
        table.writerow(row)


def main() -> None:
    """Runs the cells that are left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=list(FIGURES))
    parser.add_argument("corpus", help="what the file of results is called by")
    parser.add_argument("--data", required=True)
    parser.add_argument("--initial-weights", required=True)
    parser.add_argument("--max-users", type=int, help="number of training users; all by default")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--looks", help="steps after which the loss is measured too: 300,600")
    parser.add_argument("--epsilons", help="only cells with these ε: 1,inf")
    parser.add_argument("--groups", help="only cells with these G: 1,8")
    parser.add_argument("--budgets", help="only cells with these B: 64,256")
    parser.add_argument("--methods", help=f"only cells of these: {ELS},{ULS}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--share", default="0/1", help="every n-th cell, from the k-th: k/n")
    args = parser.parse_args()
    path = _RESULTS / f"finetuning_{args.corpus}_{args.figure}.csv"
    place, parts = map(int, args.share.split("/"))
    wanted = [cell for seed in args.seeds.split(",") for cell in cells(args.figure, int(seed))]
    if args.budgets is not None:
        budgets = [int(budget) for budget in args.budgets.split(",")]
        wanted = [cell for cell in wanted if cell.budget in budgets]
    if args.epsilons is not None:
        epsilons = [float(epsilon) for epsilon in args.epsilons.split(",")]
        wanted = [cell for cell in wanted if cell.epsilon in epsilons]
    if args.groups is not None:
        groups = [int(group) for group in args.groups.split(",")]
        wanted = [cell for cell in wanted if cell.group in groups]
    if args.methods is not None:
        wanted = [cell for cell in wanted if cell.method in args.methods.split(",")]
    left = [cell for cell in wanted[place::parts] if tuple(key(cell).values()) not in done(path)]
    print(f"{len(left)} of {len(wanted)} cells to run.", file=sys.stderr)
    if not left:
        return
    shared = Corpus(
        FIGURES[args.figure],
        [int(step) for step in args.looks.split(",")] if args.looks else (),
        data=args.data,
        initial_weights=args.initial_weights,
        max_users=args.max_users,
        learning_rate=args.learning_rate,
    )
    facts = _RESULTS / f"finetuning_{args.corpus}.csv"
    if not facts.exists():
        for row in shared.facts:
            append(facts, row)

    def run_cell(cell: Cell) -> None:
        if tuple(key(cell).values()) not in done(path):
            row = shared.row(cell)
            append(path, row)
            print(*row.values(), flush=True)

    for cell in with_own_rates(left, path, run_cell) if args.figure == "turns" else left:
        run_cell(cell)


if __name__ == "__main__":
    main()
