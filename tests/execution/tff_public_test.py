"""Every public learning algorithm and aggregator factory of TFF, compiled and run by TFF."""

import collections
import pathlib
import re

import dp_accounting
import numpy as np
import pytest
import tensorflow_federated as tff
import tree
from google.protobuf import message

from tests.execution import tff_processes
from tff_dpftrl.execution import compiled_process, contexts

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "compiled_processes.md"
_CASES = {**tff_processes.ALGORITHMS, **tff_processes.AGGREGATORS}
_FAST = ("DifferentiallyPrivateFactory.gaussian_fixed",)
_NOT_COMPILED = {"build_personalization_eval_computation", "tff.learning.ddp_secure_aggregator"}
# Functions that make an aggregation in place of a factory, and bases of factories.
_NO_FACTORIES = {"AggregationFactory", "UnweightedAggregationFactory", "WeightedAggregationFactory"}


def _assert_close(one, other, atol):
    tree.assert_same_structure(one, other, check_types=True)
    pairs = zip(tree.flatten_with_path(one), tree.flatten_with_path(other), strict=True)
    for (path, a), (_, b) in pairs:
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape, path
        if b.dtype.kind == "S":
            assert (a == b).all(), path
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol, err_msg=str(path))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in _FAST else [pytest.mark.slow]) for name in _CASES],
)
def test_rounds_are_those_of_tff(name):
    case = _CASES[name]
    with contexts.secure_sum_simulation():
        process = case.build()
        compiled = compiled_process.compile_process(process)
        reference = state = process.initialize()
        tree.assert_same_structure(state, compiled.initialize(), check_types=True)
        for round_index in range(2):
            cohort = case.cohort(round_index)
            reference, expected = process.next(reference, cohort)
            state, output = compiled.next(state, cohort)
            _assert_close(output, expected, case.atol)
            if not case.has_random_state:
                _assert_close(state, reference, case.atol)
        assert tree.flatten(output), "nothing was compared"


def test_the_event_in_a_state_is_read_as_from_tff():
    case = _CASES["DifferentiallyPrivateFactory.gaussian_fixed"]
    compiled = compiled_process.compile_process(case.build())
    extract = tff.aggregators.differential_privacy.extract_dp_event_from_state
    state = compiled.initialize()
    with pytest.raises(Exception, match="initialize"):
        extract(state)
    for round_index in range(2):
        state, _ = compiled.next(state, case.cohort(round_index))
        event = extract(state)
        assert event == dp_accounting.GaussianDpEvent(0.0)
        assert isinstance(event.noise_multiplier, np.floating)


def test_what_is_no_process_is_refused_in_one_line():
    metrics = collections.OrderedDict(zero=0.0)
    computation = tff.learning.algorithms.build_personalization_eval_computation(
        tff_processes.model_fn,
        collections.OrderedDict(none=lambda: lambda model, train, test, context=None: metrics),
        lambda model, dataset: metrics,
    )
    with pytest.raises(compiled_process.NotCompilableError) as caught:
        compiled_process.compile_process(computation)
    assert "no tff.templates.IterativeProcess" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_output_that_is_not_one_value_of_the_server_is_refused():
    process = _CASES["SumFactory"].build()

    @tff.federated_computation(*process.next.type_signature.parameter)
    def next_fn(state, value):
        state, output = process.next(state, value)
        return state, (output[0], output[0])

    unzipped = tff.templates.IterativeProcess(process.initialize, next_fn)
    with pytest.raises(compiled_process.NotCompilableError, match="tff.federated_zip"):
        compiled_process.compile_process(unzipped)


@pytest.mark.slow
def test_tff_itself_runs_nothing_with_distributed_noise():
    """Its computations are nested deeper than protobuf reads; where that changes, so does a row."""
    case = tff_processes.DISTRIBUTED_NOISE
    process = case.build()
    cohort = case.cohort(0)
    with contexts.secure_sum_simulation(), pytest.raises(message.DecodeError):
        process.next(process.initialize(), cohort)
    compiled = compiled_process.compile_process(process)
    _, (mean, measurements) = compiled.next(compiled.initialize(), cohort)
    updates = np.array([np.concatenate([update["a"], update["b"]]) for update in cohort])
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    clipped = updates * measurements["mean_value"]["l2_clip"] / norms
    assert (norms > measurements["mean_value"]["l2_clip"]).all()
    found = np.concatenate([mean["a"], mean["b"]])
    np.testing.assert_allclose(found, clipped.mean(axis=0), atol=case.atol)
    with pytest.raises(message.DecodeError):
        tff.learning.algorithms.build_unweighted_fed_avg(
            tff_processes.model_fn,
            client_optimizer_fn=tff_processes.SGD,
            model_aggregator=tff.learning.ddp_secure_aggregator(1e-4, 4),
        )


def test_the_page_has_a_row_for_each_case_and_each_public_name():
    rows = re.findall(r"^\| `([\w.]+)` \| (yes|no)", _PAGE.read_text("utf-8"), re.MULTILINE)
    found = dict(rows)
    assert len(found) == len(rows)
    assert set(found) == set(_CASES) | _NOT_COMPILED
    refused = {name for name, compiled in found.items() if compiled == "no"}
    assert refused == _NOT_COMPILED
    public = {name for name in dir(tff.learning.algorithms) if name.startswith("build_")}
    for module, prefix in (
        (tff.learning, "tff.learning."),
        (tff.aggregators, ""),
        (tff.learning.metrics, "tff.learning.metrics."),
    ):
        public |= {
            prefix + name
            for name in dir(module)
            if re.search(r"(Factory|Process|_factory|_aggregator|^add_.*measurements\w*)$", name)
            and callable(getattr(module, name))
        }
    assert public - _NO_FACTORIES <= set(found)
