"""What is run, at which learning rate, and what the table says of it."""

import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "experiments"))
import adapters_text


class _Corpus:
    """A corpus on which adapters like small rates, and all weights like large ones."""

    def __init__(self, data, initial_weights):
        assert (data, initial_weights) in (("users", "a"), ("users", "b"))

    def train(self, rank, rate):
        self._loss = 4.0 + (1.0 / rate if rank is None else rate)

    def row(self, cell):
        self.measured = {"bits_per_character": 2.0 + cell.seed}
        return {"loss": f"{self._loss:.5g}"}

    before = {"bits_per_character": 5.0}


def test_each_part_is_trained_at_its_best_rate_once(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters_text, "Corpus", _Corpus)
    path = tmp_path / "seeds.csv"
    for _ in range(2):  # There is nothing left for the second time.
        adapters_text.run(path, "users", {"words": "a", "wordpiece": "b"})
        rows = adapters_text.read(path)
        num_rates = sum(map(len, adapters_text.RATES.values()))
        assert len(rows) == num_rates + 2 * (3 * 7 + 2)
    table = adapters_text.summary(rows)
    rates = {(row["trained"], row["learning rate"]) for row in table}
    assert rates == {
        ("all weights", f"{max(adapters_text.RATES[None]):g}"),
        *((f"rank {rank}", f"{min(adapters_text.RATES[8]):g}") for rank in (4, 8)),
    }
    assert len(table) == 2 * (7 + 2)
    assert [row["seeds"] for row in table] == (["3"] * 7 + ["1"] * 2) * 2
    first = table[0]
    assert first["bits per character"] == "3.000 ± 0.577"
    assert first["gain on the pretrained, bits"] == "2.000 ± 0.577"
    assert float(first["perplexity per character"].split()[0]) == pytest.approx(28 / 3, abs=1e-3)
