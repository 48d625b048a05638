"""Checkpoints in Hugging Face's layout: folders of `config.json` and safetensors files.

Read and written are the families of GPT-2 (`gpt2`) and Llama (`llama`). Weights are read into
float32, which holds every value of bfloat16 and float16 exactly, and written as float32, so that
float32 weights come back bit by bit. Pickles are never opened: they can run code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import stat
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tff_dpftrl import durable_files, json_text, packages, validation
from tff_dpftrl.models import table

if TYPE_CHECKING:  # So that a folder can be refused before TensorFlow is imported.
    from tff_dpftrl.models import language_model, low_rank

FOLDER = "hugging_face"
"""Name of the checkpoint's folder in that of a run."""

ADAPTERS_FOLDER = "hugging_face_adapters"
"""Name of the adapters' folder in that of a run."""

FOLDERS = (FOLDER, ADAPTERS_FOLDER)
"""Names of both."""

SEQUENCE_LENGTH = 64
"""Number of positions of a checkpoint's model if none is given; or fewer, if it has fewer."""

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"

_INDEX = "model.safetensors.index.json"
_ADAPTER_CONFIG, _ADAPTERS = "adapter_config.json", "adapter_model.safetensors"
_TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "chat_template.jinja",
)
FILES = frozenset(
    {
        *(f"{FOLDER}/{name}" for name in (CONFIG, WEIGHTS, *_TOKENIZER_FILES)),
        *(f"{ADAPTERS_FOLDER}/{name}" for name in (_ADAPTER_CONFIG, _ADAPTERS)),
    }
)
"""Paths in a run's folder of what is written there in this layout."""

# Keys of a config that `config_of` has no value for: ids of tokens, and how to train the model.
_KEPT = (
    *(f"{token}_token_id" for token in ("bos", "eos", "pad")),
    *(f"{place}_pdrop" for place in ("attn", "embd", "resid")),
    "attention_dropout",
    "initializer_range",
    "use_cache",
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SAFE = (
    "where transformers is installed, "
    "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…) writes safetensors"
)
# Buffers that older versions of transformers stored beside the weights.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_AGAIN = "Download the checkpoint again."
_DTYPES = ("F64", "F32", "F16", "BF16")
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class _Family:
    """An architecture, in the words of transformers and of this package.

    Attributes:
      architecture: Name of the class of transformers.
      prefix: Common beginning of tensor names; the tensors of `outside` lack it.
      block: Beginning of the tensor names of a block; {} stands for its index.
      is_transposed: Whether a kernel is stored as [outputs, inputs].
      names: Tensor name of each weight outside of blocks, by the name of the weight.
      outside: Tensor name of each weight without the prefix, by the name of the weight.
      block_names: Tensor name of each weight in a block, by the name of the weight.
      sizes: Config key of each required number, by the name of the model's field.
      computed: Config values that the model relies on, and the default of each. Other values would
        compute other scores.
    """

    architecture: str
    prefix: str
    block: str
    is_transposed: bool
    names: Mapping[str, str]
    outside: Mapping[str, str]
    block_names: Mapping[str, str]
    sizes: Mapping[str, str]
    computed: Mapping[str, tuple[Any, ...]]

    def tensor_of(self, weight: str) -> str:
        """Returns the name of the tensor that holds a weight."""
        if weight in self.outside:
            return self.outside[weight]
        if weight in self.names:
            return self.prefix + self.names[weight]
        _, index, name = weight.split("_", maxsplit=2)
        return self.prefix + self.block.format(index) + self.block_names[name]


_ANY_MODEL = {"quantization_config": (None,), "add_cross_attention": (False,)}
_FAMILIES: Mapping[str, _Family] = {
    "gpt2": _Family(
        architecture="GPT2LMHeadModel",
        prefix="transformer.",
        block="h.{}.",
        is_transposed=False,
        names={
            "embedding": "wte.weight",
            "position_embedding": "wpe.weight",
            "output_norm_scale": "ln_f.weight",
            "output_norm_bias": "ln_f.bias",
        },
        outside={},
        block_names={
            "attention_norm_scale": "ln_1.weight",
            "attention_norm_bias": "ln_1.bias",
            "query_key_value_kernel": "attn.c_attn.weight",
            "query_key_value_bias": "attn.c_attn.bias",
            "attention_output_kernel": "attn.c_proj.weight",
            "attention_output_bias": "attn.c_proj.bias",
            "feed_forward_norm_scale": "ln_2.weight",
            "feed_forward_norm_bias": "ln_2.bias",
            "feed_forward_kernel": "mlp.c_fc.weight",
            "feed_forward_bias": "mlp.c_fc.bias",
            "feed_forward_output_kernel": "mlp.c_proj.weight",
            "feed_forward_output_bias": "mlp.c_proj.bias",
        },
        sizes={
            "embedding_size": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "num_positions": "n_positions",
        },
        computed=_ANY_MODEL
        | {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "tie_word_embeddings": (True,),
        },
    ),
    "llama": _Family(
        architecture="LlamaForCausalLM",
        prefix="model.",
        block="layers.{}.",
        is_transposed=True,
        names={"embedding": "embed_tokens.weight", "output_norm_scale": "norm.weight"},
        outside={"output_embedding": "lm_head.weight"},
        block_names={
            "attention_norm_scale": "input_layernorm.weight",
            "query_kernel": "self_attn.q_proj.weight",
            "key_kernel": "self_attn.k_proj.weight",
            "value_kernel": "self_attn.v_proj.weight",
            "attention_output_kernel": "self_attn.o_proj.weight",
            "feed_forward_norm_scale": "post_attention_layernorm.weight",
            "gate_kernel": "mlp.gate_proj.weight",
            "feed_forward_kernel": "mlp.up_proj.weight",
            "feed_forward_output_kernel": "mlp.down_proj.weight",
        },
        sizes={
            "embedding_size": "hidden_size",
            "feed_forward_size": "intermediate_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "num_positions": "max_position_embeddings",
        },
        computed=_ANY_MODEL
        | {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    ),
}


def is_checkpoint(folder: pathlib.Path) -> bool:
    """Returns whether a folder is one of Hugging Face's, of any architecture, damaged or not."""
    if (folder / _ADAPTER_CONFIG).exists() or any(folder.glob("*.safetensors")):
        return True
    if any(path.suffix in _PICKLES for path in folder.glob("*")):
        return True
    try:
        return "model_type" in json_text.read_outside(folder / CONFIG)
    except validation.UsageError:
        return False


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint whose config and names of files have been read.

    Attributes:
      folder: Folder of the checkpoint.
      sizes: Name of the model in `table.MODELS`, as "model", and its sizes.
      files: Files of tensors.
    """

    folder: pathlib.Path
    sizes: Mapping[str, Any]
    files: Sequence[pathlib.Path]

    def read(
        self, sequence_length: int | None = None
    ) -> tuple[language_model.LanguageModel, tuple[np.ndarray, ...]]:
        """Reads the model, and one float32 array for each entry of its `weight_shapes`.

        `sequence_length` is the number of positions T; `SEQUENCE_LENGTH` if None.
        """
        if sequence_length is None:
            sequence_length = min(SEQUENCE_LENGTH, self.sizes["num_positions"])
        with contextlib.ExitStack() as stack:
            where = {}
            for path in self.files:
                file = stack.enter_context(_opened(path))
                where.update((name, (path, file)) for name in file.keys())  # noqa: SIM118
            num_layers = self.sizes["num_layers"]
            if num_layers > len(where):  # The names of a damaged config's layers could be many.
                raise validation.UsageError(
                    f"{self.folder} has {len(where)} tensors, too few for the {num_layers} layers "
                    f"of its {CONFIG}: restore all files of the checkpoint."
                )
            # Imports TensorFlow, with which NumPy knows bfloat16.
            model = table.from_description({**self.sizes, "sequence_length": sequence_length})
            return model, self._weights(model, where)

    def _weights(
        self, model: language_model.LanguageModel, where: Mapping[str, tuple[pathlib.Path, Any]]
    ) -> tuple[np.ndarray, ...]:
        family = _FAMILIES[self.sizes["model"]]
        # Without the head of a language model, names have no prefix.
        has_prefix = any(name.startswith(family.prefix) for name in where)
        prefix = "" if has_prefix else family.prefix
        names = {w: family.tensor_of(w).removeprefix(prefix) for w in model.weight_shapes}
        self._check_names(names, where)
        weights = {}
        for weight, shape in model.weight_shapes.items():
            is_transposed = family.is_transposed and weight.endswith("_kernel")
            stored_shape = shape[::-1] if is_transposed else shape
            stored = self._tensor(names[weight], stored_shape, where)
            weights[weight] = np.ascontiguousarray(stored.T) if is_transposed else stored
        if "lm_head.weight" in where and "lm_head.weight" not in names.values():
            embedding = weights["embedding"]
            output = self._tensor("lm_head.weight", embedding.shape, where)
            if not np.array_equal(output, embedding):
                raise validation.UsageError(
                    f"{self.folder} has other output weights, lm_head.weight, than input "
                    f"embeddings, which {CONFIG} says are the same (tie_word_embeddings): correct "
                    "it."
                )
        return tuple(weights.values())

    def _check_names(self, names: Mapping[str, str], where: Mapping[str, Any]) -> None:
        missing = [name for name in names.values() if name not in where]
        if missing:
            raise validation.UsageError(
                f"{self.folder} has no tensor {_listed(missing)}, which the model of its {CONFIG} "
                "needs: restore all files of the checkpoint."
            )
        known = {*names.values(), "lm_head.weight"}
        unknown = [n for n in where if n not in known and not n.endswith(_BUFFERS)]
        if unknown:
            raise validation.UsageError(
                f"{self.folder} has the tensor {_listed(unknown)}, which the model of its {CONFIG} "
                "has no use for: scores would be wrong without it. Use a checkpoint of "
                f"{' or '.join(f.architecture for f in _FAMILIES.values())}."
            )

    def _tensor(
        self, name: str, shape: tuple[int, ...], where: Mapping[str, tuple[pathlib.Path, Any]]
    ) -> np.ndarray:
        """Reads a tensor as float32."""
        path, file = where[name]
        found = file.get_slice(name)
        found_shape, dtype = tuple(found.get_shape()), found.get_dtype()
        if found_shape != shape:
            raise validation.UsageError(
                f"{path}: tensor {name} has the shape {list(found_shape)}, and {CONFIG} asks for "
                f"{list(shape)}: they are of two checkpoints."
            )
        if dtype not in _DTYPES:
            raise validation.UsageError(
                f"{path}: tensor {name} is of type {dtype}, and only {', '.join(_DTYPES)} can be "
                "fine-tuned: use the checkpoint before it was quantised."
            )
        values = file.get_tensor(name).astype(np.float32)
        if not np.isfinite(values).all():
            raise validation.UsageError(
                f"{path}: tensor {name} has values that are no finite numbers: the file is damaged."
            )
        return values


def find(folder: pathlib.Path) -> Checkpoint:
    """Reads the config of a checkpoint, without TensorFlow and without its weights."""
    if (folder / _ADAPTER_CONFIG).exists() and not (folder / CONFIG).exists():
        raise validation.UsageError(
            f"{folder} has adapters only, of a model elsewhere: merge them first "
            "(merge_and_unload in peft), and name the folder of the whole model."
        )
    config = json_text.read_outside(folder / CONFIG, remedy=_AGAIN)
    _rest(folder)  # They are copied after hours.
    packages.require(f"The checkpoint in {folder}", "safetensors", "tokenizers")
    return Checkpoint(folder, _sizes(folder, config), _files(folder))


def _opened(path: pathlib.Path) -> Any:
    import safetensors

    try:
        return safetensors.safe_open(path, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise validation.UsageError(
            f"{path} is damaged ({' '.join(str(error).split())}). {_AGAIN}"
        ) from error


def _rest(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a checkpoint besides its weights."""
    return [
        validation.file_in(folder, name, remedy=_AGAIN)
        for name in (CONFIG, *_TOKENIZER_FILES)
        if os.path.lexists(folder / name)
    ]


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    names: list[Any] = []
    if (folder / WEIGHTS).exists():
        names = [WEIGHTS]
    elif (folder / _INDEX).exists():
        weight_map = json_text.read_outside(folder / _INDEX, remedy=_AGAIN).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise validation.UsageError(f"{folder / _INDEX} names no files. {_AGAIN}")
    if names:
        return [
            validation.file_in(folder, name, max_bytes=None, remedy=_AGAIN)
            for name in sorted(set(names))
        ]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise validation.UsageError(
            f"{folder} has its weights as a pickle, {_listed(pickles)}, which could run any code "
            f"when it is read: convert it ({_SAFE})."
        )
    raise validation.UsageError(f"{folder} has no {WEIGHTS}: restore it from the checkpoint.")


def _sizes(folder: pathlib.Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a config of transformers to a model's description without sequence length."""
    name = config.get("model_type")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise validation.UsageError(
            f"{folder} is a model of type {name!r}, and only {' and '.join(_FAMILIES)} can be "
            "fine-tuned: take a checkpoint of one of them."
        )
    for key, values in family.computed.items():
        if config.get(key, values[0]) not in values:
            raise _refused(folder, key, config[key])
    where = f"{folder / CONFIG}:"

    def count(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        return validation.integer(f"{where} {key}", value, minimum=1, remedy=_AGAIN)

    def positive(key: str, value: Any) -> float:
        largest = 1e38  # Models compute in float32.
        return validation.number(f"{where} {key}", value, above=0, at_most=largest, remedy=_AGAIN)

    sizes = {"model": name, "vocabulary_size": count("vocab_size") + 1}
    sizes |= {field: count(key) for field, key in family.sizes.items()}
    if name == "gpt2":
        epsilon = config.get("layer_norm_epsilon", 1e-5)
        sizes["norm_epsilon"] = positive("layer_norm_epsilon", epsilon)
        sizes["feed_forward_size"] = count("n_inner", 4 * sizes["embedding_size"])
        return sizes
    # Which of them counts depends on the version of transformers.
    rotaries = [config.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    for rotary in rotaries:
        if (
            not isinstance(rotary, dict)
            or any(rotary.get(key, "default") != "default" for key in ("rope_type", "type"))
            or any(isinstance(value, dict) for value in rotary.values())
        ):
            raise _refused(folder, "rope_scaling", rotary)
    theta = (rotaries[0] or rotaries[1]).get("rope_theta", config.get("rope_theta", 10_000.0))
    is_tied = config.get("tie_word_embeddings")
    if not isinstance(is_tied, bool | None):
        raise validation.UsageError(
            f"{where} tie_word_embeddings must be true or false, got {is_tied!r}. {_AGAIN}"
        )
    return sizes | {
        "rotary_base": positive("rope_theta", theta),
        "norm_epsilon": positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(is_tied),
        "num_key_value_heads": count("num_key_value_heads", sizes["num_heads"]),
        "head_size": None if config.get("head_dim") is None else count("head_dim"),
    }


def _refused(folder: pathlib.Path, key: str, value: Any) -> validation.UsageError:
    return validation.UsageError(
        f"{folder / CONFIG} has {key} {value!r}, which this package does not compute: scores would "
        "be wrong. Take a checkpoint without it."
    )


def config_of(model: language_model.LanguageModel) -> dict[str, Any]:
    """Returns the `config.json` by which transformers computes a "gpt2" or "llama" model."""
    sizes = table.describe(model)
    family = _FAMILIES.get(sizes["model"])
    if family is None:
        raise validation.UsageError(
            f"model {sizes['model']!r} is none that transformers knows: only "
            f"{' and '.join(_FAMILIES)} can be written in its layout."
        )
    sizes["num_positions"] = sizes["num_positions"] or sizes["sequence_length"]
    config = {
        "model_type": sizes["model"],
        "architectures": [family.architecture],
        "vocab_size": sizes["vocabulary_size"] - 1,
        **{key: sizes[field] for field, key in family.sizes.items()},
        **{key: values[0] for key, values in family.computed.items() if values[0] is not None},
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    if sizes["model"] == "gpt2":
        return config | {
            "n_inner": sizes["feed_forward_size"],
            "layer_norm_epsilon": sizes["norm_epsilon"],
        }
    return config | {
        "num_key_value_heads": sizes["num_key_value_heads"],
        "head_dim": sizes["head_size"] or sizes["embedding_size"] // sizes["num_heads"],
        "rms_norm_eps": sizes["norm_epsilon"],
        "rope_theta": sizes["rotary_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes["rotary_base"]},
        "tie_word_embeddings": sizes["tie_embeddings"],
    }


def copy_rest(source: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the config and the tokenizer of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in _rest(source):
        with durable_files.replacing(folder / path.name) as file, open(path, "rb") as content:
            shutil.copyfileobj(content, file)


def write(
    folder: pathlib.Path, model: language_model.LanguageModel, weights: Sequence[np.ndarray]
) -> None:
    """Writes a "gpt2" or "llama" model as `config.json` and float32 `model.safetensors`.

    Other entries of an existing `config.json`, such as ids of special tokens, stay in it; what it
    says of its origin does not.
    """
    config = config_of(model)
    family = _FAMILIES[config["model_type"]]
    tensors = {}
    for name, weight in zip(model.weight_shapes, weights, strict=True):
        if family.is_transposed and name.endswith("_kernel"):
            weight = weight.T
        tensors[family.tensor_of(name)] = np.ascontiguousarray(weight, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CONFIG
    before = json_text.read_outside(path, remedy=_AGAIN) if path.exists() else {}
    _write_json(path, {k: v for k, v in before.items() if k in _KEPT} | config)
    _write_tensors(folder / WEIGHTS, tensors)


def write_adapters(
    folder: pathlib.Path, adapted: low_rank.LowRank, weights: Sequence[np.ndarray], *, base: str
) -> None:
    """Writes the low-rank adapters of a "gpt2" or "llama" model as peft does.

    They are `adapter_config.json` and their tensors. `base` is the name or folder of the model that
    the adapters are added to.
    """
    family = _FAMILIES[config_of(adapted.model)["model_type"]]
    tensors, modules = {}, set()
    for name, (a, b) in adapted.pairs(weights).items():
        module = family.tensor_of(name).removesuffix(".weight")
        modules.add(module.rsplit(".", maxsplit=1)[-1])
        for part, weight in (("lora_A", a), ("lora_B", b)):
            key = f"base_model.model.{module}.{part}.weight"
            tensors[key] = np.ascontiguousarray(weight.T, np.float32)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapted.adapter_rank,
        "lora_alpha": adapted.alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": not family.is_transposed,
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write_tensors(folder / _ADAPTERS, tensors)
    _write_json(folder / _ADAPTER_CONFIG, config)


def _write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    durable_files.write(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def _write_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    import safetensors.numpy

    with durable_files.replacing(path) as file:
        safetensors.numpy.save_file(dict(tensors), file.name, metadata={"format": "pt"})
        # Some versions put a file of their own there, which only its owner may read.
        with open(file.name, "rb") as written:
            os.fchmod(written.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
            os.fsync(written.fileno())


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = (name if name.isprintable() else repr(name) for name in names[:_SHOWN])
    return ", ".join(shown) + more
