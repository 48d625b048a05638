"""Comparison of a generated module, and of its stubs for type checkers, with the schema."""

import pathlib

from grpc_tools import protoc


def assert_is_made_of(proto, module, folder):
    """Checks that a module and its stubs are what grpcio-tools makes of its schema."""
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
