"""Tests of options before they are a config: files, flags, manifests."""

import json
import pathlib

import pytest

from tff_dpftrl.finetuning import config as finetuning_config
from tff_dpftrl.finetuning import opening
from tff_dpftrl.runs import manifest
from tff_dpftrl.runtime.tasks import task_config
from tff_dpftrl.sweeps import kinds
from tff_dpftrl.training import config
from tff_dpftrl.training import options as options_lib


def test_toml_options_may_stand_in_tables(tmp_path):
    path = tmp_path / "run.toml"
    content = 'num_rounds = 7\n[privacy]\nnoise_multiplier = 2\nmechanism = "tree"\n'
    path.write_text(content, encoding="utf-8-sig")
    made = options_lib.config_from_mapping(options_lib.read_toml(path), str(path))
    assert made.learning.num_rounds == 7
    assert (made.privacy.noise_multiplier, made.privacy.mechanism) == (2.0, "tree")


@pytest.mark.parametrize(
    "content, message",
    [
        ("num_rounds = ", "not valid TOML"),
        ("clip_norm = 1.0\n[privacy]\nclip_norm = 2.0\n", "gives the option 'clip_norm' twice"),
        (
            "rounds = 5\nnoise_multiplier = 1.0\n",
            "unknown option 'rounds' .did you mean num_rounds",
        ),
    ],
)
def test_bad_toml_is_refused(tmp_path, content, message):
    path = tmp_path / "run.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        options_lib.config_from_mapping(options_lib.read_toml(path), str(path))


def test_a_missing_toml_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="nothing.toml: No such file"):
        options_lib.read_toml(tmp_path / "nothing.toml")


@pytest.mark.parametrize("name", options_lib.built_in_configs())
def test_configs_of_the_package_have_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = options_lib.read_toml(name)
    assert {"noise_multiplier", "target_epsilon"} & set(options)
    pathlib.Path(name).write_text("num_rounds = 7")  # A file of this name comes first.
    assert options_lib.read_toml(name) == {"num_rounds": 7}


def test_what_is_neither_file_nor_name_is_told_the_names():
    with pytest.raises(ValueError, match="quikstart: No such file.* next_word, quickstart"):
        options_lib.read_toml("quikstart")


@pytest.mark.parametrize(
    "kind, has, lacks, wrong",
    [
        (config.TrainingConfig, "quickstart", "next_word", "collection"),
        (finetuning_config.FinetuningConfig, "els_uls_ccnews", "quickstart", "batch_size"),
        (task_config.TaskConfig, "next_word", "els_uls_ccnews", "compute_budget"),
    ],
)
def test_a_config_of_another_command_is_told_those_that_fit(kind, has, lacks, wrong):
    names = options_lib.built_in_configs(kind)
    assert has in names and lacks not in names
    for name in names:
        options_lib.check_names(options_lib.read_toml(name), name, kind)
    with pytest.raises(ValueError, match=f"{lacks} is for .* '{wrong}'.* {', '.join(names)}"):
        options_lib.check_names(options_lib.read_toml(lacks), lacks, kind)


def test_a_mechanism_takes_the_place_of_a_strategy():
    fixed = {"strategy": "blt-gboard-b400", "noise_multiplier": 7.0}
    assert options_lib.overrule(fixed, {"clip_norm": 1.0}) == fixed | {"clip_norm": 1.0}
    tree = {"mechanism": "tree", "noise_multiplier": 7.0}
    assert options_lib.overrule(fixed, {"mechanism": "tree"}) == tree
    assert options_lib.overrule({}, tree | fixed) == tree | fixed


def test_resolved_config_round_trips():
    made = config.TrainingConfig.of(target_epsilon=3.0, mechanism="tree", max_users=30)
    read = json.loads(json.dumps(made.to_dict()))
    assert options_lib.config_from_mapping(read, "config.json") == made


def test_a_begun_run_of_an_earlier_version_keeps_its_sizes():
    # Its manifest has what were all the options of models then.
    began = {"model": "word-lstm", "embedding_size": 96, "lstm_size": 128, "tie_embeddings": True}
    made = options_lib.of_begun_run(began | {"mechanism": "none"}, "config.json").language
    assert made.model_sizes == {"embedding_size": 96, "state_size": 128, "tie_embeddings": True}
    assert made.model_sizes == made.with_defaults().model_sizes


@pytest.mark.parametrize("kind", [manifest.TRAINING, manifest.FINETUNING])
def test_a_begun_run_without_split_reads_all_files_of_a_folder(tmp_path, monkeypatch, kind):
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    read = {manifest.TRAINING: options_lib.of_manifest, manifest.FINETUNING: opening.config_of}
    for data, given, split in (
        (f"{tmp_path},x.csv", {}, "all"),
        (str(tmp_path), {"split": None}, None),
        ("x.csv", {}, None),
        ("docs", {}, None),
    ):
        options = {"data": data, "target_epsilon": 1.0} | given
        options |= {"initial_weights": "m"} if kind == manifest.FINETUNING else {}
        known = manifest.Manifest(options, {}, {}, {}, recorded_kind=kind)
        assert read[kind](known, tmp_path).to_dict()["split"] == split
        begun = kinds.KINDS[kind].begun_config(options, "config.json")
        assert begun.to_dict()["split"] == split
