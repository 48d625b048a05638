"""Builds the privacy statements of runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tff_dpftrl import validation
from tff_dpftrl.accounting import composition, guarantee, parts, privacy_statement
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.participation import observed as observed_lib
from tff_dpftrl.participation import schema as schema_lib

PrivacyStatement = privacy_statement.PrivacyStatement
UnitOfPrivacy = privacy_statement.UnitOfPrivacy
Scalar = privacy_statement.Scalar


_NO_FACTS = facts_lib.Facts()


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
    trust = facts.trust or sentences.trust(unit_of_privacy, data_in_one_place)
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
    if num_users is not None:
        parameters["num_users"] = validation.integer("num_users", num_users, minimum=1)
    statement = PrivacyStatement(
        mechanism=claim.mechanism,
        parameters={**parameters, **facts.parameters},
        epsilon=None if reasons else claim.epsilon,
        delta=claim.delta,
        rho_zcdp=None if reasons or not claim.is_gaussian else claim.rho_zcdp,
        no_guarantee=tuple(reasons),
        accounting=sentences.MATRIX_ACCOUNTING + sentences.parts_accounting(claim.others),
        declared=declared,
        accounted=claim.schema,
        observed=observed,
        unit_of_privacy=unit_of_privacy,
        adjacency=sentences.zero_out(
            unit_of_privacy,
            claim.adaptive_clipping,
            _fixed(facts, claim.others),
            _counted_apart(claim.others),
        ),
        setting=trust.setting,
        output=sentences.output(unit_of_privacy, data_in_one_place),
        covered=(
            *sentences.covered(unit_of_privacy, data_in_one_place),
            *sentences.parts_covered(claim.others),
        ),
        not_covered=(
            *sentences.not_covered(
                facts.hyperparameter_tuning, unit_of_privacy, data_in_one_place, claim.others
            ),
            *_vocabulary_not_covered(facts, claim.others),
            *facts.not_covered,
        ),
        assumptions=(
            sentences.schema_kept(unit_of_privacy, observed is not None),
            sentences.NO_SAMPLING,
            sentences.one_client(unit_of_privacy, data_in_one_place),
            sentences.norm_bound(unit_of_privacy, claim.adaptive_clipping),
            *([sentences.CLIPPED_BY_CALLER] if claim.clipped_by_caller else []),
            *([sentences.CLAIMED_BY_AUTHOR] if claim.claimed_by_author else []),
            sentences.CONTINUED_ONCE,
            *sentences.generator_assumed(facts),
            *_vocabulary_assumed(facts, claim.others),
        ),
        caveats=(
            *sentences.arithmetic_caveats(facts, claim.others),
            *sentences.unit_caveats(unit_of_privacy),
            *facts.caveats,
        ),
        headline_caveats=(
            *([sentences.authors_sensitivity(claim.mechanism)] if claim.claimed_by_author else []),
            *sentences.delta_caveats(claim.delta, num_users, unit_of_privacy),
            *facts.headline_caveats,
        ),
        from_whom=trust.from_whom,
        data_in_one_place=data_in_one_place,
        profile=()
        if reasons or claim.is_gaussian
        else parts.profile(claim.weights, claim.others, claim.epsilon),
        parts=()
        if reasons
        else parts.costs(claim.weights, claim.mechanism, claim.others, claim.delta),
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


def _vocabulary_not_covered(facts: facts_lib.Facts, others: Sequence[parts.Part]) -> list[str]:
    is_covered = facts.vocabulary_is_public or _is_part(parts.VOCABULARY, others)
    if is_covered or not facts.has_vocabulary:
        return []
    return [sentences.vocabulary_choice(facts.vocabulary_source)]


def _is_part(name: str, others: Sequence[parts.Part]) -> bool:
    return any(part.name == name for part in others)


def _fixed(facts: facts_lib.Facts, others: Sequence[parts.Part]) -> str:
    """Returns by what the data become inputs of the model, which is held fixed."""
    if _is_part(parts.VOCABULARY, others):
        return "the public words of the vocabulary"
    return "the vocabulary" if facts.has_vocabulary else "how inputs are made of the data"


def _counted_apart(others: Sequence[parts.Part]) -> tuple[str, ...]:
    """Returns the names of the parts that count their users besides the rounds."""
    return tuple(part.name for part in others if part.name != parts.METRICS)


def _vocabulary_assumed(facts: facts_lib.Facts, others: Sequence[parts.Part]) -> list[str]:
    if _is_part(parts.VOCABULARY, others):
        return [sentences.noised_vocabulary(facts.vocabulary_source)]
    if not facts.vocabulary_is_public:
        return []
    return [sentences.public_vocabulary(facts.vocabulary_source)]


def _breaches(
    observed: observed_lib.Participation, schema: schema_lib.MinSep, name: str
) -> list[str]:
    return [
        f"The participation broke the schema {name}: {breach}."
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
    trust = facts.trust or sentences.trust(unit_of_privacy, data_in_one_place, is_sampled=True)
    parameters: dict[str, Scalar] = {}
    if num_users is not None:
        parameters["num_users"] = validation.integer("num_users", num_users, minimum=1)
    statement = PrivacyStatement(
        mechanism=claim.mechanism,
        parameters={**parameters, **facts.parameters},
        epsilon=None if reasons else claim.epsilon,
        delta=claim.delta,
        rho_zcdp=None,
        no_guarantee=tuple(reasons),
        accounting=claim.accounting + sentences.parts_accounting(claim.others, is_sampled=True),
        declared=None,
        accounted=None,
        observed=None,
        unit_of_privacy=unit_of_privacy,
        adjacency=" ".join(
            filter(
                None,
                [
                    sentences.zero_out_when_sampled(
                        unit_of_privacy,
                        _fixed(facts, claim.others),
                        (*_counted_apart(claim.others), *claim.apart),
                    ),
                    claim.add_or_remove,
                ],
            )
        ),
        setting=trust.setting,
        output=sentences.output(unit_of_privacy, data_in_one_place),
        covered=(
            *sentences.covered(unit_of_privacy, data_in_one_place),
            *sentences.parts_covered(claim.others),
        ),
        not_covered=(
            *sentences.not_covered(
                facts.hyperparameter_tuning, unit_of_privacy, data_in_one_place, claim.others
            ),
            *_vocabulary_not_covered(facts, claim.others),
            *facts.not_covered,
        ),
        assumptions=(
            f"{claim.sampling} {claim.secrecy}",
            sentences.one_client(unit_of_privacy, data_in_one_place, facts.rows_have_owners),
            sentences.CLIPPED_AS_STATED,
            *([sentences.CLAIMED_BY_AUTHOR] if claim.claimed_by_author else []),
            sentences.CONTINUED_ONCE,
            *sentences.generator_assumed(facts),
            *_vocabulary_assumed(facts, claim.others),
        ),
        caveats=(
            *sentences.arithmetic_caveats(facts, claim.others),
            *sentences.unit_caveats(unit_of_privacy),
            *facts.caveats,
        ),
        headline_caveats=(
            *([sentences.authors_sensitivity(claim.mechanism)] if claim.claimed_by_author else []),
            *sentences.delta_caveats(claim.delta, num_users, unit_of_privacy),
            *facts.headline_caveats,
        ),
        from_whom=trust.from_whom,
        data_in_one_place=data_in_one_place,
        profile=() if reasons else claim.profile,
        parts=()
        if reasons or claim.weights is None
        else parts.costs(claim.weights, claim.mechanism, claim.others, claim.delta),
    )
    return _with_earlier_runs(statement, facts)
