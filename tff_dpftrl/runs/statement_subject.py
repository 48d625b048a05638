"""Names what the statement of a run is about: date, run, digests of its files, and versions.

A digest of the training data would tell whoever guesses the data that the guess is right. So it
is keyed with the key of the run's ledger: only those who hold `private/` can compute it.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import hmac
import importlib.metadata
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from tff_dpftrl import json_text
from tff_dpftrl.accounting import privacy_statement, statement_text
from tff_dpftrl.participation import ledger_file
from tff_dpftrl.runs import manifest

_KEY = ledger_file.key_path(pathlib.PurePath("private", "ledger.sqlite"))
DATE = "date"
"""Name of the entry that says when a statement was first written as it is."""
KEYED = ("run", "data_hmac_sha256", privacy_statement.KEYED_DIGEST)
"""Names of the entries that need the key."""


def now() -> str:
    """Returns the time in UTC, to the second, in ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def of_run(output: pathlib.Path, model_file: str) -> dict[str, str]:
    """Describes a run by the files in its folder, as the entries of a statement's `subject`.

    Entries that need a file which is not there are left out; a damaged file is refused.
    """
    subject = {DATE: now()}
    key = _key(output)
    if key is not None:
        subject["run"] = _keyed(key, "run", b"")[:16]
    if (output / model_file).exists():
        subject[_name(model_file)] = sha256(output / model_file)
    subject[_name(manifest.NAME)] = sha256(output / manifest.NAME)
    if key is not None and (output / manifest.COPY).exists():
        identities = json_text.read_object(output / manifest.COPY).get("identities", {})
        text = json.dumps(identities, sort_keys=True)
        subject["data_hmac_sha256"] = _keyed(key, "data", text.encode())
    versions = json_text.read_object(output / manifest.NAME).get("versions", {})
    if "tensorflow" in versions:
        subject["tensorflow"] = versions["tensorflow"]
    return subject


def of_task(name: str, terms_digest: str, model: pathlib.Path) -> dict[str, str]:
    """Describes a served task, whose data stays on the devices and has no digest.

    `name` has the names of population and task; `terms_digest` is the SHA-256 (hex) of the signed
    terms. The entry "tensorflow" is the version that reports.
    """
    return {
        DATE: now(),
        "run": name,
        "model_sha256": sha256(model),
        "terms_sha256": terms_digest,
        "tensorflow": importlib.metadata.version("tensorflow"),
    }


def bound(
    output: pathlib.Path, statement: privacy_statement.PrivacyStatement
) -> privacy_statement.PrivacyStatement:
    """Returns a statement with the digests by which an edit of any of its entries is found.

    The keyed digest needs `private/` in the folder that the statement is written to.
    """
    # Entries of the run are removed where this statement was made from a run's statement.
    kept = {k: v for k, v in statement.subject.items() if k not in privacy_statement.DIGESTS}
    made = digests(output, json.loads(statement_text.to_json(statement)))
    return dataclasses.replace(statement, subject=kept | made)


def digests(output: pathlib.Path, values: Mapping[str, Any]) -> dict[str, str]:
    """Computes the digests of a statement in JSON, the keyed one if the folder has the key."""
    made, key = {privacy_statement.DIGEST: privacy_statement.digest(values)}, _key(output)
    if key is not None:
        text = made[privacy_statement.DIGEST].encode()
        made[privacy_statement.KEYED_DIGEST] = _keyed(key, "statement", text)
    return made


def says_the_same(
    one: privacy_statement.PrivacyStatement, other: privacy_statement.PrivacyStatement
) -> bool:
    """Returns whether two statements are the same but for the date, of the same files."""
    passing = {DATE, *privacy_statement.DIGESTS}
    subjects = (
        {name: value for name, value in each.subject.items() if name not in passing}
        for each in (one, other)
    )
    return one == other and next(subjects) == next(subjects)


def _key(output: pathlib.Path) -> bytes | None:
    return (output / _KEY).read_bytes() if (output / _KEY).exists() else None


def _name(file: str) -> str:
    return f"{pathlib.PurePath(file).stem}_sha256"


def _keyed(key: bytes, purpose: str, content: bytes) -> str:
    message = f"tff_dpftrl statement: {purpose}\n".encode() + content
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def sha256(path: pathlib.Path) -> str:
    """Computes the SHA-256 of a file, hexadecimal, as `sha256sum` prints it."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
