"""The README.md of a task's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tff_dpftrl import version
from tff_dpftrl.accounting import display
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.device import named_tensors
from tff_dpftrl.runtime.plans import plan_pb2, predicates
from tff_dpftrl.runtime.tasks import summation_sentences, task_folder, task_privacy
from tff_dpftrl.runtime.tasks import terms as terms_lib


def text(
    terms: terms_lib.Terms,
    devices: Sequence[plan_pb2.DevicePlan],
    rounds: population.RoundSettings,
    *,
    features: Mapping[str, named_tensors.Feature],
    max_rows: int | None,
    model: str,
    tested: Sequence[str],
    built: str | None = None,
) -> str:
    """Writes what a task does, asks of devices and promises of privacy."""
    purpose = "trains" if terms.kind == "training" else f"evaluates the model of {terms.model_of}"
    if terms_lib.COUNTS in terms.parameters:
        purpose = "counts, with noise"
    schema, plan, secure = terms.schema, devices[0], terms.secure_aggregation
    describe = summation_sentences.who_sees if secure else summation_sentences.in_short
    lines = [
        f"# Task {terms.task} of the population {terms.population}",
        "",
        f"It {purpose}: {model}. {built or f'Built with tff_dpftrl {version.__version__}.'}",
        "",
        f"- Rounds: {schema.num_rounds}, of {rounds.goal_count} reports ({rounds.least} are "
        f"enough when time is over; {rounds.wanted} devices are chosen).",
        f"- A device takes part at most {schema.max_participations} times, {schema.min_sep} "
        f"rounds (stride) and {plan.participation.min_sep_hours:g} hours apart.",
        f"- It takes the newest {plan.selection.max_examples} examples of its collection "
        f"{plan.selection.collection!r}, each with {named_tensors.describe(features)}"
        f"{'' if max_rows is None else f'; up to {max_rows} rows made of them are used'}.",
        f"- Its work takes up to {plan.limits.seconds:g} s and "
        f"{plan.limits.memory_bytes / 1e6:.0f} MB, and needs runtime version "
        f"{min(variant.least_runtime_version for variant in devices)}.",
        *(f"- {line}" for line in tested),
        "",
        "## Privacy",
        "",
        *_promise(terms),
        "",
        describe(secure),
        "",
        f"Devices have to trust the key in `{task_folder.PUBLIC_KEY}`. Nothing in this folder is "
        "secret; it is signed, and must not be changed.",
    ]
    return "\n".join(lines) + "\n"


def test_results(findings: Mapping[int, predicates.Findings]) -> list[str]:
    """Describes the results of a task's tests."""
    lines = []
    for least, result in findings.items():
        lines.append(f"Tested for devices of version {least} and later: {_measured(result)}.")
        lines += [f"As expected: {expectation}." for expectation in result.expectations]
        lines += [f"The same was tested, and found, with {_measured(o)}." for o in result.elsewhere]
    return lines


def _measured(result: predicates.Findings) -> str:
    """Describes what was measured with one version of TensorFlow."""
    parts = [f"TensorFlow {result.tensorflow}"]
    if result.losses:
        parts.append(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}")
    parts.append(f"largest change {max(result.changes):.3g}")
    parts.append(
        f"{result.cost.seconds:.2g} s and {result.cost.memory_bytes / 1e6:.0f} MB on a device"
    )
    if result.difference is not None:
        parts.append(f"updates that differ by {result.difference:.1g} of their norm at most")
    return ", ".join(parts)


def _promise(terms: terms_lib.Terms) -> list[str]:
    if terms.kind == "evaluation":
        return [
            "None: metrics are sums of the devices' exact figures, without noise. A sum to which "
            "only one device of a round adds more than zero is that device's own figure, also "
            "with secure sums."
        ]
    accounting = task_privacy.TaskPrivacy(terms)
    if terms.strategy is None or accounting.declared_epsilon is None:
        return ["NO guarantee: no noise is added."]
    lines = [
        f"{terms.strategy.name} noise, z = {display.round_down(terms.noise_multiplier, 6)}, clip "
        f"norm {terms.clip_norm:g}{' at first' if terms.adaptive_clipping else ''}: ε at most "
        f"{display.round_up(accounting.declared_epsilon)} at δ = {display.delta(terms.delta)} "
        f"after all rounds, per device, of {terms.num_devices} or more. "
        f"{task_privacy.honest_devices(terms.secure_aggregation)} {sentences.REPORTED_BY_DEVICES}"
    ]
    if terms.max_epsilon is not None:
        lines.append(f"No round begins that would bring ε above {terms.max_epsilon:g}.")
    for caveat in accounting.headline_caveats():
        lines += ["", f"**{caveat}**"]
    return lines
