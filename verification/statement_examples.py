"""Examples of the privacy statement of every kind of run, for docs/reference/statements.md.

To write the page again: `python -m verification.statement_examples > docs/reference/statements.md`.
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from typing import Literal

from tff_dpftrl.accounting import budget_shares, composition, statement, statement_text
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.finetuning import example_sampling, run_privacy
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.mechanisms import blt, table
from tff_dpftrl.numpy_noise import stream as noise_stream
from tff_dpftrl.participation import observed
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import mechanism_plan, privacy
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.tasks import secure_groups, task_privacy
from tff_dpftrl.runtime.tasks import terms as terms_lib

_HEAD = """# Statements

The privacy statement of each kind of run, as in `privacy_statement.md`, but with lines wrapped.
`privacy_statement.json` says the same for programs, by a [schema](privacy_statement.schema.json).
All figures are of made-up runs that trained nothing. A test renders this page again. For scale, see
[published deployments](../explanation/published_deployments.md).

The first statement is whole. Of each other one, the page has the guarantee, and the lines that no
statement above it has in the same section.
"""
_WIDTH = 118  # Characters in a line, after the quotation mark.
_NUM_USERS = 20_000
_FACTS = facts_lib.Facts(
    vocabulary_source="the docstrings of the standard library",
    vocabulary_is_public=True,
    hyperparameter_tuning="on public text",
)


def _of_run(
    plan: mechanism_plan.MechanismPlan,
    *,
    min_sep: int,
    times: int,
    facts: facts_lib.Facts = _FACTS,
    exact: str = sentences.EXACT_FIGURES,
) -> statement.PrivacyStatement:
    facts = dataclasses.replace(
        facts, not_covered=(mechanism_plan.not_covered(exact, plan.others),)
    )
    seen = observed.ObservedParticipation(plan.num_rounds, min_sep, times, {times: _NUM_USERS})
    return plan.statement(seen, facts, charge_all_rounds=False)


def _passes(
    *,
    in_one_place: bool = True,
    unit: Literal["user", "example"] = "user",
    facts: facts_lib.Facts = _FACTS,
    exact: str = sentences.EXACT_FIGURES_OF_STEPS,
) -> statement.PrivacyStatement:
    plan = privacy.DpFtrl(
        num_rounds=100,
        clients_per_round=1000,
        clip_norm=0.5,
        delta=1e-7,
        mechanism="tree",
        noise_multiplier=5.0,
        data_in_one_place=in_one_place,
        unit_of_privacy=unit,
    ).plan(_NUM_USERS, 1000)
    return _of_run(plan, min_sep=20, times=5, facts=facts, exact=exact)


def _with_parts() -> statement.PrivacyStatement:
    target, delta = 8.0, 1e-7
    words, metrics = budget_shares.planned(target, delta, {"vocabulary": 0.02, "metrics": 0.05})
    others = (
        dataclasses.replace(words, says="words, counted with noise, above a threshold"),
        dataclasses.replace(metrics, says="loss and accuracy of each round, with noise"),
    )
    plan = privacy.DpFtrl(
        num_rounds=100,
        clients_per_round=1000,
        clip_norm=0.5,
        delta=delta,
        mechanism="tree",
        target_epsilon=target,
        others=others,
    ).plan(_NUM_USERS, 1000)
    return _of_run(plan, min_sep=20, times=5)


def _dp_fedavg() -> statement.PrivacyStatement:
    plan = privacy.DpFedAvg(
        algorithm="dp-fedavg",
        num_rounds=100,
        clients_per_round=1000,
        clip_norm=0.5,
        delta=1e-7,
        noise_multiplier=1.0,
    ).plan(_NUM_USERS, 1000)
    return _of_run(plan, min_sep=1, times=12)


def _cyclic() -> statement.PrivacyStatement:
    plan = privacy.Amplified(
        sampling="cyclic",
        num_rounds=100,
        clients_per_round=1000,
        clip_norm=0.5,
        delta=1e-7,
        options=table.Options(bands=4),
        noise_multiplier=2.0,
    ).plan(_NUM_USERS, 1000)
    return _of_run(plan, min_sep=4, times=9)


def _finetuning(sampling: str, facts: facts_lib.Facts = _FACTS) -> statement.PrivacyStatement:
    plan = plan_lib.make_plan(
        example_sampling.of_sizes([16] * _NUM_USERS),
        sampling=sampling,
        group_size=8,
        expected_units=1000.0,
        num_steps=100,
        noise_multiplier=1.0,
        delta=1e-7,
    )
    run = run_privacy.SampledFinetuning.of(plan, clip_norm=0.5, deterministic_seed=None)
    exact = sentences.EXACT_FIGURES_OF_STEPS
    return _of_run(run, min_sep=1, times=12, facts=facts, exact=exact)


def _after_another_run() -> statement.PrivacyStatement:
    earlier = composition.Spent("first", delta=1e-7, epsilon=4.5)
    facts = dataclasses.replace(_FACTS, earlier_runs=(earlier,), same_users=True)
    return _finetuning(plan_lib.USER, facts)


def _served(secure: secure_groups.SecureGroups | None) -> statement.PrivacyStatement:
    terms = terms_lib.Terms(
        server_plan="ab" * 32,
        files={},
        kind="training",
        population="keyboards",
        task="next-word",
        num_devices=_NUM_USERS,
        schema=schema_lib.MinSep(100, 20, 5),
        delta=1e-7,
        strategy=blt.Blt((0.9, 0.5), (0.3, 0.2)),
        noise_multiplier=5.0,
        clip_norm=0.5,
        adaptive_clipping=False,
        max_epsilon=None,
        data="typed words",
        vocabulary_source="the docstrings of the standard library",
        vocabulary_is_public=True,
        initial_weights_source=None,
        initial_weights_are_public=False,
        parameters={"clients_per_round": 1000},
        secure_aggregation=secure,
    )
    seen = participation_histograms.ObservedRounds(100, 20, 5)
    return task_privacy.TaskPrivacy(terms).statement(seen)


def _noise_stream() -> statement.PrivacyStatement:
    stream = noise_stream.NoiseStream(
        blt.Blt((0.9, 0.5), (0.3, 0.2)), noise_multiplier=5.0, clip_norm=0.5, template=[(1000,)]
    )
    return statement.dp_ftrl_statement(
        stream.guarantee(schema_lib.MinSep(100, 20, 5), delta=1e-7),
        _FACTS,
        unit_of_privacy="user",
        observed=observed.Participation(100, 20, 5),
        num_users=_NUM_USERS,
        data_in_one_place=True,
    )


def examples() -> Iterator[tuple[str, statement.PrivacyStatement]]:
    """Makes the examples.

    Yields:
      What was run, and its statement.
    """
    exact = sentences.EXACT_FIGURES
    yield "`train` (DP-FTRL)", _passes(in_one_place=False, exact=exact)
    yield "`train` with a vocabulary and metrics within ε", _with_parts()
    yield "`train --algorithm dp-fedavg`", _dp_fedavg()
    yield "`train --sampling cyclic`", _cyclic()
    yield "`finetune --sampling example` (ELS)", _finetuning(plan_lib.EXAMPLE)
    yield "`finetune --sampling user` (ULS)", _finetuning(plan_lib.USER)
    yield "`finetune --sampling passes`", _passes()
    yield "`finetune`, beginning with the model of another run", _after_another_run()
    exact = sentences.EXACT_FIGURES_OF_OWN_MODEL
    images = _passes(unit="example", facts=facts_lib.Facts(), exact=exact)
    yield "`private_fit` of a Keras model, by example", images
    yield "A loop with the noise of `NoiseStream`", _noise_stream()
    yield "A served task", _served(None)
    secure = secure_groups.SecureGroups("active-server", least_group=100, threshold=0.75)
    yield "A served task with secure aggregation", _served(secure)


def _wrapped(line: str) -> list[str]:
    """Breaks a line of Markdown into short ones that are rendered in the same way."""
    if line.startswith("|"):
        return [line]
    indent = "  " if line.startswith("- ") else ""
    return textwrap.wrap(
        line,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def _sections(text: str) -> dict[str, list[str]]:
    """Splits a statement into the lines of its sections, by heading; "" is the beginning."""
    sections: dict[str, list[str]] = {"": []}
    heading = ""
    for line in text.split("\n"):
        if line.startswith("## "):
            heading = line
            sections[heading] = []
        else:
            sections[heading].append(line)
    return sections


def _new_lines(text: str, known: Mapping[str, set[str]]) -> list[str]:
    """Keeps the guarantee, and of other sections the lines that no earlier statement has there."""
    kept = []
    for heading, lines in _sections(text).items():
        new = [line for line in lines if line and line not in known.get(heading, ())]
        if heading == "## Guarantee" or any(line.startswith("|") for line in new):
            new = lines[1:-1]  # Whole, without the empty lines around it.
        if new:
            kept += ([heading, ""] if heading else []) + [*new, ""]
    return kept[:-1]


def page() -> str:
    """Renders docs/reference/statements.md."""
    parts = [_HEAD]
    known: dict[str, set[str]] = {}
    for title, example in examples():
        parts.append(f"## {title}\n")
        text = statement_text.markdown(example)
        shown = _new_lines(text, known) if known else text.rstrip("\n").split("\n")
        for heading, section in _sections(text).items():
            known.setdefault(heading, set()).update(section)
        lines = itertools.chain.from_iterable(map(_wrapped, shown))
        parts.append("\n".join(f"> {line}".rstrip() for line in lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
