"""Fine-tunes the checkpoints beside it, and has transformers and peft load what comes of it.

The first command runs in this package's environment, the second one where torch, transformers and
peft are installed, which this package does not need:

    python tests/models/checkpoints/compare_results.py write FOLDER
    pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy
    python tests/models/checkpoints/compare_results.py load FOLDER

`results_in_transformers.txt` has what it printed.
"""

import pathlib
import sys

import numpy as np

_HERE = pathlib.Path(__file__).parent
_TEXT = "Shall I compare thee"
_LENGTH = 16
_CASES = [
    (name, rank)
    for name in ("gpt2", "gpt2_half", "llama_grouped_tied", "llama_untied", "llama_wide_heads")
    for rank in (None, 2)
]


def _write(folder: pathlib.Path) -> None:
    from tff_dpftrl.data import split, user_text
    from tff_dpftrl.finetuning import config as config_lib
    from tff_dpftrl.finetuning import run
    from tff_dpftrl.training import trained_model

    parts = [
        user_text.UserText.from_mapping(
            part, {f"{part} {i}": [f"{_TEXT} {i}", "to a summer's day"] for i in range(40)}
        )
        for part in ("train", "validation", "test")
    ]
    for name, rank in _CASES:
        output = folder / f"{name}_{rank}"
        config = config_lib.FinetuningConfig(
            data=parts[0].name,
            initial_weights=str(_HERE / name),
            adapter_rank=rank,
            sequence_length=_LENGTH,
            sampling="user",
            group_size=2,
            cohort_size=8,
            clip_norm=1.0,
            target_epsilon=8.0,
            learning_rate=0.05,
            num_steps=3,
        )
        run.finetune(config, output, text=split.UserSplit(*parts))
        trained = trained_model.find(output).load()
        ids = trained.words.ids(trained.rule.words(_TEXT))
        padded = np.pad(ids, [0, _LENGTH - len(ids)])[None].astype(np.int32)
        scores = trained.model.logits(trained.weights, padded).numpy()[0, : len(ids), 1:]
        np.savez(folder / f"{output.name}.npz", ids=np.array(ids) - 1, scores=scores)


def _load(folder: pathlib.Path) -> None:
    import peft
    import torch
    import transformers

    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"peft {peft.__version__}. Largest difference of a score of {_TEXT!r}, and of scores of "
        "the model before fine-tuning for comparison:"
    )
    for name, rank in _CASES:
        run = folder / f"{name}_{rank}"
        with np.load(folder / f"{run.name}.npz") as ours:
            ids, scores = torch.tensor(ours["ids"])[None], ours["scores"]
        tokenizer = transformers.AutoTokenizer.from_pretrained(run / "hugging_face")
        assert tokenizer(_TEXT, add_special_tokens=False)["input_ids"] == ids[0].tolist()
        load = transformers.AutoModelForCausalLM.from_pretrained
        models = {
            "merged": load(run / "hugging_face", dtype=torch.float32),
            "before": load(_HERE / name, dtype=torch.float32),
        }
        if rank is not None:
            base = load(_HERE / name, dtype=torch.float32)
            models["adapters"] = peft.PeftModel.from_pretrained(base, run / "hugging_face_adapters")
        differences = {
            kind: np.abs(model(ids).logits[0].detach().numpy() - scores).max()
            for kind, model in models.items()
        }
        shown = ", ".join(f"{kind} {differences[kind]:.1e}" for kind in sorted(differences))
        largest, part = np.abs(scores).max(), "all weights" if rank is None else f"rank {rank}"
        print(f"{name}, {part}, scores up to {largest:.1f}: {shown}")
        assert differences.pop("before") > 1e-2
        assert max(differences.values()) < 1e-5 * largest


if __name__ == "__main__":
    {"write": _write, "load": _load}[sys.argv[1]](pathlib.Path(sys.argv[2]))
