"""Tests of the texts of simulated devices."""

import json
import sys

import pytest

from tff_dpftrl.data import tables
from tff_dpftrl.runtime.tasks import proxies


def test_a_proxy_gives_its_newest_texts_first(tmp_path):
    for name, texts in (("p", ["one", "two", "three"]), ("d", ["four", "five"])):
        lines = [json.dumps({"user_id": f"{name}{i}", "examples": texts[i:]}) for i in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    read = proxies.read(
        str(tmp_path / "p.jsonl"),
        num_devices=2,
        max_examples=2,
        text_feature="said",
        pretokenized=False,
        protected=str(tmp_path / "d.jsonl"),
        table=tables.TableOptions(),
    )
    assert read == [[{"said": "three"}, {"said": "two"}]] * 2


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
