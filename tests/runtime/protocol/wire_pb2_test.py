"""The generated module is what grpcio-tools makes of the schema."""

from tests import generated_module
from tff_dpftrl.runtime.protocol import wire_pb2

_PROTO = "tff_dpftrl/runtime/protocol/wire.proto"


def test_module_is_generated_from_the_schema(tmp_path):
    generated_module.assert_is_made_of(_PROTO, wire_pb2, tmp_path)
