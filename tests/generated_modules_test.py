"""Generated modules, and their stubs for type checkers, are what grpcio-tools makes of schemas."""

import pathlib

import google.protobuf
import pytest

from tff_dpftrl.runtime.plans import plan_pb2
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.secure_sums import secure_sum_pb2


@pytest.mark.skipif(
    not google.protobuf.__version__.startswith("4."),
    reason="compared with what the protobuf of TFF's lock makes",
)
@pytest.mark.parametrize(
    ("proto", "module"),
    [
        ("tff_dpftrl/runtime/plans/plan.proto", plan_pb2),
        ("tff_dpftrl/runtime/protocol/wire.proto", wire_pb2),
        ("tff_dpftrl/secure_sums/secure_sum.proto", secure_sum_pb2),
    ],
)
def test_module_is_generated_from_the_schema(proto, module, tmp_path):
    """Modules that protobuf 4 made work with the newer ones; theirs do not with protobuf 4."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    here = pathlib.Path(module.__file__)
    root = here.parents[proto.count("/")]
    options = [f"-I{root}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    assert protoc.main(["", *options, proto]) == 0
    for committed in (here, here.with_suffix(".pyi")):
        made = tmp_path / pathlib.Path(proto).parent / committed.name
        assert made.read_text() == committed.read_text(), (
            f"Run: python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. {proto}"
        )
