"""Tests of fine-tuning checkpoints in Hugging Face's layout, from the command to the exports."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy

from tests.finetuning import toy_finetuning
from tests.models import checkpoint_folders
from tff_dpftrl.accounting import statement_text
from tff_dpftrl.cli import main
from tff_dpftrl.finetuning import clipped_sums, ghost, run, trained_part
from tff_dpftrl.models import export, hugging_face, low_rank
from tff_dpftrl.runs import manifest
from tff_dpftrl.training import trained_model, warm_start


def _finetune(config, output):
    return run.finetune(config, output, progress=lambda line: None)


def _config(toy, name, **options):
    return toy_finetuning.config(
        toy,
        **{
            "initial_weights": str(checkpoint_folders.FOLDER / name),
            "sequence_length": 8,
            "num_steps": 2,
            "group_size": 17,  # Units of so many tokens have less to trace.
            **options,
        },
    )


toy = toy_finetuning.toy


@pytest.mark.parametrize(
    "name, adapter_rank",
    [
        pytest.param("gpt2", None, marks=pytest.mark.slow),
        pytest.param("gpt2", 2, marks=pytest.mark.slow),
        ("llama_grouped_tied", 2),
    ],
)
def test_the_result_is_written_in_the_layout_that_it_came_in(name, adapter_rank, toy, tmp_path):
    source, output = checkpoint_folders.FOLDER / name, tmp_path / "run"
    results = _finetune(_config(toy, name, adapter_rank=adapter_rank), output)
    model, weights = export.read(output / "model.npz")
    assert model.sequence_length == 8
    exported, again = hugging_face.find(output / "hugging_face").read(8)
    assert exported == model
    before = hugging_face.find(source).read(8)[1]
    for weight, other in zip(weights, again, strict=True):
        np.testing.assert_array_equal(weight, other)
    changed = [(a != b).any() for a, b in zip(weights, before, strict=True)]
    kernels = [weight.endswith("_kernel") for weight in model.weight_shapes]
    assert changed == (kernels if adapter_rank else [True] * len(changed))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (output / "hugging_face" / file).read_bytes() == (source / file).read_bytes()
    folders = ["hugging_face"]
    adapters = output / "hugging_face_adapters"
    assert adapters.exists() == (adapter_rank is not None)
    if adapter_rank is not None:
        folders.append(adapters.name)
        tensors = safetensors.numpy.load_file(adapters / "adapter_model.safetensors")
        config = json.loads((adapters / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(source)
        assert len(tensors) == 2 * sum(kernels)
        product = next(t for n, t in tensors.items() if n.endswith("lora_B.weight"))
        assert product.any()
    for folder in folders:
        assert (
            statement_text.to_json(results.statement)
            in (output / folder / "privacy_statement.json").read_text()
        )
    # The initial weights are of nobody knows whom.
    assert any("initial weights" in caveat for caveat in results.statement.headline_caveats)
    # A report writes the same.
    written = (output / "hugging_face" / "model.safetensors").read_bytes()
    (output / "hugging_face" / "model.safetensors").unlink()
    run.write_report(output)
    assert (output / "hugging_face" / "model.safetensors").read_bytes() == written


@pytest.mark.slow
def test_the_checkpoint_may_be_gone_when_a_run_goes_on(toy, tmp_path):
    for rank in (None, 2):
        whole, parts = tmp_path / f"whole {rank}", tmp_path / f"parts {rank}"
        source = shutil.copytree(
            checkpoint_folders.FOLDER / "gpt2", tmp_path / f"checkpoint {rank}"
        )
        config = _config(toy, "gpt2", adapter_rank=rank, initial_weights=str(source))
        _finetune(config, whole)

        class Killed(BaseException):
            pass

        def stop(line):
            raise Killed

        with pytest.raises(Killed):
            run.finetune(
                config, parts, progress=lambda line, s=stop: "Compiling" in line and s(line)
            )
        shutil.rmtree(source)
        _finetune(None, parts)
        # Sums of float32 may be added in another order: in a long process, weights once differed by
        # 3e-8. Other noise moves them by more than 1e-3.
        pairs = zip(
            *(export.read(folder / "model.npz")[1] for folder in (whole, parts)), strict=True
        )
        for one, other in pairs:
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
        one, other = (
            safetensors.numpy.load_file(folder / "hugging_face/model.safetensors")
            for folder in (whole, parts)
        )
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            np.testing.assert_allclose(tensor, other[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_statement_names_what_the_weights_were_trained_on(toy, tmp_path):
    named, unnamed = (
        _finetune(_config(toy, "gpt2", trained_on=trained_on), tmp_path / str(trained_on)).statement
        for trained_on in ("WebText", None)
    )
    said = (
        "Text that the initial weights were trained on: the model 'gpt2', trained on WebText, "
        "declared public by the operator."
    )
    assert said in named.not_covered
    assert not any("initial weights" in caveat for caveat in named.headline_caveats)
    assert any("initial weights" in caveat for caveat in unnamed.headline_caveats)
    # Nothing else of the statement depends on it.
    fields = set(vars(named)) - {"not_covered", "assumptions", "headline_caveats", "subject"}
    assert all(getattr(named, name) == getattr(unnamed, name) for name in fields)
    other = [set(s.not_covered) for s in (named, unnamed)]
    assert len(other[0] ^ other[1]) == 3
    # Who names no text has not declared the tokenizer public, either.
    unknown = "the model 'gpt2', of which is not recorded what it was trained on."
    learned = f"Text that the tokenizer was learned on: not recorded; it is that of {unknown}"
    assert learned in unnamed.not_covered
    assert not any("declared public" in line for line in unnamed.assumptions)
    assert any("declared public" in line for line in named.assumptions)


def test_what_is_recorded_is_not_said_again(toy, tmp_path):
    with pytest.raises(ValueError, match="trained_on is for weights of which it is not recorded"):
        _finetune(toy_finetuning.config(toy, trained_on="WebText"), tmp_path / "run")
    with pytest.raises(ValueError, match="sequence_length is for a checkpoint in Hugging Face's"):
        _finetune(toy_finetuning.config(toy, sequence_length=8), tmp_path / "run")
    for trained_on in (" ", "two\nlines"):
        with pytest.raises(ValueError, match="trained_on must name a text in one line"):
            _config(toy, "gpt2", trained_on=trained_on)
    with pytest.raises(ValueError, match="sequence_length must be at most 16, .* got 17"):
        _finetune(_config(toy, "gpt2", sequence_length=17), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_result_that_is_fine_tuned_again_is_that_of_a_run(toy, tmp_path):
    first = _finetune(_config(toy, "gpt2", deterministic_noise_seed=None), tmp_path / "first")
    moved = shutil.copytree(tmp_path / "first" / "hugging_face", tmp_path / "elsewhere")
    for folder, name in ((tmp_path / "first" / "hugging_face", "first"), (moved, "elsewhere")):
        source, is_public = warm_start.source(folder)
        assert f"the model of the training run {name!r}" in source and not is_public
    config = _config(
        toy, "gpt2", initial_weights=str(moved), deterministic_noise_seed=None, warmup_steps=0
    )
    statement = _finetune(config, tmp_path / "second").statement
    (earlier,) = manifest.read(tmp_path / "second").facts["earlier_runs"]
    assert earlier["name"] == "elsewhere" and earlier["epsilon"] == first.statement.epsilon
    assert "elsewhere" in statement_text.markdown(statement)
    with pytest.raises(ValueError, match="trained_on is for weights"):
        _finetune(dataclasses.replace(config, trained_on="WebText"), tmp_path / "third")


@pytest.mark.parametrize(
    "name, adapter_rank",
    [
        ("gpt2", None),
        ("llama_grouped_tied", 2),
        pytest.param("gpt2", 2, marks=pytest.mark.slow),
        pytest.param("llama_grouped_tied", None, marks=pytest.mark.slow),
        pytest.param("llama_untied", None, marks=pytest.mark.slow),
    ],
)
def test_one_user_moves_a_step_by_no_more_than_the_clip_norm(name, adapter_rank):
    model, weights = hugging_face.find(checkpoint_folders.FOLDER / name).read(5)
    if adapter_rank is not None:
        model = low_rank.LowRank(model, weights, adapter_rank)
        weights = [w + np.float32(0.1) for w in model.initial_weights(0)]
    rng = np.random.default_rng(0)
    ids = rng.integers(1, model.vocabulary_size, [8, 6]).astype(np.int32)
    ids[3, 2:] = 0
    rows, clip_norm = (ids[:, :-1], ids[:, 1:]), 0.5
    without = tuple(np.concatenate([x[:4], x[6:]]) for x in rows)
    for way in (
        ghost.booked(model, 2),
        clipped_sums.looped(clipped_sums.language_rows(model)),
    ):
        with_user, units = way(weights, rows, np.arange(0, 9, 2), clip_norm)
        without_user, _ = way(weights, without, np.arange(0, 7, 2), clip_norm)
        assert units.norms.numpy().min() > clip_norm  # All are clipped.
        moved = np.sqrt(
            sum(np.sum((a - b) ** 2) for a, b in zip(with_user, without_user, strict=True))
        )
        assert 0.9 * clip_norm < moved <= clip_norm


@pytest.mark.slow
def test_all_runs_of_a_chain_count(toy, tmp_path):
    first, second, third, fourth = (tmp_path / name for name in ("1st", "2nd", "3rd", "4th"))
    options = {"deterministic_noise_seed": None, "warmup_steps": 0, "num_steps": 1}
    one = _finetune(_config(toy, "gpt2", **options), first).statement.epsilon
    copy, totals = tmp_path / "copy", [one]
    for folder, output in ((first, second), (second, third), (copy, fourth)):
        if folder == copy:
            shutil.copytree(second / "hugging_face", copy)
        source = folder if folder == copy else folder / "hugging_face"
        statement = _finetune(
            _config(toy, "gpt2", initial_weights=str(source), **options), output
        ).statement
        totals.append(statement.parameters["epsilon_with_earlier_runs"])
    # Composed, as `run_test` shows: more than one run, less than the sum of their ε.
    assert one < totals[1] < 2 * one and totals[1] < totals[2] < 3 * one
    # The copy's statement says what its run and the one before have spent, and no steps of both.
    assert totals[3] == pytest.approx(totals[1] + one)
    runs = manifest.read(third).facts["earlier_runs"]
    assert [run["name"] for run in runs] == ["2nd", "1st"]
    assert manifest.read(third).facts["earlier_runs_have_same_users"]


def test_a_kill_leaves_no_weights_without_a_statement(tmp_path, monkeypatch):
    source = checkpoint_folders.FOLDER / "gpt2"
    part = trained_part.TrainedPart.of(trained_model.find(source).load(), 2, seed=0)
    part.keep(tmp_path)
    for name in ("privacy_statement.json", "privacy_statement.md"):
        (tmp_path / name).write_text(name)

    def written(folder, *_, **__):
        assert (folder / "privacy_statement.json").exists()
        folders.append(folder.name)

    folders = []
    monkeypatch.setattr(hugging_face, "write", written)
    monkeypatch.setattr(hugging_face, "write_adapters", written)
    part.publish(tmp_path, part.weights, base=source)
    assert folders == ["hugging_face", "hugging_face_adapters"]


@pytest.fixture(name="checkpoint")
def _checkpoint(tmp_path) -> pathlib.Path:
    return shutil.copytree(checkpoint_folders.FOLDER / "gpt2", tmp_path / "checkpoint")


def test_a_tokenizer_that_does_not_fit_is_refused(checkpoint):
    other = checkpoint_folders.FOLDER / "llama_untied"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(other / name, checkpoint / name)
    with pytest.raises(ValueError, match="tokenizer.json of 3.. tokens, and a model of 280 only"):
        trained_model.find(checkpoint).load()
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer.json, by which text becomes"):
        trained_model.find(checkpoint)


@pytest.mark.slow
def test_an_embedding_may_have_more_rows_than_there_are_tokens(checkpoint, toy, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"vocab_size": 288}))
    path = checkpoint / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    rows = np.ones([8, 8], np.float32)
    tensors["transformer.wte.weight"] = np.concatenate([tensors["transformer.wte.weight"], rows])
    safetensors.numpy.save_file(tensors, path)
    _finetune(_config(toy, "gpt2", initial_weights=str(checkpoint)), tmp_path / "run")
    trained = trained_model.find(tmp_path / "run").load()
    assert trained.model.vocabulary_size == 289
    (prediction,) = trained.predict(["Shall I"], top=300)
    assert len(prediction.next_words) <= 280
    assert trained.continue_texts(["Shall I"], 20, seed=0) is not None


@pytest.mark.slow
def test_the_commands_work_from_the_checkpoint_to_the_text(toy, tmp_path, capsys):
    output = tmp_path / "out"
    arguments = (
        f"finetune --data {toy}/users.jsonl --initial-weights "
        f"{checkpoint_folders.FOLDER}/llama_untied --trained-on nothing --sequence-length 8 "
        "--adapter-rank 2 --sampling user --group-size 2 --cohort 8 --clip-norm 1 "
        f"--target-epsilon 8 --steps 2 --output {output}"
    )
    assert main.main(arguments.split()) == 0
    assert main.main(["report", str(output)]) == 0
    capsys.readouterr()
    for folder in (output, output / "hugging_face"):
        assert main.main(["predict", str(folder), "Shall I", "--top", "3"]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0] == "Shall I" and said[-1] == ""
    command = ["predict", str(output), "Shall I", "--tokens", "7", "--seed", "3"]
    assert main.main(command) == 0
    first = capsys.readouterr().out
    assert main.main(command) == 0
    assert capsys.readouterr().out == first and first.startswith("Shall I")
    assert main.main(["export", str(output), "--output", str(tmp_path / "saved")]) == 0
    assert (tmp_path / "saved" / "saved_model.pb").exists()
    assert main.main(["audit", "--run", str(output)]) in (0, 4)
