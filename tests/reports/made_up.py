"""Results folders of runs that did not take place, whose texts attack whoever shows them."""

import json
import pathlib

from tff_dpftrl.accounting import facts, guarantee, statement, statement_text
from tff_dpftrl.mechanisms import tree
from tff_dpftrl.participation import observed, schema

SCRIPT = "<script>window.hit=1</script>"
IMAGE = "\"><img src=x onerror='window.hit=1'>"
MARKDOWN = "| a [b](javascript:window.hit=1) `c` **d**"
EXACT_LOSS = "3.14159265358979"
EXACT_TOP1 = "0.271828182845904"
BIGRAMS = 0.161803398874989
_SCHEMA = schema.MinSep(4, 2, 2)


def stated(unit="user", *, noise_multiplier=2.0, delta=1e-5, data=f"{SCRIPT}.csv"):
    """Makes the statement of a run of four rounds."""
    claim = guarantee.dp_ftrl_guarantee(
        tree.Tree(4), noise_multiplier=noise_multiplier, schema=_SCHEMA, delta=delta
    )
    return statement.dp_ftrl_statement(
        claim,
        facts.Facts(parameters={"data": data, "user": IMAGE}, vocabulary_is_public=True),
        unit_of_privacy=unit,
        num_users=40,
        observed=observed.Participation(4, 2, 2),
    )


def write_run(folder: pathlib.Path, claim=None, **options) -> pathlib.Path:
    """Writes the folder of a finished run, with everything that a page might show or leak."""
    claim = stated() if claim is None else claim
    private = folder / "private"
    private.mkdir(parents=True)
    config = {
        "format": 2,
        "kind": "training",
        "config": {"data": "/home/secret/users.csv", "strategy": SCRIPT, IMAGE: MARKDOWN} | options,
        "derived": {"schema": {"num_rounds": 4}},
        "facts": {"training_users": 40, "user_unit": SCRIPT, "vocabulary_source": MARKDOWN},
        "versions": {"tff_dpftrl": SCRIPT},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "privacy_statement.json").write_text(statement_text.to_json(claim))
    (folder / "privacy_statement.md").write_text(statement_text.markdown(claim))
    header = "round,loss,top1,epsilon,eval_loss,eval_top1_in_vocab,clients,seconds\n"
    rows = [
        f"{i},{EXACT_LOSS},{EXACT_TOP1},{i},{5 - i},{i / 20},37,1.41421356237\n"
        for i in range(1, 5)
    ]
    (folder / "metrics.csv").write_text(header + "".join(rows))
    baselines = {"unigrams": 0.1, "bigrams": BIGRAMS, "trigrams": 0.18}
    (private / "baselines.json").write_text(json.dumps(baselines))
    earlier = {"all": {"words": 9, "model": 0.2, "model_and_cache": 0.444}}
    (folder / "held_out.json").write_text(json.dumps({"round": 4, "earlier_text": earlier}))
    (folder / "vocabulary.json").write_text("{}")
    (folder / "model.npz").write_bytes(b"")
    return folder
