"""The generated module is what grpcio-tools makes of the schema."""

import pathlib
import sys

import pytest
from grpc_tools import protoc

from tff_dpftrl.runtime.protocol import wire_pb2

_PROTO = "tff_dpftrl/runtime/protocol/wire.proto"


def test_module_is_generated_from_the_schema(tmp_path):
    here = pathlib.Path(wire_pb2.__file__)
    root = here.parents[3]
    assert protoc.main(["", f"-I{root}", f"--python_out={tmp_path}", _PROTO]) == 0
    made = tmp_path / _PROTO.replace(".proto", "_pb2.py")
    assert made.read_text() == here.read_text(), (
        f"Run: python -m grpc_tools.protoc -I. --python_out=. {_PROTO}"
    )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
