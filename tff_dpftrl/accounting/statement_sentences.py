"""Sentences of the privacy statements.

Each sentence must be true of every run whose statement carries it, and say no more
than is proven. A unit is "user", "device" or "example": neighbouring data sets differ in one of
them. Whoever takes part is called by the unit throughout a statement.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from tff_dpftrl.accounting import defaults, display, parts
from tff_dpftrl.accounting import facts as facts_lib

_MANY = 0.1  # Users whose data may be published, in expectation, without a caveat: δ times them.

FLOATING_POINT = (
    "The proof is about ideal Gaussians on real numbers. The noise comes from a pseudo-random "
    "generator and floating-point arithmetic, whose gaps are not accounted for (Mironov 2012)."
)
NOISE_GENERATOR = "noise_generator"
"""Name of the parameter that says which generator drew the noise, if it was not Philox."""
SECURE_AND_EXACT = "AES-256 in counter mode; Gaussians rounded and added without error"
SECURE_AND_CORRELATED = (
    "AES-256 in counter mode; Gaussians rounded without error, correlated in float64"
)
SECURE_OF_PARTIES = (
    "AES-256 in counter mode; Gaussians rounded without error, rotated in float64 by noise parties"
)
SECURE_GENERATOR = (
    "The noise comes from AES-256 in counter mode, which nobody without its key can tell from "
    "random bits."
)
ROUNDED_CORRELATION = (
    "The proof is about noise that is correlated over the rounds without error. Here it is "
    "correlated in float64 and rounded to multiples of 2^-32 of its standard deviation: what that "
    "adds to epsilon, at most what 0.001 standard deviations do for 4 million weights, 2,000 "
    "rounds and a strategy's matrix of norm 40, is not accounted for."
)
ROUNDED_BY_PARTIES = (
    "The proof is about noise without errors. Here each noise party computes and rotates its noise "
    "in float64, and rounds it to the grid of the sum: what these errors add to epsilon is not "
    "accounted for."
)
OTHER_GENERATORS = (
    "The noise of other parts than the weights comes from other generators than AES-256, and from "
    "floating-point arithmetic, whose gaps are not accounted for (Mironov 2012)."
)
NO_NOISE = "No noise was added (noise_multiplier is 0)."
TOO_LITTLE_NOISE = "No noise was added, or too little for any finite epsilon."
KNOWN_SEED = (
    "The noise was drawn from a seed given by the user: whoever knows or guesses it can subtract "
    "the noise."
)
PRIVATE_VOCABULARY = (
    "The words of the vocabulary were counted on protected users without noise: which words the "
    "model knows is not covered."
)
NOISED_ELSEWHERE = (
    "Words of the vocabulary were counted with noise on users whom another run protects: its "
    "statement covers which words these are, and what both say of the same people adds up."
)
OTHER_TASKS = "The devices also take part in the training of: "
"""Beginning of a sentence on the other tasks of a population."""
INITIAL_WEIGHTS = (
    "The initial weights are of a model that may have been trained on the same people: what it "
    "tells of them comes on top of epsilon."
)
CHOICE_AMONG_RUNS = (
    "Every epsilon is that of one run by itself: choosing among runs by their accuracy on held-out "
    "users is not covered by any of them, and whoever sees several runs on the same people learns "
    "more than one epsilon says."
)
ONE_OF_A_CHOICE = (
    "Nothing of this run is to be published: it is one of the runs that sweep --select chooses "
    "among, and the epsilon of the choice covers only what is released in winner/."
)
"""Headline caveat of each run of `sweep --select`; the statement of the chosen one is without."""
EXPECTED_RUNS = "selection_expected_runs"
"""Name of the parameter that the statement of a run chosen by `sweep --select` has alone."""
NO_SAMPLING = "It is not assumed that who takes part is sampled at random."
SECRET_SAMPLING = "The samples are drawn independently, by a secret generator, and stay secret."
CONTINUED_ONCE = (
    "No state of the run is continued twice, as by a restored backup or a copied folder: what both "
    "then release is not counted here."
)
CLIPPED_BY_CALLER = (
    "Code outside this package clips and sums, and adds the noise of each round to the sum of that "
    "round and to no other: nothing here has checked it."
)
CLAIMED_BY_AUTHOR = (
    "The mechanism is not one of tff_dpftrl: its sensitivity, and that its noise is of its matrix, "
    "are claims of its author. tff_dpftrl.check_strategy can refute them, and proves nothing."
)
REPORTED_BY_DEVICES = (
    "The server keeps no list of devices, and cannot check their timers. The observed "
    "participation is what devices report: a report can be false, and can hide another one where "
    "reports are summed securely."
)
MATRIX_ACCOUNTING = (
    "All rounds together are one Gaussian mechanism with μ = S · clip_norm_inflation / z, hence "
    "ρ-zCDP with ρ = μ² / 2. Its (ε, δ) is exact (Balle & Wang 2018)."
)
CLIPPED_AS_STATED = "The L2 norm of what is summed is clipped as the parameters say."
VOCABULARY = "Choice of the vocabulary"
FROM_OTHERS = (
    "The protection is from everybody who sees what is released, however much they know of others."
)
FROM_WHOM_UNKNOWN = f"{FROM_OTHERS} What the server sees is said below, under Trust."


def noise_generator(is_sum_of_draws: bool, of_parties: bool = False) -> str:
    """Returns the value of the parameter `NOISE_GENERATOR` of secure noise."""
    if of_parties:
        return SECURE_OF_PARTIES
    return SECURE_AND_EXACT if is_sum_of_draws else SECURE_AND_CORRELATED


def generator_assumed(facts: facts_lib.Facts) -> tuple[str, ...]:
    """Returns the assumption on the generator of secure noise."""
    return (SECURE_GENERATOR,) if NOISE_GENERATOR in facts.parameters else ()


def arithmetic_caveats(
    facts: facts_lib.Facts, others: Sequence[parts.Part] = ()
) -> tuple[str, ...]:
    """Returns the caveats on how noise is drawn and added."""
    generator = facts.parameters.get(NOISE_GENERATOR)
    if generator is None:
        return (FLOATING_POINT,)
    is_noised = any(part.rho_zcdp or part.noise_multiplier_of_round is not None for part in others)
    rounded = {SECURE_AND_EXACT: (), SECURE_OF_PARTIES: (ROUNDED_BY_PARTIES,)}
    return (
        *rounded.get(str(generator), (ROUNDED_CORRELATION,)),
        *((OTHER_GENERATORS,) if is_noised else ()),
    )


def trust(unit: str, in_one_place: bool, is_sampled: bool = False) -> facts_lib.Trust:
    """Returns the trust model of a run without secure sums; `is_sampled` in secret."""
    if in_one_place:
        return facts_lib.Trust(
            "Central differential privacy, with all data in one place: whoever computes is trusted "
            "to run the mechanism as it is written, to keep secret the data, which of it is used, "
            "the sums before noise is added, and the noise with its seed and state.",
            f"{FROM_OTHERS} Whoever runs the training is not among these: they hold all data, and "
            "are trusted to keep it secret.",
        )
    drawn = "who is drawn for which round, " if is_sampled else ""
    others = (
        " Nor is the protection from anyone who learns in which rounds you took part, such as "
        "your network provider: the odds below do not apply to them."
    )
    return facts_lib.Trust(
        "Central differential privacy: the server is trusted to run the mechanism as it is "
        f"written, to keep secret {drawn}what {unit}s send, the sums before noise is added, and "
        "the noise with its seed and state, and to erase them.",
        f"{FROM_OTHERS} The server is not among these: it sees what each {unit} sends, and is "
        f"trusted to keep it secret.{others if is_sampled else ''}",
    )


def output(unit: str, in_one_place: bool) -> str:
    """Returns what is released."""
    sent = "" if in_one_place else f" (those sent to {unit}s included)"
    return (
        "All noised sums, and what is computed from them without looking at the data again: every "
        f"intermediate model and the final one{sent}."
    )


def zero_out(unit: str, adaptive_clipping: bool, fixed: str, apart: Sequence[str] = ()) -> str:
    """Returns the adjacency of a matrix mechanism.

    `fixed` says by what the data become inputs of the model; `apart` names the parts that count
    their users besides the rounds.
    """
    zeroed = (
        ", the clipped update and the shifted bit that says whether its norm was below the "
        "estimate,"
        if adaptive_clipping
        else ""
    )
    return (
        f"Zero-out: neighbouring data sets differ in one {unit} only, whose contributions{zeroed} "
        f"are replaced by zeros in every round{''.join(f' and in the {name}' for name in apart)} "
        "(Kairouz et al. 2021, Definition 1.1). Held fixed "
        f"are the number of {unit}s, which of them take part in which round, {fixed}, and "
        "every seed but that of the noise: nothing is said about data sets that differ in these."
    )


def zero_out_when_sampled(unit: str, fixed: str, apart: Sequence[str] = ()) -> str:
    """Returns the adjacency of a mechanism with secret sampling; arguments as of `zero_out`."""
    always = "".join(f", and in the {name}, for which nobody is sampled" for name in apart)
    return (
        f"Zero-out: neighbouring data sets differ in one {unit} only, whose contributions are "
        f"replaced by zeros whenever they are sampled{always}; ε is the larger one of both "
        f"directions. Held fixed are the number of {unit}s and the way in which samples are drawn, "
        f"hence the sampling probability, {fixed}, and every seed but those of noise and "
        "sampling: nothing is said about data sets that differ in these."
    )


def drawn_in_one_place(unit: str) -> str:
    """Returns who draws samples that are not drawn for each round anew."""
    return (
        f"One party, which holds the data of every {unit}, draws the samples. This guarantee would "
        f"not hold for {unit}s in the field: they come when they like, so nobody could draw such "
        "samples of them."
    )


def secret_seed(unit: str) -> str:
    """Returns the assumption on the seed of samples that are not drawn for each round anew."""
    return (
        f"The samples of each {unit} are drawn independently of all other {unit}s and of all data. "
        "Their seed stays secret, and so do the samples."
    )


def add_or_remove(unit: str, what: str) -> str:
    """Returns what a run with a fixed denominator guarantees if units come or go."""
    return (
        f"Beyond that, the same ε holds between data with a {unit} and data without, if the number "
        f"of {what}, from which sampling and denominator follow, counts as known: every {unit} is "
        "sampled independently of all others."
    )


def covered(unit: str, in_one_place: bool = False) -> tuple[str, ...]:
    """Returns the accesses to data that the guarantee covers."""
    which = "" if in_one_place else " that follows the algorithm"
    return (f"What the noised sums say about the training data of one {unit}{which}.",)


def not_covered(
    tuning: str | None,
    unit: str,
    in_one_place: bool = False,
    others: Sequence[parts.Part] = (),
) -> tuple[str, ...]:
    """Returns the accesses to data that a run's guarantee does not cover, whatever its weights."""
    figures = "Metrics, held-out evaluation"
    if any(part.name in (parts.METRICS, parts.EVALUATION) for part in others):
        figures = "Other metrics than those above, other evaluation"
    return (
        *(() if in_one_place else (f"{unit.capitalize()}s that do not follow the algorithm.",)),
        f"{figures} and A/B tests, and what is decided by them, like the choice of a checkpoint.",
        f"Tuning of hyperparameters: {tuning or 'not recorded'}.",
    )


def vocabulary_choice(source: str | None) -> str:
    """Returns the part that is not covered if the words are not of public text."""
    return f"{VOCABULARY}: {source or 'not recorded'}."


def public_vocabulary(source: str | None) -> str:
    """Returns the assumption if the words are of public text."""
    return f"The vocabulary is of public text: {source or 'not recorded'}."


def noised_vocabulary(source: str | None) -> str:
    """Returns the assumption if words of the vocabulary were counted with noise, within ε."""
    return (
        "How text is split into words is public, and so are the words of the vocabulary that were "
        f"not counted with noise. The source of all words: {source or 'not recorded'}."
    )


def schema_kept(unit: str, recorded: bool) -> str:
    """Returns the assumption on participation."""
    record = ", and the record of participation is complete and true" if recorded else ""
    return f"Every {unit} keeps to the participation schema accounted for{record}."


def one_client(unit: str, in_one_place: bool = False, has_owners: bool = False) -> str:
    """Returns the assumption that nobody stands under the name of another, or under several."""
    if has_owners:
        return f"Every row names all {unit}s whose data stands in it, and each {unit} has one name."
    if unit == "example":
        return "Every example stands in the data once."
    if in_one_place:
        return f"All data of one {unit} is under one name, and no data of another {unit} is there."
    return (
        f"No {unit} takes part as several {unit}s, and no data of a {unit} is used by another "
        f"{unit}."
    )


def norm_bound(unit: str, adaptive_clipping: bool) -> str:
    """Returns the assumption on the norm of a contribution."""
    which = "the clip norm that the round uses" if adaptive_clipping else "the clip norm"
    return (
        f"The L2 norm of one {unit}'s contribution to a round is at most {which} (times "
        "clip_norm_inflation), or, where contributions are encoded before they are summed, the "
        "larger norm that noise_multiplier is relative to."
    )


def authors_sensitivity(mechanism: str) -> str:
    """Returns the caveat beside an ε of a mechanism that is not of this package."""
    return (
        f"ε follows from a sensitivity that the author of the mechanism {mechanism!r} claims: see "
        "the assumptions."
    )


def parts_accounting(others: Sequence[parts.Part], *, is_sampled: bool = False) -> str:
    """Returns how ε of the weights and of other parts is computed, to follow on the former."""
    if not others:
        return ""
    text = " ε is of all parts together: squared μ of Gaussian mechanisms add up (Dong et al. 2022)"
    if is_sampled:
        text += (
            ", and their loss is convolved with that of the rounds (Zhu, Dong & Wang 2022) or, "
            "where of the rounds ε alone is known, their ε at a tenth of δ is added"
        )
    if any(part.noise_multiplier_of_round is not None for part in others):
        text += "; a figure of each round is one Gaussian vector with its update"
    if any(part.name == parts.EVALUATION for part in others):
        text += (
            "; the evaluation is of users who never train, none of whom is in another part, and ε "
            "is the larger one of theirs and that of the others"
        )
    if any(part.delta for part in others):
        text += "; δ of parts is taken from δ first"
    if any(part.epsilon for part in others):
        text += "; ε without a δ is added"
    return f"{text}."


def parts_covered(others: Sequence[parts.Part]) -> tuple[str, ...]:
    """Returns the accesses to data by all that is released besides the weights."""
    return tuple(f"{part.name.capitalize()}: {part.says}." for part in others)


def refuted(entry: str) -> str:
    """Returns the caveat beside an ε that an audit found cannot be true."""
    return f"An audit has refuted this claim, so nobody should rely on it: {entry}."


def unit_caveats(unit: str) -> tuple[str, ...]:
    """Returns caveats on the meaning of the unit of privacy."""
    if unit == "user":
        return ()
    return (
        f"A person with several {unit}s is protected less: by group privacy over those {unit}s.",
    )


def delta_caveats(delta: float, num_users: int | None, unit: str) -> tuple[str, ...]:
    """Returns `large_delta`; warns if the number of users proves that δ protects nobody."""
    if num_users is not None and _protects_nobody(delta, num_users):
        warnings.warn(
            f"delta={delta:g} is not below 1 / {num_users}, one over the number of {unit}s, and "
            f"protects nobody for certain: choose one far below {1.0 / num_users:.2g}.",
            stacklevel=3,
        )
    return large_delta(delta, num_users, unit)


def _protects_nobody(delta: float, num_users: int) -> bool:
    return delta * num_users >= 1.0 - 1e-9  # However a delta of 1 / num_users was rounded.


def large_delta(delta: float, num_users: int | None, unit: str) -> tuple[str, ...]:
    """Returns why a delta is too large, for statements and for the start of a run.

    It is one sentence if delta times the number of users is above 0.1, or if delta is large and
    `num_users` unknown.
    """
    shown = display.delta(delta)
    allows = "publishing all data of one drawn at random would meet this δ, with ε = 0"
    if num_users is None:
        if delta <= defaults.LARGE_DELTA:
            return ()
        return (
            f"δ = {shown} is large and the number of {unit}s is not recorded: with "
            f"{math.ceil(1.0 / delta)} {unit}s or more, {allows}.",
        )
    if _protects_nobody(delta, num_users):
        return (f"δ = {shown} is not below 1 / {num_users}, one over the {unit}s: {allows}.",)
    expected = delta * num_users
    if expected <= _MANY:
        return ()
    somebody = -math.expm1(num_users * math.log1p(-delta))
    return (
        f"δ = {shown} times the {num_users} {unit}s is {display.round_up(expected, 2)}: "
        "publishing all data of each with probability δ would meet this δ, with ε = 0, and "
        f"publishes somebody's with probability {display.round_up(somebody, 2)}. Choose a δ below "
        f"{display.round_down(_MANY / num_users, 1)}.",
    )
