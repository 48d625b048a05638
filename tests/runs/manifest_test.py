"""Tests of the manifest: a run is resumed with what it began with, or not at all."""

import json
import os
import stat

import pytest

from tff_dpftrl import private_round
from tff_dpftrl.runs import manifest


def _manifest(**changes) -> manifest.Manifest:
    fields = {
        "config": {"noise_multiplier": 0.5, "data": "docs", "max_users": None},
        "derived": {"schema": {"num_rounds": 3, "min_sep": 1}, "starts": [0, 2]},
        "facts": {"training_users": 7},
        "identities": {"training users": manifest.identity(["a", "b"])},
    }
    return manifest.Manifest(**fields | changes)


def _write(made, folder):
    made.keep(folder)
    made.publish(folder)


@pytest.fixture
def output(tmp_path):
    """The folder of a run that has just begun."""
    (tmp_path / "private").mkdir(mode=0o700)
    assert not manifest.exists(tmp_path)
    _write(_manifest(), tmp_path)
    assert manifest.exists(tmp_path)
    return tmp_path


def _edit(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_round_trip(output):
    read = manifest.read(output)
    assert read == _manifest()
    assert read.digest == _manifest().digest


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"num_rounds": 3}, manifest.TRAINING),
        ({"num_steps": 3}, manifest.FINETUNING),
        ({"own_model": True}, manifest.CUSTOM_FINETUNING),
    ],
)
def test_a_run_from_before_kinds_were_recorded_is_told_by_its_options(tmp_path, config, kind):
    (tmp_path / "private").mkdir()
    older = _manifest(config=config)
    _write(older, tmp_path)
    assert "kind" not in json.loads((tmp_path / "config.json").read_text())
    assert manifest.read(tmp_path).kind == kind
    assert manifest.read(tmp_path).digest == older.digest  # Its checkpoints are bound to it.
    newer = _manifest(config=config, recorded_kind=kind)
    assert newer.digest != older.digest
    (tmp_path / "config.json").unlink()
    _write(newer, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["kind"] == kind
    assert manifest.read(tmp_path) == newer
    newer.check_kind(kind, tmp_path)
    other = manifest.FINETUNING if kind == manifest.TRAINING else manifest.TRAINING
    with pytest.raises(ValueError, match=f"resume it by .* {tmp_path}, or report it by tff-dpftrl"):
        newer.check_kind(other, tmp_path)


def test_a_kind_of_a_later_version_is_refused(tmp_path):
    (tmp_path / "private").mkdir()
    _write(_manifest(recorded_kind="distillation"), tmp_path)
    with pytest.raises(ValueError, match="its kind is unknown. Restore it, or use the version"):
        manifest.read(tmp_path)


def test_users_are_identified_in_private_only(output):
    digest = _manifest().identities["training users"]
    assert digest not in (output / "config.json").read_text()
    copy = output / "private" / "manifest.json"
    assert digest in copy.read_text() and stat.S_IMODE(copy.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"noise_multiplier": 0.6, "data": "docs", "max_users": None}},
        {"derived": {}},
        {"facts": {"training_users": 8}},
        {"identities": {"training users": manifest.identity(["a", "c"])}},
    ],
)
def test_the_digest_covers_everything(changes):
    assert _manifest(**changes).digest != _manifest().digest


def test_the_digest_covers_the_version_of_the_noise(monkeypatch):
    before = _manifest().digest
    monkeypatch.setattr(private_round, "NOISE_VERSION", private_round.NOISE_VERSION + 1)
    assert _manifest().digest != before


@pytest.mark.parametrize("name", ["config.json", "private/manifest.json"])
def test_a_change_is_refused_and_named(output, name):
    _edit(output / name, lambda content: content["config"].update(noise_multiplier=50.0))
    change = "0.5 → 50.0" if name == "config.json" else "50.0 → 0.5"
    with pytest.raises(ValueError, match=rf"config.noise_multiplier: {change}"):
        manifest.read(output)


def test_a_change_deep_within_and_a_new_key_are_named(output):
    def edit(content):
        content["derived"]["schema"]["min_sep"] = 2
        content["config"]["surprise"] = 1

    _edit(output / "config.json", edit)
    with pytest.raises(ValueError) as caught:
        manifest.read(output)
    assert "config.surprise: null → 1; derived.schema.min_sep: 1 → 2" in str(caught.value)


def test_only_the_copy_with_the_users_digests_is_private(tmp_path):
    (tmp_path / "private").mkdir()
    before = os.umask(0o022)
    try:
        _write(_manifest(), tmp_path)
    finally:
        os.umask(before)
    modes = {
        name: stat.S_IMODE((tmp_path / name).stat().st_mode)
        for name in ("config.json", "private/manifest.json")
    }
    assert modes == {"config.json": 0o644, "private/manifest.json": 0o600}


def test_versions_are_those_that_the_run_began_on(output):
    _edit(output / "config.json", lambda content: content["versions"].update(numpy="9.9"))
    with pytest.raises(ValueError, match=r"versions.numpy: .* → .*9\.9"):
        manifest.read(output)
    # Earlier versions did not bind them.
    _edit(output / "private/manifest.json", lambda content: content.pop("versions"))
    assert manifest.read(output) == _manifest()


def test_another_version_of_the_noise_is_refused(output, monkeypatch):
    now = private_round.NOISE_VERSION
    monkeypatch.setattr(private_round, "NOISE_VERSION", now + 1)
    assert manifest.read(output) == _manifest(noise_version=now)
    monkeypatch.setattr(private_round, "STATE_VERSION", now + 1)
    with pytest.raises(ValueError, match=f"is of version {now}, that of .* {now + 1}"):
        manifest.read(output)


def test_a_run_without_its_private_copy_is_refused(output):
    (output / "private" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="nobody can tell what was run"):
        manifest.read(output)


def test_a_run_that_has_lost_its_public_copy_is_still_one(output):
    path = output / "config.json"
    lost = path.read_bytes()
    path.unlink()
    with pytest.raises(ValueError, match="already holds a run: add --resume"):
        manifest.check_is_free(output)
    assert manifest.read(output) == _manifest()
    manifest.read(output).publish(output)
    assert path.read_bytes() == lost


@pytest.mark.parametrize(
    "name, what",
    [
        ("task.pb", "a task for devices, which tff-dpftrl task report"),
        ("pretraining.json", "a model of tff-dpftrl pretrain"),
        ("sweep.json", "a sweep, which"),
    ],
)
def test_the_folder_of_something_else_is_named(tmp_path, output, name, what):
    other = tmp_path / "other"
    other.mkdir()
    (other / name).touch()
    (other / "config.json").write_text("{}")  # A task has one, too.
    with pytest.raises(ValueError, match=f"There is no run in .*other: it is {what}"):
        manifest.read(other)
    (output / name).touch()  # In the folder of a run it is no sign of anything.
    manifest.read(output)


def test_a_run_from_before_manifests_were_bound_is_refused(output):
    _edit(output / "config.json", lambda content: content.pop("format"))
    with pytest.raises(ValueError, match="format 1, which did not bind a run .* start a new run"):
        manifest.read(output)


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_what_is_no_manifest_is_refused(output, text):
    (output / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="manifest of a run"):
        manifest.read(output)


def test_other_users_are_refused_and_their_order_counts(output):
    known = manifest.read(output)
    known.check_identities({"training users": ["a", "b"]}, remedy="restore the data")
    for users in (["b", "a"], ["a", "b", "c"], ["a\nb"]):
        with pytest.raises(ValueError, match="training users are no longer .* restore the data"):
            known.check_identities({"training users": users}, remedy="restore the data")


def test_other_texts_of_the_same_users_are_refused_where_theirs_are_known():
    users = {"training users": ["a", "b"]}
    begun = manifest.Manifest({}, {}, {}, manifest.identities({**users, manifest.TEXTS: ["x"]}))
    begun.check_identities({**users, manifest.TEXTS: ["x"]}, remedy="restore the data")
    with pytest.raises(ValueError, match="texts of the training users are no longer those"):
        begun.check_identities({**users, manifest.TEXTS: ["y"]}, remedy="restore the data")
    # A run that began before texts had an identity goes on.
    earlier = manifest.Manifest({}, {}, {}, manifest.identities(users))
    earlier.check_identities({**users, manifest.TEXTS: ["y"]}, remedy="restore the data")
    with pytest.raises(ValueError, match="words are no longer those"):
        earlier.check_identities({"words": ["y"]}, remedy="restore the data")


def test_a_folder_is_free_or_refused(output, tmp_path):
    with pytest.raises(ValueError, match="already holds a run: add --resume"):
        manifest.check_is_free(output)
    manifest.check_is_free(tmp_path / "new" / "folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a folder"):
        manifest.check_is_free(tmp_path / "file")
    (tmp_path / "other").mkdir()
    for name in ("model.npz", "weights.npz", "vocabulary.json", "metrics.csv"):
        (tmp_path / "other" / name).touch()
        with pytest.raises(ValueError, match=f"already holds {name}, .* name another folder"):
            manifest.check_is_free(tmp_path / "other")
        (tmp_path / "other" / name).unlink()
    with pytest.raises(ValueError, match="There is no run in"):
        manifest.read(tmp_path / "new")
