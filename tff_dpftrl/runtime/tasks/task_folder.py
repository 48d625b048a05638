"""The folder of a task, as `tff-dpftrl task new` writes it and servers and devices use it.

    task.pb            the plans of server and devices, signed: plans.SignedTask
    terms.json, .sig   what the task promises of privacy, bound to plans and files, signed
    signing_key.pub    the public key of both signatures; devices must be given it
    config.json        the options, resolved
    examples.json      what devices store: kinds and shapes by name
    buckets.json       the histograms of a task that counts, with the names of their buckets
    vocabulary.json    the words of the model, and how text is split into them; not of own models
    README.md          all of it in words
    approvals/*.sig    signatures of reviewers, by their keys' names, of `tff-dpftrl task approve`

Nothing in it is secret, and nothing is changed after it was made; `tff-dpftrl task report` adds a
folder report/, and `approve` the approvals. The initial weights are in the server's plan.

What devices store: every example is a serialized `tf.train.Example` in the collection
`config.collection`, with the features of `examples.json`. For a language model, the bytes feature
`config.text_feature` holds a plain text, UTF-8 (or several). Preprocessing, such as splitting it
into words and their ids, is part of the plan: a device needs no vocabulary and nothing else beside
its plan and the key to trust.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric import ed25519
from google.protobuf import message

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.accounting import privacy_statement
from tff_dpftrl.data import vocabulary, vocabulary_file
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.device import named_tensors
from tff_dpftrl.runtime.plans import approvals, fresh_bits, plan_pb2, secure_report, signing
from tff_dpftrl.runtime.tasks import secure_groups, task_config
from tff_dpftrl.runtime.tasks import terms as terms_lib
from tff_dpftrl.training import options as options_lib

# Names of the files and folders above.
PLANS, TERMS, PUBLIC_KEY = "task.pb", "terms.json", "signing_key.pub"
EXAMPLES, BUCKETS = "examples.json", "buckets.json"
REPORT, APPROVALS = "report", "approvals"
_SIGNATURE, _CONFIG, _README, _APPROVAL = "terms.sig", "config.json", "README.md", ".sig"

FILES = (PLANS, TERMS, _SIGNATURE, PUBLIC_KEY, _CONFIG, EXAMPLES, BUCKETS)
FILES += (vocabulary_file.NAME, _README)
"""Names of all files that a task may have."""

REPEATS_NOISE = (
    "its noise follows from its state alone, as in version 0.4: never go on from a copy or backup "
    "of its store, whose rounds would have the same noise for other devices, which reveals them."
)
"""Sentence on a task that `repeats_noise`, after its name."""
_STATED = (
    "The noise follows from the state of the task alone, as in version 0.4: a copy or backup of "
    "the store that goes on repeats it for other devices, which reveals them."
)


@dataclasses.dataclass(frozen=True, eq=False)
class TaskFolder:
    """A task whose signatures were verified."""

    path: pathlib.Path  # Folder of the task.
    # Signed plans with their approvals, as devices get them; that of the server without its
    # content.
    signed: plan_pb2.SignedTask
    server: plan_pb2.ServerPlan  # Without `initialize`, which has the model's weights.
    devices: tuple[plan_pb2.DevicePlan, ...]  # One for each runtime version with its own variant.
    terms: terms_lib.Terms  # Privacy terms of the task.
    config: task_config.TaskConfig  # Options of the task.
    words: vocabulary.Vocabulary | None = None  # None if it is no language model of this package.
    rule: vocabulary.Rule | None = None  # Rule by which texts become words; None with `words`.
    buckets: Mapping[str, Sequence[str]] | None = None  # By histogram, if the task counts.

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.terms.task

    @property
    def repeats_noise(self) -> bool:
        """Whether a round that is made again from a state has the same noise."""
        server, terms = self.server, self.terms
        if terms.strategy is None or not terms.noise_multiplier or server.HasField("party_noise"):
            return False
        return not fresh_bits.are_read(server.finish.graph_def)

    def with_caveat(
        self, statement: privacy_statement.PrivacyStatement
    ) -> privacy_statement.PrivacyStatement:
        """Adds to the statement of the task that its noise repeats, if it does."""
        if not self.repeats_noise:
            return statement
        return dataclasses.replace(statement, caveats=(*statement.caveats, _STATED))

    def initialize(self) -> plan_pb2.Graph:
        """Reads the graph of the first state, with the initial weights, again if it is not here."""
        if self.server.HasField("initialize"):
            return self.server.initialize
        signed = plan_pb2.SignedTask.FromString((self.path / PLANS).read_bytes())
        if hashlib.sha256(signed.server.plan).digest() != self.signed.server.sha256:
            raise validation.UsageError(f"The task in {self.path} is refused: it was changed.")
        return plan_pb2.ServerPlan.FromString(signed.server.plan).initialize


def check_is_free(path: str | os.PathLike[str]) -> None:
    """Refuses a path where the folder of a task cannot be made."""
    path = pathlib.Path(path)
    if path.exists() or path.is_symlink():
        raise validation.UsageError(
            f"{path} exists already, and a task is never overwritten: name another folder."
        )


def write(
    path: str | os.PathLike[str],
    *,
    signed: plan_pb2.SignedTask,
    terms: terms_lib.Terms,
    options: Mapping[str, Any],
    features: Mapping[str, named_tensors.Feature],
    words: vocabulary.Vocabulary | None = None,
    rule: vocabulary.Rule | None = None,
    buckets: Mapping[str, Sequence[str]] | None = None,
    key: ed25519.Ed25519PrivateKey,
    readme: str,
) -> None:
    """Writes a task, whole or not at all; fills in the hashes of plan and files in its terms."""
    check_is_free(path)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with durable_files.new_folder(path) as folder:
        text = json.dumps(options, indent=2) + "\n"
        (folder / _CONFIG).write_text(text, encoding="utf-8")
        (folder / EXAMPLES).write_bytes(named_tensors.to_json(features))
        names = [_CONFIG, EXAMPLES]
        if words is not None and rule is not None:
            vocabulary_file.write(folder / vocabulary_file.NAME, words, rule)
            names.append(vocabulary_file.NAME)
        if buckets is not None:
            content = json.dumps({name: list(names) for name, names in buckets.items()}, indent=0)
            (folder / BUCKETS).write_text(content + "\n", encoding="utf-8")
            names.append(BUCKETS)
        bound = dataclasses.replace(
            terms,
            server_plan=signed.server.sha256.hex(),
            files={name: _digest(folder / name) for name in names},
        )
        content, signature = bound.signed(key)
        (folder / PLANS).write_bytes(signed.SerializeToString(deterministic=True))
        (folder / TERMS).write_bytes(content)
        (folder / _SIGNATURE).write_bytes(signature)
        (folder / PUBLIC_KEY).write_bytes(signing_keys.public_pem(key.public_key()))
        (folder / _README).write_text(readme, encoding="utf-8")


def read(
    path: str | os.PathLike[str],
    keys: Sequence[ed25519.Ed25519PublicKey] | None = None,
) -> TaskFolder:
    """Reads a task after all of it was verified.

    Without `keys`, the key in the folder is trusted, which shows damage, but not who made the task.
    """
    path = pathlib.Path(path)
    if not (path / PLANS).is_file():
        raise validation.UsageError(
            f"There is no task in {path}: make one with tff-dpftrl task new."
        )
    try:
        validation.file_in(path, PLANS, max_bytes=1 << 31)  # Protobuf's own limit.
        for name in FILES[1:]:
            if os.path.lexists(path / name):
                validation.file_in(path, name)
        if keys is None:
            keys = [bundled_key(path)]
        signed = plan_pb2.SignedTask.FromString((path / PLANS).read_bytes())
        server, devices = signing.verified_task(signed, keys)
        content, signature = (path / TERMS).read_bytes(), (path / _SIGNATURE).read_bytes()
        terms = terms_lib.verified(content, signature, keys)
        _check_bound(path, terms, signed, server, devices)
        _add_approvals(path, terms, signed)
        server.ClearField("initialize")
        signed.server.ClearField("plan")
        server, signed = _again(server), _again(signed)
        words = rule = None
        if vocabulary_file.NAME in terms.files:
            words, rule = vocabulary_file.read(path / vocabulary_file.NAME)
        buckets = None
        if BUCKETS in terms.files:
            buckets = json_text.parse((path / BUCKETS).read_text(encoding="utf-8"))
        values = json_text.parse((path / _CONFIG).read_text(encoding="utf-8"))
        # Before there was a choice, Philox drew the noise of all tasks.
        values = {"noise": "philox"} | values
        values.pop("engine", None)  # Of runs of earlier versions; tasks had it, too.
        config = options_lib.begun_from_mapping(values, _CONFIG, task_config.TaskConfig)
    except message.DecodeError:
        raise validation.UsageError(
            f"The task in {path} is refused: {PLANS} cannot be read."
        ) from None
    except (ValueError, OSError) as error:
        raise validation.UsageError(f"The task in {path} is refused: {error}") from error
    return TaskFolder(path, signed, server, devices, terms, config, words, rule, buckets)


def approve(path: str | os.PathLike[str], key: ed25519.Ed25519PrivateKey) -> TaskFolder:
    """Adds the approval of a reviewer to a task."""
    folder = read(path)
    content = approvals.unapproved(folder.signed, folder.terms.digest())
    approval = approvals.approve(content, key, folder.signed.server.key)
    (folder.path / APPROVALS).mkdir(exist_ok=True)
    file = folder.path / APPROVALS / f"{approval.key.hex()}{_APPROVAL}"
    durable_files.write(file, approval.signature)
    return read(path)


def _add_approvals(path: pathlib.Path, terms: terms_lib.Terms, signed: plan_pb2.SignedTask) -> None:
    """Puts the approvals of a task, which may be invalid, beside its plans."""
    given = approvals.unapproved(signed, terms.digest())
    for file in sorted((path / APPROVALS).glob(f"*{_APPROVAL}")):
        try:
            key = bytes.fromhex(file.stem)
        except ValueError:
            raise validation.UsageError(f"{file} is not named by a key: remove it.") from None
        validation.file_in(path, f"{APPROVALS}/{file.name}")
        given.approvals.add(key=key, signature=file.read_bytes())
    if given.approvals:
        for plan in (signed.server, *signed.devices):
            plan.approvals.CopyFrom(given)


_Message = TypeVar("_Message", bound=message.Message)


def _again(read: _Message) -> _Message:
    """Returns a copy of a message, without the memory of fields that were cleared."""
    return type(read).FromString(read.SerializeToString())


def bundled_key(path: str | os.PathLike[str]) -> ed25519.Ed25519PublicKey:
    """Reads the public key in a task's folder, which proves nothing about who made the task."""
    return signing_keys.load_public(pathlib.Path(path) / PUBLIC_KEY)


def _check_bound(
    path: pathlib.Path,
    terms: terms_lib.Terms,
    signed: plan_pb2.SignedTask,
    server: plan_pb2.ServerPlan,
    devices: Sequence[plan_pb2.DevicePlan],
) -> None:
    """Refuses terms of other plans or files, and terms that contradict the plans."""
    if terms.server_plan != signed.server.sha256.hex():
        raise terms_lib.TermsRefusedError("The privacy terms are those of other plans.")
    files = {name: validation.file_in(path, name) for name in terms.files}
    for name, digest in terms.files.items():
        if _digest(files[name]) != digest:
            raise terms_lib.TermsRefusedError(f"{name} is not the one that was signed.")
    kept = server.participation
    buckets = secure_report.buckets_of(kept)
    if (terms.population, terms.task) != (server.population, server.task) or (
        (terms.schema.min_sep, terms.schema.max_participations)
        != (kept.min_sep_rounds, buckets.times_edges[-1])
    ):
        raise terms_lib.TermsRefusedError("The privacy terms contradict the plans.")
    _check_secure_aggregation(terms.secure_aggregation, server)
    for device in devices:
        if device.participation != kept:  # What devices enforce is what the statement charges.
            raise terms_lib.TermsRefusedError(
                "The plans contradict each other: participation is another one for devices of "
                f"runtime version {device.least_runtime_version} than for the server."
            )
        if device.secure_aggregation != server.secure_aggregation or secure_report.is_asked_for(
            device
        ) != secure_report.is_asked_for(server):
            raise terms_lib.TermsRefusedError(
                "The plans contradict each other: secure aggregation is another one for devices "
                f"of runtime version {device.least_runtime_version} than for the server."
            )


def _check_secure_aggregation(
    stated: secure_groups.SecureGroups | None, server: plan_pb2.ServerPlan
) -> None:
    """Refuses terms that state another secure aggregation than devices demand."""
    in_plans = in_terms = None
    if secure_report.is_asked_for(server):
        asked = secure_report.parameters_of(server)
        in_plans = (asked.threat_model.value, asked.least_devices, asked.least_neighbours)
    if stated is not None:
        in_terms = (stated.threat_model, stated.least_group, stated.neighbours)
    if in_plans != in_terms:
        raise terms_lib.TermsRefusedError(
            f"The privacy terms contradict the plans: secure aggregation is {in_terms} in the "
            f"terms, and {in_plans} in the plans (threat model, least devices, least neighbours)."
        )


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
