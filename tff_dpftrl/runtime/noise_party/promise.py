"""Promise of a noise party: read from the signed plan and terms of a task, and checked.

The maker of the task, whose key the party was given, has signed plan and terms. They state the
distribution of the noise, its grid, and the sums that it is added to. The broadcast of an attempt
has the rotation of its round, and the clip norm where that is learned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import statement_sentences
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import noise_split
from tff_dpftrl.private_round import adaptive_clipping, clipping, fixed_clip, party_noise
from tff_dpftrl.runtime.noise_party import ledger as ledger_lib
from tff_dpftrl.runtime.plans import secure_report, tensor_values
from tff_dpftrl.runtime.tasks import task_folder
from tff_dpftrl.secure_sums import vectors

_NUM_FIRST = 3  # Number of segments of a report before those of its update.
_TRAINABLE = "trainable/"
_ACTIVE = "active"  # Last part of the label of the clip norm in a broadcast.


class PromiseRefusedError(validation.UsageError):
    """Raised for a task for which this party gives no noise; the message says why."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """Inputs of the noise of an attempt, besides its round."""

    round_seed: np.ndarray  # Public seed of the round's rotation, int64, shape [2].
    clip_norm: float | None  # L2 norm that devices clip to; None if it is fixed.


class Promise:
    """The noise that a party has promised for one task."""

    def __init__(self, task: task_folder.TaskFolder, party: bytes):
        """Checks plan and terms of a task that was read with the trusted keys of its signers.

        It raises `PromiseRefusedError` if the task does not ask for the noise of `party` (a raw
        public key), plan and terms contradict each other, or the grid has no room for the noise.
        """
        self.task = task
        self._plan, terms = task.server, task.terms
        try:
            self.parameters = secure_report.parameters_of(self._plan)
        except secure_report.PlanNotSecureError as error:
            raise PromiseRefusedError(
                f"The task {task.name!r} has no noise party: {error}"
            ) from None
        if party not in self.parameters.noise_parties:
            promised = ", ".join(key.hex()[:16] for key in self.parameters.noise_parties)
            raise PromiseRefusedError(
                f"The task {task.name!r} promises devices the noise of {promised or 'no party'}, "
                f"and not of {party.hex()[:16]}: give the folder with the key that the task was "
                "made with (task new --noise-party)."
            )
        if terms.strategy is None or terms.noise_multiplier == 0:
            raise PromiseRefusedError(f"The task {task.name!r} has no noise.")
        if not self._plan.HasField("party_noise"):
            raise self._contradiction("the plan names noise parties, and does not say their noise")
        self._asked = self._plan.party_noise
        self.num_rounds = terms.schema.num_rounds
        labels = [tensor.label for tensor in self._plan.update]
        self._vector = self._place(labels, self._asked.vector)
        self._count = self._place(labels, self._asked.count) if self._asked.count else None
        if (self._count is not None) != terms.adaptive_clipping:
            raise self._contradiction("the clip norm is learned in one of them only")
        shapes = [
            list(weight.shape)
            for weight in self._plan.get_weights.outputs
            if weight.label.startswith(_TRAINABLE)
        ]
        try:
            multiplier = terms.noise_multiplier
            if self._count is not None:
                multiplier = noise_split.update_noise_multiplier(
                    multiplier, self._asked.count_stddev
                )
            dim = sum(tensor_values.num_entries(shape) for shape in shapes)
            self.encoding = grid.GridEncoding(
                dim,
                self._plan.secure_aggregation.most_devices,
                self._asked.scaled_clip_norm,
                self._asked.rejection_bound,
                noise_ratio=self._asked.noise_ratio,
            )
            self.noise = party_noise.PartyNoise(self._round(), shapes, self.encoding)
        except validation.UsageError as error:
            raise self._contradiction(f"{error}") from None
        self._check_grid()
        self._check_room(multiplier)

    def attempt(self, broadcast: bytes) -> Attempt:
        """Reads what the noise of an attempt depends on from its untrusted broadcast.

        It raises `NoiseRefusedError` for tensors that are not the plan's, or a clip norm that is no
        positive number.
        """
        tensors = self._plan.prepare.outputs
        try:
            values = tensor_values.from_bytes(broadcast, tensors, "The model")
        except tensor_values.ValuesError as error:
            raise ledger_lib.NoiseRefusedError(f"{error}") from None
        by_label = {tensor.label: value for tensor, value in zip(tensors, values, strict=True)}
        clip_norm = None
        if self._clip_label is not None:
            clip_norm = float(by_label[self._clip_label])
            if not 0 < clip_norm < math.inf:
                raise ledger_lib.NoiseRefusedError(f"devices are to clip to {clip_norm:g}.")
        return Attempt(by_label[self._asked.round_seed].copy(), clip_norm)

    def check_clip_norm(
        self, row: int, clip_norm: float | None, last: ledger_lib.Given | None
    ) -> None:
        """Refuses a clip norm that breaks its schedule: it changes at restarts of the noise only.

        `last` is the noise that was given last; `clip_norm` is None if it is fixed.
        """
        if clip_norm is None:
            return
        start = self.noise.block_start(row)
        expected = last.clip_norm if last is not None and last.row >= start else None
        if start == 0:
            expected = float(np.float32(self.task.terms.clip_norm))
        if expected is not None and clip_norm != expected:
            raise ledger_lib.NoiseRefusedError(
                f"devices of round {row} are to clip to {clip_norm:g}, and the noise since round "
                f"{start} is for {expected:g}."
            )

    def vector(self, integers: np.ndarray, count: int) -> vectors.Vector:
        """Makes the vector that the party adds to a sum, in the layout of `parameters`.

        It has no device, no participation and no metrics. `integers` are the noise of the encoded
        update in [0, `encoding.sum_modulus`), shape [encoding.padded_dim]; `count` is added to the
        doubled count of unclipped devices.
        """
        layout = self.parameters.layout
        made = vectors.zeros(layout)
        place = _NUM_FIRST + self._vector
        made[place] = integers.astype(made[place].dtype)
        if self._count is not None:
            place = _NUM_FIRST + self._count
            made[place][:] = count % layout[place].modulus
        return made

    def describe(self) -> str:
        """Describes the noise in a line."""
        terms, sums = self.task.terms, self.parameters
        clip_norm = "learned" if self._count is not None else f"{terms.clip_norm:g}"
        return (
            f"{terms.strategy.name}, z = {terms.noise_multiplier:.6g}, clip norm {clip_norm}, "
            f"{self.num_rounds} rounds, {self.encoding.dim} weights, sums of {sums.least_devices} "
            f"to {sums.most_devices} devices"
        )

    @property
    def _clip_label(self) -> str | None:
        if self._count is None:
            return None
        labels = [tensor.label for tensor in self._plan.prepare.outputs]
        return next(label for label in labels if label.rpartition("/")[2] == _ACTIVE)

    def _round(self) -> fixed_clip.FixedClipRound | adaptive_clipping.AdaptiveClipRound:
        """Returns the mechanism that the terms state."""
        terms = self.task.terms
        common = {
            "noise_multiplier": terms.noise_multiplier,
            "clients_per_round": terms.parameters["clients_per_round"],
            "secure_noise": statement_sentences.NOISE_GENERATOR in terms.parameters,
        }
        if self._count is None:
            return fixed_clip.FixedClipRound(
                terms.strategy,
                clipping=clipping.FlatClipping(terms.clip_norm),
                encoded_norm=self.encoding.inflated_clip_norm(terms.clip_norm),
                **common,
            )
        return adaptive_clipping.AdaptiveClipRound(
            terms.strategy,
            clipping=adaptive_clipping.AdaptiveClipping(
                initial_clip_norm=terms.clip_norm, clipped_count_stddev=self._asked.count_stddev
            ),
            unit_inflation=self.encoding.inflation,
            **common,
        )

    def _check_grid(self) -> None:
        """Refuses a plan whose devices encode on another grid than it says, or than the terms."""
        encoding, segment = self.encoding, self.parameters.layout[_NUM_FIRST + self._vector]
        if (segment.size, segment.modulus) != (encoding.padded_dim, encoding.sum_modulus):
            raise self._contradiction(
                f"devices sum {segment.size} integers modulo {segment.modulus}, and the grid of "
                f"the noise has {encoding.padded_dim} modulo {encoding.sum_modulus}"
            )
        bounds = [b for b in self._plan.report_bounds if list(b.tensors) == [self._vector]]
        norms = [(b.norm.largest, b.norm.centre) for b in bounds if b.HasField("norm")]
        expected = (math.sqrt(encoding.max_squared_norm), float(encoding.max_coordinate))
        if norms != [expected]:
            raise self._contradiction(
                f"reports are bounded by {norms} (norm and shift), and the grid by {expected}"
            )
        inflation = self.task.terms.parameters.get("secagg_norm_inflation")
        if inflation != encoding.inflation:
            raise self._contradiction(
                f"the terms charge a norm inflated by {inflation}, and the grid's is "
                f"{encoding.inflation}"
            )
        labels = [tensor.label.rpartition("/")[2] for tensor in self._plan.prepare.outputs]
        if self._count is not None and labels.count(_ACTIVE) != 1:
            raise self._contradiction("devices do not get the clip norm that is learned")
        seeds = [t for t in self._plan.prepare.outputs if t.label == self._asked.round_seed]
        if [(t.dtype, list(t.shape)) for t in seeds] != [("int64", [2])]:
            raise self._contradiction(
                f"devices get no seed of the rotation named {self._asked.round_seed!r}"
            )

    def _check_room(self, update_noise_multiplier: float) -> None:
        """Refuses moduli around which the noise would wrap."""
        terms, parties = self.task.terms, len(self.parameters.noise_parties)
        needed = party_noise.noise_ratio(
            terms.strategy, update_noise_multiplier, self.num_rounds, parties
        )
        if self._asked.noise_ratio < needed * (1 - 1e-9):
            raise PromiseRefusedError(
                f"The grid of the task {self.task.name!r} has room for noise of "
                f"{self._asked.noise_ratio:.4g} clip norms on a coordinate, and its {parties} "
                f"noise parties add {needed:.4g}: make it anew, with more secagg_bits."
            )
        if self._count is not None:
            ratio = needed / update_noise_multiplier  # Ratio of a row of the strategy.
            room = self.encoding.max_clients + 10 * 2 * self._asked.count_stddev * ratio
            if 2 * room > self.parameters.layout[_NUM_FIRST + self._count].modulus:
                raise PromiseRefusedError(
                    f"The count of unclipped devices of the task {self.task.name!r} has no room "
                    "for its noise: make it anew, with a smaller clipped_count_stddev."
                )

    def _place(self, labels: Sequence[str], label: str) -> int:
        if labels.count(label) != 1:
            raise self._contradiction(f"the plan has no update {label!r} to add noise to")
        return labels.index(label)

    def _contradiction(self, what: str) -> PromiseRefusedError:
        return PromiseRefusedError(
            f"Plan and terms of the task {self.task.name!r} contradict each other: {what}. This "
            "party gives no noise for it: have the task made anew."
        )


def plan_hashes(task: task_folder.TaskFolder) -> frozenset[bytes]:
    """Returns the hashes of the devices' plans, of which a configuration names one."""
    return frozenset(plan.sha256 for plan in task.signed.devices)
