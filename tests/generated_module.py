"""What the tests of generated modules share."""

import pathlib

from grpc_tools import protoc


def assert_is_made_of(proto, module, folder):
    """A module is what grpcio-tools makes of its schema."""
    here = pathlib.Path(module.__file__)
    root = here.parents[proto.count("/")]
    assert protoc.main(["", f"-I{root}", f"--python_out={folder}", proto]) == 0
    made = folder / proto.replace(".proto", "_pb2.py")
    assert made.read_text() == here.read_text(), (
        f"Run: python -m grpc_tools.protoc -I. --python_out=. {proto}"
    )
