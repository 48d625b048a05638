"""Folders of tasks: written whole, verified when read, bound to their terms."""

import dataclasses
import json
import os
import shutil
import types

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.plans import approvals, plan_pb2, signing
from tff_dpftrl.runtime.tasks import secure_groups, task_folder
from tff_dpftrl.runtime.tasks import terms as terms_lib

_OTHER_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))


@pytest.fixture(scope="module")
def process():
    return small_tasks.ROUNDS["blt"]()


@pytest.fixture(scope="module")
def folder(process, tmp_path_factory):
    """A folder that tests copy."""
    path = tmp_path_factory.mktemp("tasks") / "small"
    small_folder.write(path, process)
    return path


@pytest.fixture
def copied(folder, tmp_path):
    path = tmp_path / "small"
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def test_what_was_written_is_read(folder):
    found = task_folder.read(folder)
    assert found.name == "small"
    assert found.config == small_folder.CONFIG
    assert found.words.words == ("a", "b")
    unbound = dataclasses.replace(found.terms, server_plan="", files={})
    assert unbound == small_folder.TERMS
    assert found.terms.server_plan == found.signed.server.sha256.hex()
    assert task_folder.read(folder, small_tasks.KEYS).terms == found.terms
    assert found.terms.to_bytes() == (folder / "terms.json").read_bytes()
    # Or stores of tasks from before there was any would be refused.
    assert b"secure_aggregation" not in found.terms.to_bytes()
    key = signing_keys.load_public(folder / task_folder.PUBLIC_KEY)
    assert signing_keys.raw(key) == signing_keys.raw(small_tasks.KEYS[0])
    assert {file.name for file in folder.iterdir()} == {
        *("task.pb", "terms.json", "terms.sig", "signing_key.pub"),
        *("config.json", "examples.json", "vocabulary.json", "README.md"),
    }


def test_a_folder_of_before_there_was_a_choice_has_philox(folder, process, tmp_path):
    options = small_folder.CONFIG.to_dict()
    assert options.pop("noise") == "secure"
    options["engine"] = "compiled"  # It was an option that tasks had, too.
    earlier = types.SimpleNamespace(to_dict=lambda: options)
    small_folder.write(tmp_path / "earlier", process, config=earlier)
    found = task_folder.read(tmp_path / "earlier").config
    assert found == small_folder.CONFIG.changed(noise="philox")
    # One that names it keeps what it names.
    assert task_folder.read(folder).config.noise == "secure"


def test_approvals_travel_with_the_plans_of_this_task_alone(copied, process, tmp_path):
    reviewers = approvals.Reviewers({"Alice": _OTHER_KEY.public_key()})
    plain = task_folder.read(copied).signed
    with pytest.raises(signing.PlanRefusedError, match="0 of the 1 approvals"):
        reviewers.check(plain.server, "small")
    signed = task_folder.approve(copied, _OTHER_KEY).signed
    for plan in (signed.server, *signed.devices):
        assert reviewers.check(plan, "small") == ("Alice",)
    assert [plan.plan for plan in signed.devices] == [plan.plan for plan in plain.devices]
    with pytest.raises(ValueError, match="builder's own approval"):
        task_folder.approve(copied, small_tasks.KEY)
    # A task that differs in one number of its terms, or in its plans, is another one.
    other_terms = dataclasses.replace(small_folder.TERMS, num_devices=101)
    other_plans = small_folder.plans(process)
    other_plans.devices[0].limits.seconds += 1
    for name, built, terms in (
        ("terms", small_folder.plans(process), other_terms),
        ("plans", other_plans, small_folder.TERMS),
    ):
        small_folder.write_plans(tmp_path / name, built, terms=terms)
        shutil.copytree(copied / "approvals", tmp_path / name / "approvals")
        with pytest.raises(signing.PlanRefusedError, match=r"Alice \(not of this task\)"):
            reviewers.check(task_folder.read(tmp_path / name).signed.server, "small")


def test_approvals_of_copies_of_the_folder_add_up(copied):
    for seed in (7, 8):
        task_folder.approve(
            copied, ed25519.Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
        )
    assert len(list((copied / "approvals").iterdir())) == 2
    assert len(task_folder.read(copied).signed.server.approvals.approvals) == 2
    (copied / "approvals/notes.sig").write_text("")
    with pytest.raises(ValueError, match="notes.sig is not named by a key: remove it"):
        task_folder.read(copied)


@pytest.mark.slow
def test_terms_of_secure_aggregation_are_those_of_the_plans(tmp_path):
    stated = secure_groups.SecureGroups("honest-but-curious", least_group=2, threshold=0.5)
    terms = dataclasses.replace(small_folder.TERMS, secure_aggregation=stated)
    process = small_tasks.SECURE_ONLY_ROUNDS["secagg"]()
    plans = small_folder.plans(process, secure_aggregation=small_tasks.SECURE_AGGREGATION)
    small_folder.write_plans(tmp_path / "secure", plans, terms=terms)
    assert task_folder.read(tmp_path / "secure").terms.secure_aggregation == stated
    small_folder.write_plans(tmp_path / "silent", plans)
    more = dataclasses.replace(terms, secure_aggregation=dataclasses.replace(stated, least_group=3))
    small_folder.write_plans(tmp_path / "more", plans, terms=more)
    plans.devices[0].secure_aggregation.least_devices += 1
    small_folder.write_plans(tmp_path / "other", plans, terms=terms)
    plans.devices[0].ClearField("secure_aggregation")
    small_folder.write_plans(tmp_path / "devices in the clear", plans, terms=terms)
    for name in ("other", "devices in the clear"):
        with pytest.raises(ValueError, match="plans contradict each other: secure aggregation is"):
            task_folder.read(tmp_path / name)
    for plan in (plans.server, *plans.devices):
        plan.ClearField("secure_aggregation")
    small_folder.write_plans(tmp_path / "boasting", plans, terms=terms)
    for name in ("silent", "more", "boasting"):
        with pytest.raises(ValueError, match="terms contradict the plans: secure aggregation is"):
            task_folder.read(tmp_path / name)


def test_nothing_is_overwritten(folder, process):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(ValueError, match="never overwritten"):
        small_folder.write(folder, process)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_folder_that_cannot_be_written_leaves_nothing(process, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="the disk is full"):
        small_folder.write(tmp_path / "new" / "small", process)
    assert list((tmp_path / "new").iterdir()) == []


def test_another_key_is_not_trusted(folder):
    with pytest.raises(ValueError, match="refused: The plan is signed with the key"):
        task_folder.read(folder, [_OTHER_KEY.public_key()])


def test_no_folder_is_no_task(tmp_path):
    with pytest.raises(ValueError, match="make one with tff-dpftrl task new"):
        task_folder.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("terms.json", b'"noise_multiplier": 0.5', b'"noise_multiplier": 5.0', "terms were chan"),
        ("terms.json", b'"delta": 1e-05', b'"delta": 1e-15', "terms were changed"),
        ("config.json", b'"clients_per_round": 3', b'"clients_per_round": 2', "config.json is no"),
        ("vocabulary.json", b'"a"', b'"c"', "vocabulary.json is not the one"),
        ("task.pb", b"small", b"other", "changed or damaged"),
    ],
)
def test_changed_files_are_refused(copied, name, old, new, message):
    content = (copied / name).read_bytes()
    assert old in content
    (copied / name).write_bytes(content.replace(old, new))
    with pytest.raises(ValueError, match=f"is refused: .*{message}"):
        task_folder.read(copied)


def test_cut_and_missing_files_are_refused(copied):
    content = (copied / "task.pb").read_bytes()
    (copied / "task.pb").write_bytes(content[:-1])
    with pytest.raises(ValueError, match="cannot be read"):
        task_folder.read(copied)
    (copied / "task.pb").write_bytes(content)
    (copied / "terms.sig").unlink()
    with pytest.raises(ValueError, match="No such file.*terms.sig"):
        task_folder.read(copied)


@pytest.mark.parametrize("name", ["/dev/zero", "../../etc/passwd", "pipe", "out", "\ud800", ""])
def test_terms_bind_files_of_the_folder_alone(copied, monkeypatch, name):
    os.mkfifo(copied / "pipe")
    (copied / "out").symlink_to("/etc/hostname")
    terms = task_folder.read(copied).terms
    files = {**terms.files, name: "0" * 64}
    content, signature = dataclasses.replace(terms, files=files).signed(small_tasks.KEY)
    (copied / "terms.json").write_bytes(content)
    (copied / "terms.sig").write_bytes(signature)
    monkeypatch.setattr(task_folder, "_digest", lambda path: pytest.fail(f"{path} is opened"))
    with pytest.raises(ValueError, match="leads out|no regular file|no name of a file"):
        task_folder.read(copied)


@pytest.mark.parametrize("name", ["task.pb", "config.json", "approvals"])
def test_no_file_of_a_task_leads_out_of_it(copied, name):
    file = copied / name
    if name == "approvals":
        file.mkdir()
        file /= f"{'0' * 64}.sig"
    file.unlink(missing_ok=True)
    file.symlink_to(copied.parent / "elsewhere")
    (copied.parent / "elsewhere").write_bytes(b"")
    with pytest.raises(ValueError, match=f"{file.name}' leads out of the folder"):
        task_folder.read(copied)


@pytest.mark.parametrize("name", ["", "two\nlines", "\x1b[2J", "../up"])
@pytest.mark.parametrize("field", ["task", "population"])
def test_names_that_are_shown_are_names(field, name):
    with pytest.raises(ValueError, match=f"{field} must be a name of up to 100 letters"):
        dataclasses.replace(small_folder.TERMS, **{field: name})


def test_terms_of_other_plans_are_refused_whoever_signed_them(copied, process):
    """The same key signs a task with more noise; its terms do not fit the first plans."""
    noisy = dataclasses.replace(small_folder.TERMS, noise_multiplier=50.0)
    other = copied.parent / "noisy"
    small_folder.write(other, small_tasks.ROUNDS["adaptive"](), terms=noisy)
    for name in ("terms.json", "terms.sig"):
        (copied / name).write_bytes((other / name).read_bytes())
    with pytest.raises(ValueError, match="privacy terms are those of other plans"):
        task_folder.read(copied)


def test_terms_must_not_promise_less_participation_than_the_plans_allow(process, tmp_path):
    schema = schema_lib.MinSep(num_rounds=6, min_sep=3, max_participations=2)
    terms = dataclasses.replace(small_folder.TERMS, schema=schema)
    small_folder.write(tmp_path / "small", process, terms=terms)
    with pytest.raises(ValueError, match="terms contradict the plans"):
        task_folder.read(tmp_path / "small")


@pytest.mark.parametrize(
    "changed",
    [{"min_sep_rounds": 1}, pytest.param({"times_edges": [1, 2, 3, 6]}, marks=pytest.mark.slow)],
)
def test_device_plans_must_not_allow_more_participation_than_the_terms(process, tmp_path, changed):
    """Devices keep to their own plan, so ε would be of a schema that nobody enforces."""
    built = small_folder.plans(process)
    for name, value in changed.items():
        kept = built.devices[0].participation
        if name == "times_edges":
            del kept.times_edges[:]
            kept.times_edges.extend(value)
        else:
            setattr(kept, name, value)
    small_folder.write_plans(tmp_path / "small", built)
    with pytest.raises(ValueError, match="participation is another one for devices"):
        task_folder.read(tmp_path / "small")


def test_a_plan_without_a_largest_number_of_times_is_refused(process, tmp_path):
    built = small_folder.plans(process)
    for plan in (built.server, *built.devices):
        plan.participation.ClearField("times_edges")
    small_folder.write_plans(tmp_path / "small", built)
    with pytest.raises(ValueError, match="times_edges must increase, from 1"):
        task_folder.read(tmp_path / "small")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("files", 0.5),
        ("files", {"config.json": None}),
        ("parameters", {"clients_per_round": []}),
        ("population", None),
        ("vocabulary_is_public", "no"),
        ("num_devices", "100"),
        ("clip_norm", "1"),
        ("max_epsilon", False),
    ],
)
def test_terms_of_another_type_are_refused_by_name(name, value):
    key = small_tasks.KEY
    values = json.loads(small_folder.TERMS.to_bytes())
    assert name in values
    content = json.dumps(values | {name: value}).encode()
    signature = signing.key_name(key.public_key()) + key.sign(terms_lib._signed(content))
    with pytest.raises(terms_lib.TermsRefusedError, match=f"{name} must"):
        terms_lib.verified(content, signature, small_tasks.KEYS)


def test_terms_signed_by_somebody_else_are_refused(copied):
    found = task_folder.read(copied)
    content, signature = found.terms.signed(_OTHER_KEY)
    (copied / "terms.sig").write_bytes(signature)
    with pytest.raises(ValueError, match="terms are signed with the key .* which is not trusted"):
        task_folder.read(copied)
    (copied / "terms.sig").write_bytes(b"")
    with pytest.raises(ValueError, match="not trusted"):
        task_folder.read(copied)
    # A signature of a plan is none of terms.
    signed = plan_pb2.SignedTask.FromString((copied / "task.pb").read_bytes())
    (copied / "terms.sig").write_bytes(signed.server.key + signed.server.signature)
    with pytest.raises(ValueError, match="terms were changed"):
        task_folder.read(copied)
