"""Checks of a run's internal records: options, ledger and checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import numpy as np
from scipy import stats

from tff_dpftrl.auditing import audit_report
from tff_dpftrl.auditing.recount import arithmetic, findings, records
from tff_dpftrl.auditing.recount import terms as terms_lib

GONE = "there is no private/ledger.sqlite"
_NO_ROUND = "no round was begun"
_NOISE_ERROR_RATE = 1e-3


def options(test: str, run: records.Records) -> audit_report.Finding:
    """Checks that `config.json` is what the run began with."""
    if run.manifest is None:
        return findings.skipped(test, "there is no private/manifest.json")
    parts = ["format", "noise_version", "config", "derived", "facts"]
    parts += ["versions"] if "versions" in run.manifest else []  # Earlier runs did not bind them.
    wrong = [
        f"{name} is {_short(now)} in config.json and was {_short(then)} when the run began"
        for part in parts
        for name, then, now in _differences(run.manifest.get(part), run.public.get(part), part)
    ]
    return findings.judged(test, wrong, "Both say the same of the run")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _differences(then: Any, now: Any, name: str) -> list[tuple[str, Any, Any]]:
    if not (isinstance(then, dict) and isinstance(now, dict)):
        return [] if then == now else [(name, then, now)]
    return [
        difference
        for key in sorted(then.keys() | now.keys())
        for difference in _differences(then.get(key), now.get(key), f"{name}.{key}")
    ]


def noise_multiplier(
    test: str, run: records.Records, terms: terms_lib.Terms
) -> audit_report.Finding:
    """Checks that the derived noise multiplier is the one that the options ask for."""
    if run.has_custom_model:
        return findings.skipped(
            test, "it was given in Python, and only what it came to is recorded"
        )
    asked, target = run.config.get("noise_multiplier"), run.config.get("target_epsilon")
    derived = run.derived.get("plan", run.derived)["noise_multiplier"]
    if asked is not None:
        wrong = [f"{derived!r} was derived and {asked!r} asked for"] if asked != derived else []
        return findings.judged(test, wrong, f"z = {derived!r} was asked for and derived")
    if target is None:
        wrong = [f"{derived!r} was derived without being asked for"] if derived else []
        return findings.judged(test, wrong, "No noise was asked for, and none derived")
    if run.derived.get("plan", {}).get("users_scale", 1.0) != 1.0:
        return findings.skipped(test, "it was calibrated for more users than there are")
    spent, _ = epsilon_asked_for(run, terms)
    wrong = [f"z = {derived!r} gives ε = {spent:.6g}, above the target {target!r}"]
    fine = f"z = {derived:.6g} gives ε = {spent:.6g} or more, and the target is {target!r}"
    return findings.judged(test, wrong if spent > target else [], fine)


def epsilon_asked_for(run: records.Records, terms: terms_lib.Terms) -> tuple[float, float]:
    """Computes bounds of ε of the run that the options ask for: the simulated one, if any."""
    config, derived = run.config, run.derived
    goal = config.get("simulate_report_goal")
    if terms.sampling is not None:
        asked = dataclasses.replace(
            terms,
            sampling=derived["sampling"],
            probability=derived["sampling"].get("sampling_probability", 1.0),
            noise_multiplier=derived["noise_multiplier"],
        )
        return asked.epsilon(arithmetic.Schema(terms.num_rounds, 1, 1), terms.delta)
    if terms.kind == terms_lib.SAMPLED and goal is not None:
        spent = arithmetic.sampled_epsilon(
            derived["noise_multiplier"],
            goal / config["simulate_population"],
            1,
            terms.num_rounds,
            terms.delta,
        )
        return spent * 0.99 - 1e-4, spent
    schema = arithmetic.Schema(terms.num_rounds, 1, 1)
    if terms.kind == terms_lib.DP_FTRL:
        declared = derived["schema"]
        schema = arithmetic.Schema(
            declared["num_rounds"], declared["min_sep"], declared["max_participations"]
        )
        terms = dataclasses.replace(terms, noise_multiplier=derived["noise_multiplier"])
    return terms.epsilon(schema, terms.delta)


def ledger(test: str, run: records.Records, terms: terms_lib.Terms) -> audit_report.Finding:
    """Checks that the ledger is one history, without gaps or forks."""
    history = run.ledger
    if history is None:
        return findings.skipped(test, GONE)
    wrong = []
    begun, done = len(history.rounds), len(history.commits)
    if sorted(history.rounds) != list(range(begun)) or sorted(history.commits) != list(range(done)):
        wrong.append(f"rounds are missing among the {begun} begun and {done} committed")
    if not done <= begun <= done + 1:
        wrong.append(f"{begun} rounds were begun and {done} committed")
    before = history.initial_checkpoint
    for t in sorted(history.rounds):
        continues, _, cohort_hash = history.rounds[t]
        if continues != before:
            wrong.append(f"round {t} does not continue from the state that was committed before it")
        names = sorted(
            history.clients[c][0] for c in history.asked.get(t, ()) if c in history.clients
        )
        if hashlib.blake2b(b"".join(names), digest_size=32).hexdigest() != cohort_hash:
            wrong.append(f"the cohort of round {t} is not the one that it began with")
        if not set(history.dropped.get(t, ())) <= set(history.asked.get(t, ())):
            wrong.append(f"round {t} lost clients whom it did not ask")
        before = history.commits.get(t, (before,))[0]
    if strangers := (history.asked.keys() | history.dropped.keys()) - history.rounds.keys():
        wrong.append(f"clients were asked in round {min(strangers)}, which never began")
    noises = [noise for _, noise, _ in history.rounds.values() if noise is not None]
    if len(set(noises)) < len(noises):
        wrong.append("two rounds go on from the same state of the noise")
    if terms.noise_multiplier > 0.0 and len(noises) < begun:
        wrong.append(f"{begun - len(noises)} rounds have no fingerprint of their noise")
    wrong += _index(history)
    fine = f"{done} rounds are committed, each from the state that the one before it left"
    return findings.judged(test, wrong, fine, nothing=not begun and _NO_ROUND)


def _index(history: records.Ledger) -> list[str]:
    """Lists the counts of clients and strides in the ledger that are not those of its rows."""
    committed = {
        client: [t for t in turns if t in history.commits]
        for client, turns in history.turns().items()
    }
    wrong = [
        f"client {client} is counted for {times} rounds and was in {len(committed.get(client, ()))}"
        for client, (_, times, last) in sorted(history.clients.items())
        if times != len(committed.get(client, ()))
        or last != (committed[client][-1] if committed.get(client) else None)
    ]
    smallest: dict[int, int] = {}
    for turns in committed.values():
        for i, j in zip(turns, turns[1:], strict=False):
            smallest[j] = min(j - i, smallest.get(j, j))
    wrong += [
        f"round {t} has a smallest stride of {stride}, and {smallest.get(t)} by its clients"
        for t, (_, stride) in sorted(history.commits.items())
        if stride != smallest.get(t)
    ]
    return wrong


def participation(test: str, run: records.Records, terms: terms_lib.Terms) -> audit_report.Finding:
    """Checks that participation keeps the declared schema, and that this is the derived one."""
    history = run.ledger
    if history is None:
        return findings.skipped(test, GONE)
    rounds, stride, times = history.observed()
    declared = arithmetic.Schema(*history.declared)
    wrong = []
    if rounds > declared.rounds:
        wrong.append(f"{rounds} rounds were begun and {declared.rounds} declared")
    if stride is not None and stride < declared.stride:
        wrong.append(
            f"a client came again after {stride} rounds, and {declared.stride} is declared"
        )
    if times > declared.times:
        wrong.append(f"a client came {times} times, and {declared.times} is declared")
    expected = _declared(run, terms)
    if expected is not None and expected != declared:
        wrong.append(f"the ledger declares {tuple(declared)} and the options {tuple(expected)}")
    if len(history.clients) > run.num_users:
        wrong.append(f"{len(history.clients)} clients took part, of {run.num_users} users")
    seen = "nobody came twice" if stride is None else f"turns were at least {stride} rounds apart"
    fine = (
        f"In {rounds} rounds nobody came more than {times} times, and {seen}; declared are "
        f"{declared.times} times, {declared.stride} rounds apart (stride)"
    )
    return findings.judged(test, wrong, fine, nothing=not rounds and _NO_ROUND)


def _declared(run: records.Records, terms: terms_lib.Terms) -> arithmetic.Schema | None:
    """Returns the schema that the ledger must declare; None where the population decides it."""
    if terms.kind == terms_lib.SAMPLED:
        stride = terms.stride
        return arithmetic.Schema(terms.num_rounds, stride, -(-terms.num_rounds // stride))
    if run.config.get("simulate_report_goal") is not None:
        return None  # The schema that was derived is that of the larger run.
    schema = run.derived["schema"]
    return arithmetic.Schema(schema["num_rounds"], schema["min_sep"], schema["max_participations"])


def checkpoint(test: str, run: records.Records) -> audit_report.Finding:
    """Checks that the state is the one that the ledger committed to, under the run's options."""
    if run.ledger is None:
        return findings.skipped(test, GONE)
    history, state = run.ledger, run.checkpoint
    done = len(history.commits)
    if state is None:
        missing = "the state that the ledger committed last is not in private/checkpoints"
        return findings.judged(test, [missing], "")
    wrong = []
    has_fingerprint = run.manifest is not None and "noise_version" in run.manifest
    if has_fingerprint:
        named = state.path.stem.rpartition("_")[2]
        if state.fingerprint(binding=run.binding) != named:
            wrong.append("its tensors, or the options, are not those that the ledger committed to")
    wrong += state_faults(state, done)
    pending = history.rounds.get(done)
    if pending is not None and pending[1] not in (None, state.fingerprint(part="aggregator")):
        wrong.append(f"round {done} was begun from another state of the noise")
    fine = f"The state after round {done} has the fingerprint that the ledger and its name say"
    unnamed = "the manifest does not say by which version the state has its fingerprint"
    return findings.judged(test, wrong, fine, nothing=not has_fingerprint and unnamed)


def state_faults(state: records.Checkpoint, done: int) -> list[str]:
    """Lists what is wrong with the numbers of a state after so many committed rounds."""
    wrong = []
    index = state.get("aggregator/round_index")
    if index is not None and int(index.whole()) != done:
        wrong.append(
            f"its noise is that of round {int(index.whole())}, after {done} committed rounds"
        )
    floats = [tensor for _, tensor in state.tensors if tensor.dtype.kind == "f"]
    if not all(np.all(np.isfinite(part)) for tensor in floats for part in tensor.parts()):
        wrong.append("it holds numbers that are not finite")
    return wrong


def noise_state(test: str, run: records.Records, terms: terms_lib.Terms) -> audit_report.Finding:
    """Tests that past noise in the checkpoint has the variance that the strategy gives it."""
    buffer = None if run.checkpoint is None else run.checkpoint.get("aggregator/buffer")
    if buffer is None or len(buffer.shape) != 2 or not run.rounds_done:
        return findings.skipped(test, "the state keeps no past noise, or there is none")
    parameters, local = terms.strategy, run.rounds_done
    if parameters["mechanism"] == "restarted":
        local -= max(start for start in parameters["starts"] if start < run.rounds_done)
        parameters = parameters["base"]
    expected = _buffer_variance(parameters, local, buffer.shape[0])
    if expected is None:
        kind = parameters["mechanism"]
        return findings.skipped(test, f"what {kind} keeps is not known to the recount")
    number, size = buffer.shape
    squares = _squares_of_rows(buffer)
    # Coordinates are independent, buffers are not: the error rate is split between buffers.
    each = _NOISE_ERROR_RATE / (2 * number)
    low, high = stats.chi2.ppf(each, size), stats.chi2.isf(each, size)
    wrong = [
        f"buffer {i} has {squares[i] / size:.5g} for a variance, and {variance:.5g} is expected"
        for i, variance in enumerate(expected)
        if not low * variance <= squares[i] <= high * variance
    ]
    judged = findings.judged(
        test,
        wrong,
        f"{number} buffers of {size} coordinates have the variance of the strategy",
    )
    # Found with 99%: where 1% of a smaller noise's squares are still above `low`.
    detectable = 1.0 - math.sqrt(low / stats.chi2.isf(0.01, size))
    return audit_report.Finding(
        test,
        judged.outcome,
        judged.says,
        error_rate=_NOISE_ERROR_RATE,
        trials=size,
        power=f"a standard deviation smaller by {detectable:.2%}",
    )


def _squares_of_rows(buffer: records.Tensor) -> np.ndarray:
    """Returns the sum of the squares in each row of a matrix, float64."""
    squares, at = np.zeros(buffer.shape[0]), 0
    for part in buffer.parts():
        rows = np.arange(at, at + len(part)) // buffer.shape[1]
        squares += np.bincount(rows, np.square(part, dtype=float), minlength=len(squares))
        at += len(part)
    return squares


def _buffer_variance(parameters: dict[str, Any], local: int, size: int) -> np.ndarray | None:
    """Returns the variance of each buffer row, `local` rounds into a block; None if not known."""
    mechanism = parameters["mechanism"]
    if mechanism == "blt" and size == len(parameters["buf_decay"]):
        # S_i <- θ_i S_i + (C⁻¹ z)_t
        powers = np.arange(local - 1, -1, -1)
        weights = np.array(parameters["buf_decay"])[:, np.newaxis] ** powers
        return np.sum(np.square(weights @ arithmetic.noise_matrix(parameters, local)), axis=1)
    if mechanism in ("banded", "banded-toeplitz"):
        # Row s has (C⁻¹ z)_r of the latest round r with r = s modulo the number of rows.
        rows = np.sum(np.square(arithmetic.noise_matrix(parameters, local)), axis=1)
        latest = [max(range(s, local, size), default=None) for s in range(size)]
        return np.array([0.0 if r is None else rows[r] for r in latest])
    return None


def seed(test: str, run: records.Records, terms: terms_lib.Terms) -> audit_report.Finding:
    """Checks that the seed was drawn in secret, or nothing is promised."""
    promised = (run.statement or {}).get("epsilon")
    if not terms.is_secret:
        wrong = [f"ε = {promised!r} is promised with a seed that config.json tells"]
        fine = "The seed is given in the options, and no guarantee is claimed"
        return findings.judged(test, wrong if promised is not None else [], fine)
    if run.config.get("noise_party"):
        return findings.skipped(test, "noise parties draw the noise, and keep their seeds")
    if run.checkpoint is None:
        return findings.skipped(test, "there is no checkpoint that could be read")
    words = run.checkpoint.get("aggregator/seed")
    if words is None:
        wrong = ["the state has no seed, and yet noise is claimed"]
        has_noise = terms.noise_multiplier > 0.0
        return findings.judged(test, wrong if has_noise else [], "There is no noise, and no seed")
    # A person chooses small numbers; the operating system draws all bits. Rows after the first one
    # are the seeds of past draws.
    words = np.atleast_2d(words.whole())
    chosen = words[np.all(np.abs(words.astype(float)) < 2.0**40, axis=1)]
    wrong = [f"it has {row}, which nobody draws by chance" for row in chosen.tolist()]
    bits = 64 * words.shape[1]
    if bits < 256 and run.config.get("noise") == "secure" and terms.noise_multiplier > 0.0:
        wrong.append(f"it has {bits} bits, and that of secure noise has 256")
    fine = f"It has {bits} bits, drawn in secret as far as can be seen"
    return findings.judged(test, wrong, fine)
