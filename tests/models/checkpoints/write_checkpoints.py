"""Writes the checkpoints beside it with transformers, and what transformers computes of them.

Run it where torch, transformers and tokenizers are installed, which this package does not need:

    pip install torch==2.13.0 transformers==5.24.0 numpy
    PYTHONPATH=. python tests/models/checkpoints/write_checkpoints.py

Each folder has tiny random weights, a tokenizer, and `golden.npz`: token ids [2, T + 1], scores
of all tokens after the first T, and the gradients of the mean cross-entropy of the last T, by the
names of the tensors in the checkpoint (but for weights in half precision). `tokens.npy` has a
checksum of the token ids of each of 10,000 random strings, once for each kind of tokenizer.
"""

import json
import pathlib
import zlib

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.data import random_texts

_HERE = pathlib.Path(__file__).parent
_TEXT = """\
Shall I compare thee to a summer's day? Thou art more lovely and more temperate: rough winds do
shake the darling buds of May, and summer's lease hath all too short a date. Sometime too hot the
eye of heaven shines, and often is his gold complexion dimm'd; and every fair from fair sometime
declines, by chance, or nature's changing course, untrimm'd. But thy eternal summer shall not fade
""".splitlines()
_LENGTH = 6


def _byte_level() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE, as GPT-2 and SmolLM2 have it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )


def _byte_fallback() -> transformers.PreTrainedTokenizerFast:
    """A BPE of characters that falls back to bytes, as TinyLlama has it."""
    special = ["<unk>", "<s>", "</s>"]
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False)
    trained.train_from_iterator(_TEXT, trainer)
    learned = trained.get_vocab()
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(learned, key=learned.__getitem__)
    merges = [tuple(pair) for pair in _merges(trained)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _merges(tokenizer: tokenizers.Tokenizer) -> list[list[str]]:
    return [
        merge.split(" ") if isinstance(merge, str) else merge
        for merge in json.loads(tokenizer.to_str())["model"]["merges"]
    ]


def _gpt2(tokenizer, **sizes) -> transformers.PreTrainedModel:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=16,
            n_embd=8,
            n_layer=2,
            n_head=2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **sizes,
        )
    )


def _llama(tokenizer, **sizes) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{
                "vocab_size": len(tokenizer),
                "hidden_size": 8,
                "intermediate_size": 12,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "max_position_embeddings": 16,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": tokenizer.eos_token_id,
                **sizes,
            }
        )
    )


def _write(name: str, model, tokenizer, *, max_shard_size: str = "5GB", dtype=None) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            center = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
            parameter.copy_(center + 0.4 * torch.randn(parameter.shape, generator=generator))
    if dtype is not None:  # Rounded, so that the golden scores are those of what is stored.
        model = model.to(dtype).to(torch.float32)
    model.eval()
    ids = torch.randint(len(tokenizer), (2, _LENGTH + 1), generator=generator)
    scores = model(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    named = dict(model.named_parameters())
    gradients = {f"gradient {key}": value.grad.numpy() for key, value in named.items()}
    folder = _HERE / name
    folder.mkdir(exist_ok=True)
    np.savez_compressed(
        folder / "golden.npz",
        ids=ids.numpy(),
        scores=scores.detach().numpy(),
        loss=loss.detach().numpy(),
        **({} if dtype is not None else gradients),
    )
    stored = model if dtype is None else model.to(dtype)
    stored.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    print(f"{name}: {sum(p.numel() for p in named.values())} weights, loss {loss.item():.6f}")


def _write_tokens(name: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(_HERE / name)
    found = tokenizer(random_texts.strings(10_000), add_special_tokens=False)["input_ids"]
    checksums = [zlib.crc32(np.array(ids, "<i4").tobytes()) for ids in found]
    np.save(_HERE / name / "tokens.npy", np.array(checksums, np.uint32))


def main() -> None:
    """Writes the folders."""
    torch.manual_seed(0)
    bytes_, fallback = _byte_level(), _byte_fallback()
    _write("gpt2", _gpt2(bytes_), bytes_)
    _write("gpt2_half", _gpt2(bytes_, n_inner=20), bytes_, dtype=torch.bfloat16)
    grouped = _llama(bytes_, num_key_value_heads=1, tie_word_embeddings=True, rope_theta=1e5)
    _write("llama_grouped_tied", grouped, bytes_)
    untied = _llama(fallback, num_key_value_heads=2, tie_word_embeddings=False)
    _write("llama_untied", untied, fallback, max_shard_size="10KB")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    grouped = _llama(bytes_, **sizes, rms_norm_eps=1e-3, tie_word_embeddings=False)
    _write("llama_wide_heads", grouped, bytes_)
    for name in ("gpt2", "llama_untied"):
        _write_tokens(name)


if __name__ == "__main__":
    main()
