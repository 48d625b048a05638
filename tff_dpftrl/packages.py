"""Packages that only some work needs, and the extras of this package that bring them."""

from __future__ import annotations

import importlib.util
import itertools
import sys

from tff_dpftrl import validation

EXTRAS = {
    "plots": ("matplotlib",),
    "postgresql": ("psycopg2",),
    "distributed": ("ray",),
    "finetuning": (
        *("tensorflow", "pyarrow", "tomli", "safetensors", "tokenizers", "datasketch"),
        "matplotlib",
    ),
    "devices": ("tensorflow", "pyarrow", "tomli", "cryptography", "google.protobuf", "grpc"),
    "server": (
        *("tensorflow", "cryptography", "google.protobuf", "grpc"),
        *("prometheus_client", "sqlalchemy", "tornado"),
    ),
}
"""Modules that each extra brings."""

NAMES = {"google": "protobuf", "grpc": "grpcio", "psycopg2": "psycopg2-binary"}
"""Names of packages whose modules have another one."""

_COMMANDS = {  # Its extra cannot be installed by name (docs/reference/environments.md).
    "tensorflow_federated": "with Python 3.11, pip install --no-deps --require-hashes -r "
    "requirements/tff.lock"
}


def is_missing(module: str) -> bool:
    """Returns whether a module is not installed; it is not imported."""
    if module in sys.modules:
        return sys.modules[module] is None
    parent = module.rpartition(".")[0]
    return bool(parent and is_missing(parent)) or importlib.util.find_spec(module) is None


def remedy(*modules: str) -> str:
    """Says that modules are not installed, and the one command that installs all of them."""
    wanted = list(dict.fromkeys(module.partition(".")[0] for module in modules))
    names = [NAMES.get(module, module) for module in wanted]
    are = "which is" if len(names) == 1 else "which are"
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"{listed}, {are} not installed: {_command(wanted)} (docs/reference/environments.md)"


def _command(wanted: list[str]) -> str:
    """Returns the command that installs packages, with as few extras as there can be."""
    for module in filter(_COMMANDS.get, wanted):
        return _COMMANDS[module]
    for number in range(1, len(EXTRAS) + 1):
        for extras in itertools.combinations(EXTRAS, number):
            brought = {module.partition(".")[0] for name in extras for module in EXTRAS[name]}
            if brought.issuperset(wanted):
                return f"pip install 'tff_dpftrl[{','.join(extras)}]'"
    return f"install {' and '.join(wanted)}"


def require(what: str, *modules: str) -> None:
    """Refuses `what`, the subject of a sentence, if one of the modules is missing."""
    if missing := list(filter(is_missing, modules)):
        raise validation.UsageError(f"{what} needs {remedy(*missing)}.")
