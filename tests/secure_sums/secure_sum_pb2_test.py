"""The generated module is what grpcio-tools makes of the schema."""

from tests import generated_module
from tff_dpftrl.secure_sums import secure_sum_pb2

_PROTO = "tff_dpftrl/secure_sums/secure_sum.proto"


def test_module_is_generated_from_the_schema(tmp_path):
    generated_module.assert_is_made_of(_PROTO, secure_sum_pb2, tmp_path)
