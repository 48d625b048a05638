"""Privacy accounting of a task: what it has spent, whether it may go on, and its statement.

Everything follows from the signed terms and the number of commits. ε, the budget and the metrics
are those of the declared participation, which each device enforces by its own timer. The
sensitivity to one device depends on the rounds of that device alone. So other devices, however
often they take part and whatever they report of it, do not weaken the guarantee of a device that
keeps to the signed plan. In a secure sum, the content of other devices' reports can: see
`honest_devices`. The participation that devices report stands beside ε. Reports that contradict the
declaration are counted, and the statement gives the ε that they would mean if they were true. Needs
no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from tff_dpftrl import validation
from tff_dpftrl.accounting import composition, display, gaussian, guarantee
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.tasks import secure_groups, summation_sentences
from tff_dpftrl.runtime.tasks import terms as terms_lib

_HONEST_DEVICES = (
    "Each device enforces the declared participation by its own timer, which nobody wipes or sets "
    "back, and its software keeps to the signed plan. A device for which this does not hold, "
    "through its own fault or not, is not covered by ε"
)
_IN_THE_CLEAR = "; the others are."
_IN_A_SECURE_SUM = (
    ". The others are, but for those in a sum with a device that does not clip and encode as the "
    "plan says: it can make the sum wrap around, and nothing is proven of such a sum. In a secure "
    "sum nobody sees whether one does."
)
_OF_LANGUAGE = "loss and accuracy on the devices"
_NOT_COVERED = (
    "Metrics of rounds ({metrics}, numbers of devices, durations, sums of the participation "
    "histograms) and of evaluation tasks: exact figures of the devices, without noise. Do not "
    "publish them."
)
_ROUNDING = 1 + 1e-9  # Tolerance for a noise multiplier that was calibrated to the budget.
_BEFORE_THE_FIRST = participation_histograms.ObservedRounds()


def honest_devices(secure: secure_groups.SecureGroups | None) -> str:
    """Describes what devices must do for ε to hold, and who is not covered if one does not."""
    return _HONEST_DEVICES + (_IN_THE_CLEAR if secure is None else _IN_A_SECURE_SUM)


@dataclasses.dataclass(frozen=True)
class PrivacySoFar:
    """Privacy that a task has spent so far."""

    num_rounds: int
    skipped_rounds: int  # Number of them that were skipped, which ε charges like the others.
    epsilon: float | None  # ε of the committed rounds; None if there is no guarantee.
    next_epsilon: float | None  # ε with one more round; None if there is no guarantee.
    delta: float  # δ of the guarantee.
    rho_zcdp: float | None  # ρ (zCDP) of the released rounds; None if there is no guarantee.
    min_sep: int | None  # Smallest stride that devices reported; None if none took part twice.
    max_participations: int  # Largest number of rounds that a device reported.
    contradicting_reports: int  # Number of reports that contradict the declared participation.
    unknown_rounds: int  # Number of rounds whose histograms no devices could have made.
    declared_epsilon: float | None  # ε of all rounds as declared; None if there is no guarantee.
    budget_epsilon: float | None  # No round begins beyond it; None if there is no guarantee.

    def metrics(self) -> dict[str, float | int | None]:
        """Returns ε and the reported participation as columns of a round's metrics."""
        return {
            "privacy/epsilon": self.epsilon,
            "privacy/delta": self.delta,
            "privacy/rho_zcdp": self.rho_zcdp,
            "participation/min_sep": self.min_sep,
            "participation/max_participations": self.max_participations,
            "participation/contradicting_reports": self.contradicting_reports,
            "participation/unknown_rounds": self.unknown_rounds,
        }


class TaskPrivacy:
    """The accounting of one task."""

    def __init__(self, terms: terms_lib.Terms):
        """Takes the verified terms of the task."""
        self._terms = terms
        self._claim = functools.lru_cache(maxsize=64)(self._claim)

    @property
    def has_guarantee(self) -> bool:
        """Whether the task adds noise, and so has a guarantee."""
        return self._terms.noise_multiplier > 0.0 and self._terms.strategy is not None

    @functools.cached_property
    def declared_epsilon(self) -> float | None:
        """ε after all rounds, with the declared participation; None without a guarantee."""
        return self._claim(self._terms.schema).epsilon if self.has_guarantee else None

    @property
    def budget_epsilon(self) -> float | None:
        """ε that no round may bring the total above; None if there is no guarantee."""
        if not self.has_guarantee or self._terms.max_epsilon is None:
            return self.declared_epsilon
        return self._terms.max_epsilon

    def so_far(self, seen: participation_histograms.ObservedRounds) -> PrivacySoFar:
        """Computes what the committed rounds have spent with the declared participation."""
        epsilon, rho = (0.0, 0.0) if self.has_guarantee else (None, None)
        following = None
        if seen.num_rounds and self.has_guarantee:
            claim = self._claim(self._declared(seen.num_rounds))
            epsilon, rho = _finite(claim.epsilon), _finite(claim.rho_zcdp)
        if self.has_guarantee:
            more = min(seen.num_rounds + 1, self._terms.schema.num_rounds)
            following = _finite(self._claim(self._declared(more)).epsilon)
        return PrivacySoFar(
            num_rounds=seen.num_rounds,
            skipped_rounds=seen.skipped_rounds,
            epsilon=epsilon,
            next_epsilon=following,
            delta=self._terms.delta,
            rho_zcdp=rho,
            min_sep=seen.min_sep,
            max_participations=seen.max_participations,
            contradicting_reports=seen.contradicting_reports,
            unknown_rounds=seen.unknown_rounds,
            declared_epsilon=self.declared_epsilon,
            budget_epsilon=self.budget_epsilon,
        )

    def refusal(self, seen: participation_histograms.ObservedRounds) -> str | None:
        """Returns why no further round may begin, for the operator; None if one may."""
        declared = self._terms.schema
        if seen.num_rounds >= declared.num_rounds:
            return f"all {declared.num_rounds} declared rounds are done"
        budget = self._terms.max_epsilon
        if not self.has_guarantee or budget is None:
            return None  # The budget is the ε of the declared rounds.
        epsilon = self._claim(self._declared(seen.num_rounds + 1)).epsilon
        if epsilon <= budget * _ROUNDING:
            return None
        return (
            f"round {seen.num_rounds + 1} would bring ε to {display.round_up(epsilon)}, above the "
            f"budget of {display.round_up(budget)} at δ = {display.delta(self._terms.delta)}"
        )

    def statement(
        self,
        seen: participation_histograms.ObservedRounds,
        *,
        others: Mapping[str, float | None] | None = None,
    ) -> statement_lib.PrivacyStatement:
        """Makes the privacy statement of the committed rounds.

        Unless the task is over, it charges all rounds that the task may still have, since whoever
        ends a task early has seen its results. `others` are ρ that the other training tasks of the
        population have spent so far, None for one without guarantee.
        """
        terms = self._terms
        if terms.kind == "evaluation":
            raise validation.UsageError(
                f"The task {terms.task!r} evaluates only: its metrics have no noise, and no "
                "privacy statement."
            )
        if seen.num_rounds == seen.skipped_rounds:
            raise validation.UsageError(
                f"The task {terms.task!r} has released no round: nothing to state."
            )
        return self._stated(seen, self._charged_rounds(seen), others or {})

    def headline_caveats(
        self, seen: participation_histograms.ObservedRounds = _BEFORE_THE_FIRST
    ) -> tuple[str, ...]:
        """Returns the caveats without which nobody should quote ε.

        They are those of the committed rounds, or of all rounds if none is committed, but for the
        one on other tasks of the population. Reports that contradict the declared participation are
        among them. Empty if there is no guarantee.
        """
        if not self.has_guarantee:
            return ()
        return self._stated(
            seen, seen.num_rounds or self._terms.schema.num_rounds, {}
        ).headline_caveats

    def _stated(
        self,
        seen: participation_histograms.ObservedRounds,
        charged: int,
        others: Mapping[str, float | None],
    ) -> statement_lib.PrivacyStatement:
        terms = self._terms
        claim = self._claim(self._declared(charged))
        if terms.strategy is None:
            claim = dataclasses.replace(claim, mechanism="none", clip_norm=None)
        statement = statement_lib.dp_ftrl_statement(
            claim,
            facts_lib.Facts(
                parameters={
                    "population": terms.population,
                    "task": terms.task,
                    "data": terms.data,
                    "num_rounds_done": seen.num_rounds,
                    "num_rounds_charged": charged,
                    "num_rounds_skipped": seen.skipped_rounds,
                    "contradicting_reports": seen.contradicting_reports,
                    "contradicting_rounds": seen.contradicting_rounds,
                    "unknown_rounds": seen.unknown_rounds,
                    "server_plan_sha256": terms.server_plan,
                    **({"initial_clip_norm": terms.clip_norm} if terms.adaptive_clipping else {}),
                    **self._secure_parameters(),
                    **terms.parameters,
                },
                vocabulary_source=terms.vocabulary_source,
                vocabulary_is_public=(
                    None if terms.vocabulary_source is None else terms.vocabulary_is_public
                ),
                not_covered=(
                    *self._initial_weights(),
                    _NOT_COVERED.format(
                        metrics=terms.parameters.get(terms_lib.METRICS, _OF_LANGUAGE)
                    ),
                    *self._order_statistics(),
                ),
                headline_caveats=(
                    *self._contradictions(seen, charged),
                    *self._headline_caveats(claim, others),
                ),
                earlier_runs=terms.earlier_runs,
                trust=summation_sentences.trust(terms.secure_aggregation),
            ),
            unit_of_privacy="device",
            num_users=terms.num_devices,
            declared=terms.schema,
        )
        besides = (honest_devices(terms.secure_aggregation), sentences.REPORTED_BY_DEVICES)
        return dataclasses.replace(
            statement,
            observed=seen.participation(),  # Beside the claim, which does not rest on it.
            assumptions=(*statement.assumptions, *besides),
        )

    def _contradictions(
        self, seen: participation_histograms.ObservedRounds, num_rounds: int
    ) -> tuple[str, ...]:
        """Describes reports that contradict the declaration, with the ε that they would mean."""
        if not self.has_guarantee:
            return ()
        declared, texts = self._terms.schema, []
        stride = min(declared.min_sep, seen.min_sep or declared.min_sep)
        most = max(declared.max_participations, seen.max_participations)
        if (stride, most) != (declared.min_sep, declared.max_participations):
            reports = "Reports of a number that is not known"  # Earlier versions did not count.
            if seen.contradicting_reports:
                reports = (
                    f"{strategy_lib.counted(seen.contradicting_reports, 'report')} in "
                    f"{strategy_lib.counted(seen.contradicting_rounds, 'round')}"
                )
            breaches = "; ".join(map(str, seen.participation().breaches(declared)))
            epsilon = self._claim(schema_lib.MinSep(num_rounds, stride, most)).epsilon
            texts.append(
                f"Devices contradict the declared participation ({breaches}): {reports}. Software "
                "that keeps to the plan sends none, so ε is of the declared participation. If "
                f"these reports were true, ε would be {display.round_up(epsilon)} for the devices "
                "that sent them."
            )
        if seen.unknown_rounds:
            most += seen.unknown_rounds
            epsilon = self._claim(schema_lib.MinSep(num_rounds, 1, most)).epsilon
            rounds = strategy_lib.counted(seen.unknown_rounds, "round")
            texts.append(
                f"The participation histograms of {rounds} add up to what no devices can report: "
                "they show nothing of who took part. ε is of the declared participation. At worst, "
                "for a device that took part in all of these rounds, ε would be "
                f"{display.round_up(epsilon)}."
            )
        return tuple(texts)

    def _secure_parameters(self) -> dict[str, str | int | float]:
        secure = self._terms.secure_aggregation
        if secure is None:
            return {}
        parameters = {
            "secure_aggregation": secure.threat_model,
            "secure_least_group": secure.least_group,
            "secure_threshold": secure.threshold,
            "secure_neighbours": secure.neighbours,
            "noise_parties": len(secure.noise_parties) or None,
        }
        return {name: value for name, value in parameters.items() if value is not None}

    def _charged_rounds(self, seen: participation_histograms.ObservedRounds) -> int:
        """Returns the rounds that were run if the task is over, or else the most it may have."""
        done, most = seen.num_rounds, self._terms.schema.num_rounds
        if self.refusal(seen) is not None:
            return done
        budget = self.budget_epsilon
        if budget is None:  # Without a guarantee.
            return most
        while done < most:  # The most rounds that the budget pays for.
            middle = (done + most + 1) // 2
            epsilon = self._claim(self._declared(middle)).epsilon
            if epsilon <= budget * _ROUNDING:
                done = middle
            else:
                most = middle - 1
        return done

    def _declared(self, num_rounds: int) -> schema_lib.MinSep:
        """Returns the declared participation in a number of rounds."""
        return dataclasses.replace(self._terms.schema, num_rounds=num_rounds)

    def _claim(self, schema: schema_lib.MinSep) -> guarantee.Guarantee:
        terms = self._terms
        return guarantee.dp_ftrl_guarantee(
            identity.Identity() if terms.strategy is None else terms.strategy,
            noise_multiplier=terms.noise_multiplier,
            schema=schema,
            delta=terms.delta,
            clip_norm=None if terms.adaptive_clipping else terms.clip_norm,
            adaptive_clipping=terms.adaptive_clipping,
        )

    def _headline_caveats(
        self, claim: guarantee.Guarantee, others: Mapping[str, float | None]
    ) -> Sequence[str]:
        caveats = []
        if not self._terms.vocabulary_is_public:
            is_noised = self._terms.vocabulary_is_noised
            caveats = [sentences.NOISED_ELSEWHERE if is_noised else sentences.PRIVATE_VOCABULARY]
        is_unknown = (
            self._terms.initial_weights_source and not self._terms.initial_weights_are_public
        )
        if is_unknown and not self._terms.earlier_runs:  # The statement counts those.
            caveats.append(sentences.INITIAL_WEIGHTS)
        if others:
            caveats.append(_composed(claim, others))
        return caveats

    def _order_statistics(self) -> tuple[str, ...]:
        of = self._terms.parameters.get(terms_lib.ORDER_STATISTICS)
        if of is None:
            return ()
        return (
            f"Order statistics of rounds (p10, median and p90 over the devices of {of}), and the "
            "histograms that they are read from: exact figures, without noise. Each is the value "
            "of one device, up to the width of a bucket. Do not publish them.",
        )

    def _initial_weights(self) -> tuple[str, ...]:
        source = self._terms.initial_weights_source
        return (
            () if source is None else (f"Text that the initial weights were trained on: {source}.",)
        )


def _composed(claim: guarantee.Guarantee, others: Mapping[str, float | None]) -> str:
    names = ", ".join(sorted(others))
    text = f"{sentences.OTHER_TASKS}{names}. "
    spent = [rho for rho in others.values() if rho is not None]
    if len(spent) < len(others) or math.isinf(claim.rho_zcdp):
        return f"{text}Not all of these have a guarantee: {composition.NOTHING_TOGETHER}"
    rho = claim.rho_zcdp + sum(spent)
    epsilon = gaussian.epsilon(gaussian.mu_from_rho(rho), claim.delta)
    return text + (
        f"For all of them together, so far, {display.epsilon_at(epsilon, claim.delta)}, "
        f"ρ-zCDP {display.round_up(rho)}."
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
