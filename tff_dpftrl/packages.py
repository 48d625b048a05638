"""Packages that only some work needs, and the extras of this package that bring them."""

from __future__ import annotations

import importlib.util
import sys

from tff_dpftrl import validation

EXTRA_OF = {
    "tensorflow_federated": "tff",
    "tensorflow": "finetuning",
    "datasketch": "finetuning",
    "pyarrow": "finetuning",
    "safetensors": "finetuning",
    "tokenizers": "finetuning",
    "tomli": "finetuning",
    "cryptography": "devices",
    "google": "devices",
    "grpc": "devices",
    "prometheus_client": "server",
    "sqlalchemy": "server",
    "tornado": "server",
    "psycopg2": "postgresql",
    "ray": "distributed",
    "matplotlib": "plots",
}
"""The extra that brings a module, by the module's name."""


def is_missing(module: str) -> bool:
    """Returns whether a module is not installed; it is not imported."""
    if module in sys.modules:
        return sys.modules[module] is None
    return importlib.util.find_spec(module) is None


def remedy(module: str) -> str:
    """Says that a module is not installed, and which extra of this package brings it."""
    name = module.partition(".")[0]
    extra = EXTRA_OF.get(name)
    install = f"install {name}" if extra is None else f"pip install 'tff_dpftrl[{extra}]'"
    return f"{module}, which is not installed: {install} (docs/reference/environments.md)"


def require(what: str, *modules: str) -> None:
    """Refuses work for lack of a package, before any of the work is done.

    Args:
      what: The work, as the subject of a sentence.
      *modules: Names of the modules that it needs.

    Raises:
      UsageError: If one of them is not installed.
    """
    for module in filter(is_missing, modules):
        raise validation.UsageError(f"{what} needs {remedy(module)}.")
