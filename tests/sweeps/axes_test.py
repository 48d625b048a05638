"""Tests of what stands after `--over`."""

import os

import pytest

from tff_dpftrl.sweeps import axes, kinds


@pytest.mark.parametrize(
    "text, expected",
    [
        ("mechanism=blt,tree", {"mechanism": ("blt", "tree")}),
        ("noise_multiplier=0.5,1", {"noise_multiplier": (0.5, 1.0)}),
        ("noise-multiplier=1e-3", {"noise_multiplier": (0.001,)}),
        ("seed=0:3", {"seed": (0, 1, 2)}),
        ("seed=0:2,7,-1", {"seed": (0, 1, 7, -1)}),
        ("rounds=10,20", {"num_rounds": (10, 20)}),
        ("lower_case=true,no", {"lower_case": (True, False)}),
        ("min_sep=none,20", {"min_sep": (None, 20)}),
        ("mechanism=none,blt", {"mechanism": ("none", "blt")}),
        ("tie_embeddings=none,true", {"tie_embeddings": (None, True)}),
        ("vocabulary=docs,private", {"vocabulary": ("docs", "private")}),
        (
            "noise_multiplier=0.5,1, mechanism=blt,tree,seed=0:2",
            {"noise_multiplier": (0.5, 1.0), "mechanism": ("blt", "tree"), "seed": (0, 1)},
        ),
        ("noise_multiplier=0.5; 1", {"noise_multiplier": (0.5, 1.0)}),
        (
            "clip_norm_schedule=none;40:0.3,60:0.1; 40:0.3",
            {"clip_norm_schedule": (None, "40:0.3,60:0.1", "40:0.3")},
        ),
        (
            "budget_shares=vocabulary=0.1,metrics=0.05;vocabulary=0.2",
            {"budget_shares": ("vocabulary=0.1,metrics=0.05", "vocabulary=0.2")},
        ),
    ],
)
def test_values_become_what_the_option_is(text, expected):
    found = axes.parse([text], {"rounds": "num_rounds"})
    assert found == expected and list(found) == list(expected)
    types = [[type(v) for v in values] for values in found.values()]
    assert types == [[type(v) for v in values] for values in expected.values()]


def test_several_axes_keep_their_order():
    assert list(axes.parse(["seed=0:2", "clip_norm=1", "mechanism=tree"])) == [
        "seed",
        "clip_norm",
        "mechanism",
    ]


def test_files_are_found_from_every_folder():
    (path,) = axes.parse(["data=users.jsonl"])["data"]
    assert path == os.path.abspath("users.jsonl")


@pytest.mark.parametrize(
    "texts, message",
    [
        (["0.5,1"], "must look like NAME=VALUE"),
        (["noise_multipler=1"], "did you mean noise_multiplier"),
        (["noise_multiplier=1", "noise-multiplier=2"], "names noise_multiplier twice"),
        (["seed=0,0"], "gives seed the value 0 twice"),
        (["seed=0:3,2"], "gives seed the value 2 twice"),
        (["noise_multiplier=1,1.0"], "gives noise_multiplier the value 1 twice"),
        (["seed=3:3"], "the end of a range is left out"),
        (["seed=1.5"], "seed needs an integer"),
        (["seed="], "seed needs an integer"),
        (["noise_multiplier=much"], "noise_multiplier needs a number, got 'much'"),
        (["noise_multiplier=0:3"], "ranges are for integers"),
        (["num_rounds=none"], "num_rounds needs an integer"),
        (["mechanism=blt,oak"], "must be among .*blt.*; got 'oak'.* --over strategy=FILE"),
        (["lower_case=maybe"], "lower_case needs true or false"),
        (["data="], "data needs a value"),
        (["clip_norm_schedule=40:0.3,60:0.1;"], "clip_norm_schedule needs a value, got ''"),
        (["clip_norm=1;2,seed=0:3"], "clip_norm needs a number, got '2,seed=0:3'"),
        (["wobble=1"], "no option of train; those are: adaptive_clipping, .*vocabulary_size"),
        (["group_size=1"], "an option of finetune, .* runs of train: add --finetune"),
    ],
)
def test_mistakes_are_named_with_a_remedy(texts, message):
    with pytest.raises(ValueError, match=message):
        axes.parse(texts)


def test_axes_are_options_of_the_kind_of_runs():
    def parse(text):
        return axes.parse([text], {"steps": "num_steps"}, kinds.FINETUNING)

    assert parse("group_size=none,4,steps=20:22") == {
        "group_size": (None, 4),
        "num_steps": (20, 21),
    }
    assert parse("sequence_length=none,8") == {"sequence_length": (None, 8)}
    with pytest.raises(ValueError, match="an option of train, .*: leave out --finetune"):
        parse("num_rounds=3")
    with pytest.raises(ValueError, match="must be among .*; got 'none'.$"):
        parse("sampling=none")


def test_names_of_folders_are_short_and_differ():
    assert axes.in_name(0.5) == "0.5" and axes.in_name(1.0) == "1" and axes.in_name(None) == "none"
    one, other = axes.in_name("/a/users.jsonl"), axes.in_name("/b/users.jsonl")
    assert one != other
    assert one.startswith("users.jsonl-") and "/" not in one
    assert len(axes.in_name("/a/" + "long" * 99)) < 60


def test_labels_are_for_people():
    values = {"data": "/a/users.jsonl", "noise_multiplier": 1.0, "min_sep": None}
    assert axes.label(values) == "data=users.jsonl, noise_multiplier=1, min_sep=none"
