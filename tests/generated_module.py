"""Comparison of a generated module, and of its stubs for type checkers, with the schema."""

import pathlib

import google.protobuf
import pytest


def assert_is_made_of(proto, module, folder):
    """Checks that a module and its stubs are what grpcio-tools makes of its schema.

    Modules that protobuf 4 made work with the newer ones; theirs do not with protobuf 4.
    """
    if not google.protobuf.__version__.startswith("4."):
        pytest.skip("compared with what the protobuf of TFF's lock makes")
    protoc = pytest.importorskip("grpc_tools.protoc")
    here = pathlib.Path(module.__file__)
    root = here.parents[proto.count("/")]
    assert (
        protoc.main(["", f"-I{root}", f"--python_out={folder}", f"--pyi_out={folder}", proto]) == 0
    )
    for committed in (here, here.with_suffix(".pyi")):
        made = folder / pathlib.Path(proto).parent / committed.name
        assert made.read_text() == committed.read_text(), (
            f"Run: python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. {proto}"
        )
