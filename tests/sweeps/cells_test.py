"""Tests of the cells that options and axes make."""

import pytest

from tff_dpftrl.models import table as model_table
from tff_dpftrl.sweeps import cells, kinds
from tff_dpftrl.training import noise_options


def test_cells_are_the_product_and_the_last_axis_is_fastest():
    grid = cells.grid(
        {}, {"mechanism": ("blt", "tree"), "noise_multiplier": (1.0,), "seed": (0, 1)}
    )
    assert [cell.name for cell in grid] == [
        "mechanism=blt,noise_multiplier=1,seed=0",
        "mechanism=blt,noise_multiplier=1,seed=1",
        "mechanism=tree,noise_multiplier=1,seed=0",
        "mechanism=tree,noise_multiplier=1,seed=1",
    ]
    assert (grid[3].config.privacy.mechanism, grid[3].config.seed) == ("tree", 1)
    assert grid[3].setting == {"mechanism": "tree", "noise_multiplier": 1.0}


def test_cells_overrule_the_options():
    options = {"target_epsilon": 8.0, "mechanism": "tree", "num_rounds": 7}
    (cell,) = cells.grid(options, {"noise_multiplier": (0.5,)})
    assert (cell.config.privacy.noise_multiplier, cell.config.target_epsilon) == (0.5, None)
    (cell,) = cells.grid({"noise_multiplier": 1.0}, {"target_epsilon": (2.0,)})
    assert (cell.config.privacy.noise_multiplier, cell.config.target_epsilon) == (None, 2.0)


def test_a_value_of_none_leaves_the_option_out():
    grid = cells.grid({"target_epsilon": 8.0, "min_sep": 9}, {"min_sep": (None, 20)})
    assert [cell.config.privacy.min_sep for cell in grid] == [None, 20]
    grid = cells.grid({"target_epsilon": 8.0}, {"noise_multiplier": (None, 1.0)})
    assert [cell.config.target_epsilon for cell in grid] == [8.0, None]


@pytest.mark.parametrize(
    "options",
    [
        {"noise_multiplier": 1.0},
        {"target_epsilon": 8.0},
        {"noise_multiplier": 1.0, "simulate_report_goal": 100, "simulate_population": 1000},
    ],
)
def test_without_noise_nothing_is_said_about_it(options):
    none, blt = cells.grid(options, {"mechanism": ("none", "blt")})
    assert isinstance(none.config.privacy, noise_options.NoNoise)
    assert none.config.simulation.simulate_report_goal is None
    assert blt.config.to_dict().items() >= options.items()


def test_cells_without_noise_that_differ_in_noise_only_are_one():
    axes = {"mechanism": ("none", "blt"), "noise_multiplier": (0.5, 1.0), "seed": (0, 1)}
    grid = cells.grid({}, axes)
    assert [cell.name for cell in grid if cell.config.privacy.mechanism == "none"] == [
        "mechanism=none,seed=0",
        "mechanism=none,seed=1",
    ]
    assert len(grid) == 2 + 4
    larger = {"mechanism": ("none", "blt"), "simulate_report_goal": (50, 100)}
    grid = cells.grid({"noise_multiplier": 1.0, "simulate_population": 1000}, larger)
    assert [cell.name for cell in grid][0] == "mechanism=none" and len(grid) == 1 + 2


@pytest.mark.parametrize(
    "options, axes, message",
    [
        (
            {"mechanism": "none"},
            {"noise_multiplier": (1.0, 2.0)},
            "noise_multiplier=1: .*leave one",
        ),
        ({}, {"mechanism": ("tree",)}, "cell mechanism=tree: .* needs either noise_multiplier"),
        (
            {"noise_multiplier": 1.0, "buffers": 2},
            {"mechanism": ("blt", "tree")},
            "The cell mechanism=tree: ",
        ),
        ({"noise_multiplier": 1.0}, {"num_rounds": (5, 0)}, "num_rounds=0: num_rounds must be at"),
        (
            {},
            {"noise_multiplier": (None, 1.0), "target_epsilon": (None, 1.0)},
            "cell noise_multiplier=none, target_epsilon=none: .*got neither",
        ),
    ],
)
def test_a_cell_that_cannot_be_run_is_named(options, axes, message):
    with pytest.raises(ValueError, match=message):
        cells.grid(options, axes)


def test_cells_can_be_runs_of_finetune():
    options = {"initial_weights": "weights", "target_epsilon": 4.0, "compute_budget": 64}
    grid = cells.grid(
        options,
        {"noise_multiplier": (None, 0.5), "group_size": (2, 4)} | {"sampling": ("user",)},
        kinds.FINETUNING,
    )
    assert {cell.kind for cell in grid} == {kinds.FINETUNING}
    assert [(c.config.target_epsilon, c.config.group_size) for c in grid] == [
        (4.0, 2),
        (4.0, 4),
        (None, 2),
        (None, 4),
    ]
    assert len({cell.process_group for cell in grid}) == 1
    with pytest.raises(ValueError, match="The cell group_size=3: the sweep names num_rounds"):
        cells.grid(options | {"num_rounds": 3}, {"group_size": (3,)}, kinds.FINETUNING)


def test_the_same_run_twice_is_refused():
    usual = model_table.MODELS["word-lstm"].sizes["embedding_size"]
    axes = {"embedding_size": (None, usual + 1, usual)}
    message = f"embedding_size=none and embedding_size={usual} are the same run"
    with pytest.raises(ValueError, match=message):
        cells.grid({"noise_multiplier": 1.0}, axes)


def test_names_fit_into_a_file_system():
    axes = {"noise_multiplier": (1.0,), "clip_norm": (0.1234567890123,)}
    axes |= {name: ("/x/" + name * 9,) for name in ("data", "vocabulary", "strategy")}
    axes |= {"initial_weights": ("/x/" + "w" * 99, "/y/" + "w" * 99)}
    one, other = cells.grid({}, axes)
    assert one.name != other.name and len(one.name) < 255
