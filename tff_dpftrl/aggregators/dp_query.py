"""DP-FTRL as queries of TensorFlow Privacy (TFP), for programs that are built around a `DPQuery`.

    private_round = tff_dpftrl.build_dp_ftrl_aggregator(strategy, **options).private_round
    query = tff_dpftrl.DPFTRLAverageQuery(private_round, record_specs, schema=schema)
    aggregator = tff.aggregators.DifferentiallyPrivateFactory(query)

The clipping and the noise are those of the private round, bit by bit. `check_process` does not
recognise the computations that other libraries make of a query; pass the aggregator itself
where that matters. This module needs TFP, but not TFF.
"""

from __future__ import annotations

import collections
from typing import Any

import dp_accounting
import tensorflow as tf
import tensorflow_privacy as tfp
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import adaptive_clipping, fixed_clip

_QUIET = 1e9
"""Noise multiplier of an event that adds nothing: below 1e-9 to μ, and finite for accountants."""


class DPFTRLAverageQuery(tfp.SumAggregationDPQuery):
    """TFP query whose result is a private round's noised sum over `clients_per_round`.

    The global state is the state of the round: it is complete for resuming and, as it holds
    the seed and past noise, secret. Restarts belong to the strategy; TFP's `RestartQuery` is
    neither needed nor possible.

    Sums are float64. A record that is not finite counts as zero. The result has the dtypes of
    `record_specs`.

    **Events.** With a schema, the event of the first round is the Gaussian mechanism of the
    whole schema, with noise multiplier z / S. The events of the schema's other rounds add
    nothing (below 1e-9 to μ). So the events of a run compose to the ε of the aggregator's
    `guarantee`, and those of a run that stops early to no less. Compose all of them: later
    events alone say nothing. Every round beyond the schema is an event without privacy. So is
    every round if there is no schema, or if the seed of the noise is known.
    """

    def __init__(
        self,
        private_round: fixed_clip.FixedClipRound | adaptive_clipping.AdaptiveClipRound,
        record_specs: Any,
        *,
        schema: schema_lib.MinSep | None = None,
    ):
        """Initialises the query.

        Args:
          private_round: Mechanism of DP-FTRL: `private_round` of the factory that a
            `build_…dp_ftrl_aggregator` returns.
          record_specs: Nesting of `tf.TensorSpec`s (or arrays, or variables) with the shapes
            and dtypes of a record.
          schema: Participation schema that the clients keep to, for the events; None for
            events without privacy.

        Raises:
          ValueError: If an argument cannot be used.
        """
        if not isinstance(
            private_round, fixed_clip.FixedClipRound | adaptive_clipping.AdaptiveClipRound
        ):
            raise validation.UsageError(
                "private_round must be a FixedClipRound or an AdaptiveClipRound, got "
                f"{type(private_round).__name__}: take the attribute private_round of the factory "
                "that build_dp_ftrl_aggregator or build_adaptive_dp_ftrl_aggregator returns."
            )
        self._round: Any = private_round
        self._specs = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), record_specs
        )
        specs = tf.nest.flatten(self._specs)
        if not specs or not all(spec.shape.is_fully_defined() for spec in specs):
            raise validation.UsageError(
                f"record_specs must have tensors with static shapes, got {record_specs}."
            )
        for spec in specs:
            validation.float_dtype("record_specs", spec.dtype)
        self._shapes = [tuple(spec.shape.as_list()) for spec in specs]
        self._run = self._event_of_run(schema)

    @override
    def initial_global_state(self):
        """Returns the state before the first round, with a new seed each time it runs."""
        return self._round.initial_state(self._shapes)

    @override
    def derive_sample_params(self, global_state):
        """Returns the value that clients may see: the round's index, or its clip norms."""
        return self._round.broadcast(global_state)

    @override
    def initial_sample_state(self, template=None):
        """Returns zero sums, in float64, nested like `template` or else `record_specs`."""
        zeros = self._round.no_contribution(self._shapes)
        return self._pack(self._specs if template is None else template, zeros)

    @override
    def preprocess_record(self, params, record):
        """Clips a record to its contribution; refuses other tensors or shapes (`ValueError`)."""
        contribution, _ = self._round.clip_client(self._tensors("record", record), params)
        return self._pack(record, contribution)

    @override
    def get_noised_result(self, sample_state, global_state):
        """Returns the noised result of summed records, the state after the round and its event.

        A `ValueError` refuses sums of other tensors or shapes than `record_specs`, and a traced
        function that would have the state as a constant, as one that TFP's Keras optimizers make in
        `Model.fit`: every call would be the same round.
        """
        update, *scalars = sample_state
        totals = self._round.contribution_type(self._tensors("sample_state", update), *scalars)
        state = self._round.state_type(*global_state)
        _check_carried(state.round_index)
        new_state, average, _ = self._round.release(state, totals)
        result = [
            tf.cast(self._scaled(tensor), spec.dtype)
            for tensor, spec in zip(average, tf.nest.flatten(self._specs), strict=True)
        ]
        return (
            tf.nest.pack_sequence_as(update, result),
            new_state,
            self._event(state.round_index),
        )

    @override
    def derive_metrics(self, global_state):
        """Returns the clip norm of the next round; with adaptive clipping the estimate, too."""
        if isinstance(self._round, fixed_clip.FixedClipRound):
            norm = tf.constant(self._round.clipping.constant_norm, tf.float32)
            return collections.OrderedDict(clip_norm=norm)
        clip = self._round.state_type(*global_state).clip
        return collections.OrderedDict(clip_norm=clip.active, estimated_clip_norm=clip.estimate)

    def _scaled(self, average: tf.Tensor) -> tf.Tensor:
        """Makes the result of the noised average."""
        return average

    def _tensors(self, name: str, nested: Any) -> list[tf.Tensor]:
        """Flattens what has the tensors of `record_specs`, and no others.

        TFP broadcasts: a smaller tensor would count, after its clip, in several places of a sum.
        """
        try:
            tf.nest.assert_same_structure(nested, self._specs, check_types=False)
        except (TypeError, ValueError):
            raise validation.UsageError(
                f"{name} must be nested like record_specs, with {len(self._shapes)} tensors, got "
                f"{len(tf.nest.flatten(nested))} tensors or others: change one of the two."
            ) from None
        tensors = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(nested)]
        for tensor, shape in zip(tensors, self._shapes, strict=True):
            if not tensor.shape.is_compatible_with(shape):
                raise validation.UsageError(
                    f"{name} must have the shapes of record_specs, got {tensor.shape} in place of "
                    f"{shape}: reshape it, as sums would broadcast it beyond the clip norm."
                )
        return [
            tf.ensure_shape(tensor, shape)
            for tensor, shape in zip(tensors, self._shapes, strict=True)
        ]

    def _pack(self, structure: Any, contribution: Any) -> Any:
        """Nests the update of a contribution like a record."""
        update, *scalars = contribution
        packed = tf.nest.pack_sequence_as(structure, update)
        return self._round.contribution_type(packed, *scalars)

    def _event_of_run(self, schema: schema_lib.MinSep | None) -> tuple[float, int] | None:
        """Computes the noise multiplier of the whole run and its rounds; None without privacy."""
        multiplier = self._round.noise_multiplier
        if schema is None or multiplier == 0 or self._round.deterministic_seed is not None:
            return None
        sensitivity = self._round.strategy.sensitivity(schema).value
        return multiplier / sensitivity, schema.num_rounds

    def _event(self, round_index: tf.Tensor) -> dp_accounting.DpEvent:
        """Returns the event of a round; its noise multiplier is a number where it is known."""
        if self._run is None:
            return dp_accounting.NonPrivateDpEvent()
        of_run, num_rounds = self._run
        beyond = tf.where(round_index < num_rounds, tf.constant(_QUIET, tf.float64), 0.0)
        multiplier: Any = tf.where(
            tf.equal(round_index, 0), tf.constant(of_run, tf.float64), beyond
        )
        known = tf.get_static_value(multiplier)
        return dp_accounting.GaussianDpEvent(multiplier if known is None else float(known))


def _check_carried(round_index: Any) -> None:
    """Raises UsageError if the state is a constant of the graph that is being traced."""
    if tf.executing_eagerly() or isinstance(round_index, tf.Variable):
        return
    if not tf.is_symbolic_tensor(round_index):
        raise validation.UsageError(
            "global_state is a constant of the function that is being traced, so that every call "
            "would be the same round, without the noise of the strategy: hand the state in as an "
            "argument and return the new one, or run eagerly (Keras: compile(..., "
            "run_eagerly=True))."
        )


class DPFTRLSumQuery(DPFTRLAverageQuery):
    """TFP query whose result is a private round's noised sum.

    It is `DPFTRLAverageQuery` times `clients_per_round`, for loops and optimizers that divide
    by a number of records themselves. That number must be fixed: an exact count of the records
    is data.
    """

    @override
    def _scaled(self, average):
        return average * self._round.clients_per_round
