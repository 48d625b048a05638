"""Tests of the texts of simulated devices."""

import json

from tff_dpftrl.runtime.tasks import language_task, task_config


def test_a_proxy_gives_its_newest_texts_first(tmp_path):
    for name, texts in (("p", ["one", "two", "three"]), ("d", ["four", "five"])):
        lines = [json.dumps({"user_id": f"{name}{i}", "examples": texts[i:]}) for i in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    config = task_config.TaskConfig.of(
        population="toy",
        num_devices=100,
        noise_multiplier=1.0,
        data=str(tmp_path / "d.jsonl"),
        proxy_data=str(tmp_path / "p.jsonl"),
        proxy_devices=2,
        max_examples=2,
        text_feature="said",
    )
    assert (
        language_task.read_proxies(config.definition, config.devices.max_examples)
        == [[{"said": "three"}, {"said": "two"}]] * 2
    )
