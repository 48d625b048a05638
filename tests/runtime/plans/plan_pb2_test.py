"""The generated module is what grpcio-tools makes of the schema."""

from tests import generated_module
from tff_dpftrl.runtime.plans import plan_pb2

_PROTO = "tff_dpftrl/runtime/plans/plan.proto"


def test_module_is_generated_from_the_schema(tmp_path):
    generated_module.assert_is_made_of(_PROTO, plan_pb2, tmp_path)
