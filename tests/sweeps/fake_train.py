"""Stands for `tff-dpftrl train` and `finetune` in tests of sweeps: writes a run's files in no time.

Accuracy is 0.3 - noise_multiplier / 20 + seed / 100 after the last round, and half of it
half-way; ε is 8 / noise_multiplier. What goes wrong is asked for by options that mean
nothing here: `eval_sequences` 1 fails, 2 fails unless it is resumed, 3 waits for a signal
after the first round unless it is resumed.
"""

import json
import os
import pathlib
import signal
import sys
import time


def _value(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def _write_rounds(folder, rows):
    head = "round,eval_top1_in_vocab,eval_loss,seconds"
    lines = [",".join("" if v is None else repr(v) for v in row) for row in rows]
    _write(folder / "metrics.csv", "\n".join([head, *lines]) + "\n")


def main():
    command, *arguments = sys.argv[1:]
    flags = [argument.lstrip("-").partition("=") for argument in arguments]
    given = {name.replace("-", "_"): _value(text) for name, _, text in flags}
    folder = pathlib.Path(given.pop("output"))
    is_resumed = "resume" in given
    if is_resumed:
        given = json.loads((folder / "config.json").read_text())["config"]
    with open(folder / "starts", "a") as file:
        file.write("resume\n" if is_resumed else "begin\n")
    trouble, rounds = given.get("eval_sequences"), given.get("num_rounds") or given["num_steps"]
    noise, seed = given.get("noise_multiplier", 0.0), given.get("seed", 0)
    derived = {
        "strategy": {"mechanism": "tree", "num_rounds": rounds, "variance_reduction": True},
        "noise_multiplier": noise,
    }
    config = dict(given)
    manifest = {"config": config, "derived": derived, "facts": {"num_parameters": 1234}}
    _write(folder / "config.json", json.dumps(manifest))
    accuracy = 0.3 - noise / 20 + seed / 100
    rows = [(t + 1, None, None, 0.5) for t in range(rounds)]
    rows[rounds // 2 - 1] = (rounds // 2, accuracy / 2, 4.0, 0.5)
    rows[-1] = (rounds, accuracy, 3.0, 0.5)
    if trouble == 1 or (trouble == 2 and not is_resumed):
        sys.exit(f"tff-dpftrl {command}: Training diverged.")
    if trouble == 3 and not is_resumed:
        _write_rounds(folder, rows[:1])
        _write(folder / "pid", str(os.getpid()))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        time.sleep(600)
    _write_rounds(folder, rows)
    parameters = {"noise_multiplier": noise}
    if "simulate_report_goal" in given:
        parameters |= {"simulated_epsilon": 4 / noise, "simulated_noise_multiplier": noise}
    statement = {"epsilon": 8 / noise if noise else None, "parameters": parameters}
    statement["delta"] = given.get("delta", 1e-3)
    _write(folder / "privacy_statement.json", json.dumps(statement))
    _write(folder / "private" / "baselines.json", '{"bigrams": 0.2}')


if __name__ == "__main__":
    main()
