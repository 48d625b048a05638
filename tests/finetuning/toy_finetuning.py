"""A pretrained toy model and a config of a few steps, for tests of whole runs."""

import pathlib
from typing import Any

import pytest
import tensorflow as tf

from tests import shared_folders
from tests.training import toy_run
from tff_dpftrl.finetuning import clipped_sums, ghost
from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.training import language_config, pretraining

NUM_STEPS = 6


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> pathlib.Path:
    """A folder with users.jsonl, public.jsonl and the folder of a model, pretrained; only read."""
    return shared_folders.made_once(tmp_path_factory, "toy_finetuning", write)


@pytest.fixture
def no_gradients(monkeypatch):
    """Clipped sums are zero: less to trace, where a test is about the books of a run alone."""

    def clipped_sum(weights, rows, row_splits, clip_norm):
        del rows, clip_norm
        zeros = tf.zeros([tf.size(row_splits) - 1], tf.float64)
        return [tf.zeros_like(each) for each in weights], clipped_sums.PerUnit(zeros, zeros)

    monkeypatch.setattr(ghost, "fastest_clipped_sum", lambda *_, **__: clipped_sum)


def write(folder: pathlib.Path) -> pathlib.Path:
    """Writes users.jsonl, words.txt, public.jsonl and a pretrained model to a folder."""
    folder.mkdir(exist_ok=True)
    toy_run.write_corpus(folder)
    toy_run.write_public_corpus(folder)
    options = language_config.LanguageConfig(
        data=str(folder / "users.jsonl"),
        vocabulary=str(folder / "words.txt"),
        vocabulary_size=30,
        sequence_length=6,
        model="transformer",
        embedding_size=4,
        num_layers=1,
        num_heads=1,
        feed_forward_size=5,
    )
    public = pretraining.PretrainingConfig(data=str(folder / "public.jsonl"), epochs=1)
    pretraining.pretrain(public, options, folder / "pretrained", progress=lambda line: None)
    return folder


def config(toy: pathlib.Path, **options: Any) -> config_lib.FinetuningConfig:
    """A run of ULS whose noise and samples can be drawn again, unless something else is said."""
    sampled = {"sampling": "user", "group_size": 2, "cohort_size": 8, "noise_multiplier": 0.7}
    return config_lib.FinetuningConfig(
        **{
            "data": str(toy / "users.jsonl"),
            "proxy_data": str(toy / "public.jsonl"),
            "initial_weights": str(toy / "pretrained"),
            "num_steps": NUM_STEPS,
            "warmup_steps": 1,
            "learning_rate": 0.01,
            "clip_norm": 1.0,
            "eval_every": 2,
            "deterministic_noise_seed": 5,
            **({} if "sampling" in options else sampled),
            **options,
        }
    )
