"""Builds the privacy statements of runs."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.accounting import (
    composition,
    defaults,
    display,
    guarantee,
    parts,
    privacy_statement,
)
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.participation import observed as observed_lib
from tff_dpftrl.participation import schema as schema_lib

PrivacyStatement = privacy_statement.PrivacyStatement
UnitOfPrivacy = privacy_statement.UnitOfPrivacy
Scalar = privacy_statement.Scalar


_NO_FACTS = facts_lib.Facts()
_UNKNOWN = "not recorded"
_MANY = 0.1  # Users whose data may be published, in expectation, without a caveat: δ times them.


def dp_ftrl_statement(
    claim: guarantee.Guarantee,
    facts: facts_lib.Facts = _NO_FACTS,
    *,
    unit_of_privacy: UnitOfPrivacy,
    num_users: int | None = None,
    declared: schema_lib.MinSep | None = None,
    observed: observed_lib.Participation | None = None,
    data_in_one_place: bool = False,
) -> PrivacyStatement:
    """Builds the privacy statement of a DP-FTRL run.

    The statement has no guarantee if the noise is 0 or too small for a finite epsilon, if the
    seed of the noise is known, or if the observed participation broke the declared schema or
    the one that the claim is computed for. Without an observation the headline says that
    participation was assumed.

    Args:
      claim: Guarantee of the run. Its schema may be the declared one, cut to the rounds
        that were run.
      facts: Facts of the run that the claim does not have; none by default.
      unit_of_privacy: Unit that a client stands for: "device", "user" for a person, or
        "example" for one example of data in one place.
      num_users: Number of users (or devices) in the population; None if unknown. A delta
        that is not below 1 / num_users gives a warning.
      declared: Participation schema declared before the run; `claim.schema` if None.
      observed: Recorded participation, `Ledger.observed()`; None if there is no record.
      data_in_one_place: Whether one party holds everybody's data, so that there are no clients.

    Returns:
      The statement.

    Raises:
      ValueError: If an argument is out of range.
    """
    declared = claim.schema if declared is None else declared
    reasons = []
    if claim.noise_multiplier == 0.0:
        reasons.append(sentences.NO_NOISE)
    if claim.seed_is_known:
        reasons.append(sentences.KNOWN_SEED)
    if not reasons and math.isinf(claim.epsilon):
        reasons.append(sentences.TOO_LITTLE_NOISE)
    if observed is not None:
        observed = observed_lib.Participation(
            observed.num_rounds, observed.min_sep, observed.max_participations
        )
        broken = _breaches(observed, declared, "declared")
        reasons.extend(broken or _breaches(observed, claim.schema, "accounted for"))
    parameters: dict[str, Scalar] = {
        "noise_multiplier": claim.noise_multiplier,
        "sensitivity_squared": claim.sensitivity.squared,
        "sensitivity_method": claim.sensitivity.method
        + ("" if claim.sensitivity.exact else " (an upper bound)"),
        "clip_norm_inflation": claim.clip_norm_inflation,
    }
    if claim.clip_norm is not None:
        parameters["clip_norm"] = claim.clip_norm
    if claim.adaptive_clipping:
        parameters["adaptive_clipping"] = (
            "noise_multiplier is that of updates and clip norm together"
        )
    has_record = observed is not None
    record = ", and the record of participation is complete and true" if has_record else ""
    norm = "the clip norm that the round uses" if claim.adaptive_clipping else "the clip norm"
    return _statement(
        claim,
        facts,
        unit_of_privacy,
        num_users,
        data_in_one_place,
        reasons=reasons,
        parameters=parameters,
        who=(
            sentences.SCHEMA_KEPT.format(unit=unit_of_privacy, record=record),
            sentences.NO_SAMPLING,
        ),
        bounds=(
            sentences.NORM_BOUND.format(unit=unit_of_privacy, norm=norm),
            *([sentences.CLIPPED_BY_CALLER] if claim.clipped_by_caller else []),
        ),
        rho_zcdp=None if reasons or not claim.is_gaussian else claim.rho_zcdp,
        accounting=sentences.MATRIX_ACCOUNTING,
        adjacency=_adjacency(
            unit_of_privacy,
            facts,
            claim.others,
            is_sampled=False,
            adaptive_clipping=claim.adaptive_clipping,
        ),
        declared=declared,
        accounted=claim.schema,
        observed=observed,
        profile=()
        if reasons or claim.is_gaussian
        else parts.profile(claim.weights, claim.others, claim.epsilon),
    )


def _statement(
    claim: guarantee.Guarantee | SampledClaim,
    facts: facts_lib.Facts,
    unit: UnitOfPrivacy,
    num_users: int | None,
    in_one_place: bool,
    *,
    reasons: Sequence[str],
    parameters: dict[str, Scalar],
    who: Sequence[str],
    bounds: Sequence[str],
    accounting: str,
    **fields: Any,
) -> PrivacyStatement:
    """Builds a statement; `who` and `bounds` are assumptions on participation and contributions."""
    is_sampled, others = isinstance(claim, SampledClaim), claim.others
    trusted = facts.trust or trust(unit, in_one_place, is_sampled)
    if num_users is not None:
        parameters["num_users"] = validation.integer("num_users", num_users, minimum=1)
    sent, follows, not_following = "", "", []
    if not in_one_place:
        sent, follows = f" (those sent to {unit}s included)", " that follows the algorithm"
        not_following = [sentences.FOLLOWING.format(units=f"{unit.capitalize()}s")]
    figures = "Metrics, held-out evaluation"
    if _is_part(parts.METRICS, others) or _is_part(parts.EVALUATION, others):
        figures = "Other metrics than those above, other evaluation"
    one_client = sentences.ONE_NAME if in_one_place else sentences.ONE_CLIENT
    if is_sampled and facts.rows_have_owners:
        one_client = sentences.ROWS_NAME_OWNERS
    elif unit == "example":
        one_client = sentences.EXAMPLE_ONCE
    source, uncovered_words, assumed_words = facts.vocabulary_source or _UNKNOWN, [], []
    if _is_part(parts.VOCABULARY, others):
        assumed_words = [sentences.NOISED_VOCABULARY.format(source=source)]
    elif facts.vocabulary_is_public:
        assumed_words = [sentences.PUBLIC_VOCABULARY.format(source=source)]
    elif facts.has_vocabulary:
        uncovered_words = [sentences.VOCABULARY_CHOICE.format(source=source)]
    by_author = [sentences.CLAIMED_BY_AUTHOR] if claim.claimed_by_author else []
    is_secure = sentences.NOISE_GENERATOR in facts.parameters
    statement = PrivacyStatement(
        mechanism=claim.mechanism,
        parameters={**parameters, **facts.parameters},
        epsilon=None if reasons else claim.epsilon,
        delta=claim.delta,
        no_guarantee=tuple(reasons),
        accounting=accounting + _of_all_parts(others, is_sampled),
        unit_of_privacy=unit,
        setting=trusted.setting,
        output=sentences.OUTPUT.format(sent=sent),
        covered=(
            sentences.COVERED.format(unit=unit, which=follows),
            *(f"{part.name.capitalize()}: {part.says}." for part in others),
        ),
        not_covered=(
            *not_following,
            sentences.FIGURES.format(figures=figures),
            tuning(facts.hyperparameter_tuning),
            *uncovered_words,
            *facts.not_covered,
        ),
        assumptions=(
            *who,
            one_client.format(unit=unit),
            *bounds,
            *by_author,
            sentences.CONTINUED_ONCE,
            *([sentences.SECURE_GENERATOR] if is_secure else []),
            *assumed_words,
        ),
        caveats=(
            *_of_arithmetic(facts, others),
            *([] if unit == "user" else [sentences.PERSON_WITH_SEVERAL.format(unit=unit)]),
            *facts.caveats,
        ),
        headline_caveats=(
            *(sentences.AUTHORS_SENSITIVITY.format(mechanism=claim.mechanism) for _ in by_author),
            *delta_caveats(claim.delta, num_users, unit),
            *facts.headline_caveats,
        ),
        from_whom=trusted.from_whom,
        data_in_one_place=in_one_place,
        parts=()
        if reasons or claim.weights is None
        else parts.costs(claim.weights, claim.mechanism, others, claim.delta),
        **fields,
    )
    return _with_earlier_runs(statement, facts)


def _with_earlier_runs(statement: PrivacyStatement, facts: facts_lib.Facts) -> PrivacyStatement:
    """Says beside ε what the run and those that its weights come from have spent together."""
    if not facts.earlier_runs:
        return statement
    stated = {
        name: getattr(statement, name)
        for name in ("delta", "epsilon", "rho_zcdp", "unit_of_privacy", "parameters")
    }
    this = composition.Spent.from_json("this", stated)
    says, total = composition.with_earlier_runs(this, facts.earlier_runs, facts.same_users)
    rows = statement.parts
    if rows:
        rows += tuple(
            parts.Cost(f"{parts.EARLIER} {run.name}", run.says, run.epsilon, run.rho_zcdp)
            for run in facts.earlier_runs
        )
    parameters = dict(statement.parameters)
    if total is not None:
        parameters["epsilon_with_earlier_runs"] = total.epsilon
        parameters["delta_with_earlier_runs"] = total.delta
    return dataclasses.replace(
        statement,
        parameters=parameters,
        parts=rows,
        headline_caveats=(*statement.headline_caveats, says),
    )


def _breaches(
    observed: observed_lib.Participation, schema: schema_lib.MinSep, name: str
) -> list[str]:
    return [
        sentences.BROKEN_SCHEMA.format(name=name, breach=breach)
        for breach in observed.breaches(schema)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledClaim:
    """Claim of a run that relies on secret random sampling.

    Attributes:
      mechanism: Name of the mechanism.
      epsilon: Epsilon of the run at `delta`; inf if there was no noise.
      delta: Delta for which `epsilon` was computed.
      accounting: Method by which epsilon was computed, a sentence.
      sampling: Sentence on what is sampled, and how; it becomes an assumption.
      secrecy: Sentence on the secrecy of the samples, which follows it.
      add_or_remove: Sentence on other neighbours than zero-out, if there is one.
      seed_is_known: Whether the seed of the noise or of the sampling was given by the user.
      claimed_by_author: Whether the strategy is of a class outside this package, as of
        `guarantee.Guarantee`.
      profile: Further pairs (ε, δ) that the run satisfies, from `parts.profile`. The
        odds of a guess follow from them; without any, from ε and δ alone.
      others: All else that the run releases about the same users. ε is that of the whole.
      apart: Names of the releases about all users that are neither rounds nor among `others`.
      weights: The rounds, whose own cost is stated beside those of `others`; None if there are no
        `others`.
    """

    mechanism: str
    epsilon: float
    delta: float
    accounting: str
    sampling: str
    secrecy: str = sentences.SECRET_SAMPLING
    add_or_remove: str = ""
    seed_is_known: bool = False
    claimed_by_author: bool = False
    profile: tuple[tuple[float, float], ...] = ()
    others: tuple[parts.Part, ...] = ()
    apart: tuple[str, ...] = ()
    weights: parts.Weights | None = None


def sampled_statement(
    claim: SampledClaim,
    facts: facts_lib.Facts = _NO_FACTS,
    *,
    unit_of_privacy: UnitOfPrivacy = "user",
    num_users: int | None = None,
    data_in_one_place: bool = False,
) -> PrivacyStatement:
    """Builds the privacy statement of a run that relies on secret random sampling.

    It is for DP-FedAvg, ELS, ULS and amplified banded matrix factorisation. The headline says
    that the sampling is assumed: no record of cohorts shows how they were drawn.

    Args:
      claim: Mechanism, ε, δ and sampling of the run.
      facts: Facts of the run, with the parameters of the mechanism; none by default.
      unit_of_privacy: Unit that is protected: "user" or "device".
      num_users: Number of users (or devices) in the population; None if unknown. A delta
        that is not below 1 / num_users gives a warning.
      data_in_one_place: Whether one party holds everybody's data, so that there are no clients.

    Returns:
      The statement.

    Raises:
      ValueError: If an argument is out of range.
    """
    reasons = []
    if math.isinf(claim.epsilon):
        reasons.append(sentences.TOO_LITTLE_NOISE)
    if claim.seed_is_known:
        reasons.append(sentences.KNOWN_SEED)
    adjacency = _adjacency(unit_of_privacy, facts, claim.others, is_sampled=True, apart=claim.apart)
    return _statement(
        claim,
        facts,
        unit_of_privacy,
        num_users,
        data_in_one_place,
        reasons=reasons,
        parameters={},
        who=(f"{claim.sampling} {claim.secrecy}",),
        bounds=(sentences.CLIPPED_AS_STATED,),
        rho_zcdp=None,
        accounting=claim.accounting,
        adjacency=f"{adjacency} {claim.add_or_remove}".rstrip(),
        declared=None,
        accounted=None,
        observed=None,
        profile=() if reasons else claim.profile,
    )


def _adjacency(
    unit: str,
    facts: facts_lib.Facts,
    others: Sequence[parts.Part],
    *,
    is_sampled: bool,
    adaptive_clipping: bool = False,
    apart: Sequence[str] = (),
) -> str:
    """Returns which data sets are neighbours.

    `apart` names releases about all users that are neither rounds nor among `others`.
    """
    if _is_part(parts.VOCABULARY, others):
        fixed = "the public words of the vocabulary"
    else:
        fixed = "the vocabulary" if facts.has_vocabulary else "how inputs are made of the data"
    # These count their users besides the rounds.
    names = (*(part.name for part in others if part.name != parts.METRICS), *apart)
    if is_sampled:
        counted = "".join(f", and in the {name}, for which nobody is sampled" for name in names)
        return sentences.ZERO_OUT_WHEN_SAMPLED.format(unit=unit, fixed=fixed, apart=counted)
    counted = "".join(f" and in the {name}" for name in names)
    zeroed = sentences.ADAPTIVELY_ZEROED if adaptive_clipping else ""
    return sentences.ZERO_OUT.format(unit=unit, fixed=fixed, apart=counted, zeroed=zeroed)


def _is_part(name: str, others: Sequence[parts.Part]) -> bool:
    """Returns whether a run releases a part of this name."""
    return any(part.name == name for part in others)


def _of_all_parts(others: Sequence[parts.Part], is_sampled: bool) -> str:
    """Returns how ε of the weights and of other parts is computed, to follow on the former."""
    if not others:
        return ""
    clauses = (
        (True, ""),
        (is_sampled, "loss"),
        (any(part.noise_multiplier_of_round is not None for part in others), "rounds"),
        (_is_part(parts.EVALUATION, others), "evaluation"),
        (any(part.delta for part in others), "delta"),
        (any(part.epsilon for part in others), "epsilon"),
    )
    return "".join(sentences.OF_ALL_PARTS[name] for is_so, name in clauses if is_so) + "."


def _of_arithmetic(facts: facts_lib.Facts, others: Sequence[parts.Part]) -> tuple[str, ...]:
    """Returns the caveats on how noise is drawn and added."""
    generator = facts.parameters.get(sentences.NOISE_GENERATOR)
    if generator is None:
        return (sentences.FLOATING_POINT,)
    is_noised = any(part.rho_zcdp or part.noise_multiplier_of_round is not None for part in others)
    rounded = {
        sentences.SECURE_AND_EXACT: (),
        sentences.SECURE_OF_PARTIES: (sentences.ROUNDED_BY_PARTIES,),
    }
    return (
        *rounded.get(str(generator), (sentences.ROUNDED_CORRELATION,)),
        *((sentences.OTHER_GENERATORS,) if is_noised else ()),
    )


def trust(unit: str, in_one_place: bool, is_sampled: bool = False) -> facts_lib.Trust:
    """Returns the trust model of a run without secure sums; `is_sampled` in secret."""
    if in_one_place:
        return facts_lib.Trust(sentences.IN_ONE_PLACE, sentences.NOT_FROM_OPERATOR)
    drawn = "who is drawn for which round, " if is_sampled else ""
    witnesses = sentences.NOT_FROM_WITNESSES if is_sampled else ""
    return facts_lib.Trust(
        sentences.TRUSTED_SERVER.format(drawn=drawn, unit=unit),
        sentences.NOT_FROM_SERVER.format(unit=unit) + witnesses,
    )


def tuning(source: str | None) -> str:
    """Returns what a guarantee says of the choice of settings: nothing."""
    return sentences.TUNING.format(source=source or _UNKNOWN)


def noise_generator(is_sum_of_draws: bool, of_parties: bool = False) -> str:
    """Returns the value of the parameter `NOISE_GENERATOR` of secure noise."""
    if of_parties:
        return sentences.SECURE_OF_PARTIES
    return sentences.SECURE_AND_EXACT if is_sum_of_draws else sentences.SECURE_AND_CORRELATED


def delta_caveats(delta: float, num_users: int | None, unit: str) -> tuple[str, ...]:
    """Returns `large_delta`; warns if the number of users proves that δ protects nobody."""
    if num_users is not None and _protects_nobody(delta, num_users):
        warnings.warn(
            f"delta={delta:g} is not below 1 / {num_users}, one over the number of {unit}s, and "
            f"protects nobody for certain: choose one far below {1.0 / num_users:.2g}.",
            stacklevel=4,
        )
    return large_delta(delta, num_users, unit)


def _protects_nobody(delta: float, num_users: int) -> bool:
    return delta * num_users >= 1.0 - 1e-9  # However a delta of 1 / num_users was rounded.


def large_delta(delta: float, num_users: int | None, unit: str) -> tuple[str, ...]:
    """Returns why a delta is too large, for statements and for the start of a run.

    It is one sentence if delta times the number of users is above 0.1, or if delta is large and
    `num_users` unknown.
    """
    shown = {"delta": display.delta(delta), "unit": unit, "users": num_users}
    if num_users is None:
        if delta <= defaults.LARGE_DELTA:
            return ()
        enough = math.ceil(1.0 / delta)
        return (sentences.LARGE_DELTA_OF_UNKNOWN.format(enough=enough, **shown),)
    if _protects_nobody(delta, num_users):
        return (sentences.DELTA_PROTECTS_NOBODY.format(**shown),)
    if delta * num_users <= _MANY:
        return ()
    somebody = -math.expm1(num_users * math.log1p(-delta))
    return (
        sentences.DELTA_TIMES_USERS.format(
            expected=display.round_up(delta * num_users, 2),
            somebody=display.round_up(somebody, 2),
            below=display.round_down(_MANY / num_users, 1),
            **shown,
        ),
    )
