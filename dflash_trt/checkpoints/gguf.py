"""Llama targets in a GGUF file, dequantised to fp32 and renamed to the Hugging Face layout.

Format: the GGUF specification and the key names of the `gguf` package. Rows of q and k are stored
for interleaved rotary embedding (heads x D/2 x 2); here they are put back to halves.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash_trt.checkpoints.base import TextFormat
from dflash_trt.checkpoints.safetensors import file_digest
from dflash_trt.config import ConfigReader, Rope, TargetConfig
from dflash_trt.errors import InputError

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_CONTROL_TOKEN = 3  # token type "control" of the GGUF specification
_PIECE_VALUES = 4_000_000  # of a tensor in memory beside what is made of it
_PRE_TOKENIZERS = ("smollm",)  # digits one by one, then byte level


def huggingface_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if not name.startswith("blk."):
        stem, _, suffix = name.partition(".")
        return f"{_MODEL_NAMES.get(stem, stem)}.{suffix}"
    _, layer, stem, suffix = name.split(".", 3)
    return f"model.layers.{layer}.{_LAYER_NAMES.get(stem, stem)}.{suffix}"


def halves_from_interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads*D, in] with rotary pairs next to each other -> pairs D/2 apart."""
    out, inner = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, inner).swapaxes(1, 2).reshape(out, inner)


class GgufTensors:
    """Tensors of a GGUF file under their Hugging Face names."""

    def __init__(self, path: Path, reader: GGUFReader, config: TargetConfig) -> None:
        self.origin = str(path)
        self._path, self._data = path, reader.data
        # Of the reader's own objects as little as is needed: they keep half its memory alive.
        self._tensors = {
            huggingface_name(t.name): (t.data, t.tensor_type, tuple(int(n) for n in t.shape[::-1]))
            for t in reader.tensors
        }
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][2]

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32)

    def read(self, name: str) -> np.ndarray:
        return self._rows(name, 0, self.shape(name)[0])

    def read_part(self, name: str, axis: int, begin: int, end: int) -> np.ndarray:
        """Rows are read alone; of rows of q and k, whole heads. Columns lie in blocks, and are cut
        from the whole tensor."""
        if axis == 0:
            return self._rows(name, begin, end)
        return self.read(name)[:, begin:end]

    def rows(self, name: str) -> Iterator[np.ndarray]:
        """Those of q and k at once: they are put in order head by head."""
        shape = self.shape(name)
        step = max(1, _PIECE_VALUES // prod(shape[1:]))
        if name.split(".")[-2] in self._heads:
            step = shape[0]
        for begin in range(0, shape[0], step):
            yield self._rows(name, begin, min(begin + step, shape[0]))

    def _rows(self, name: str, begin: int, end: int) -> np.ndarray:
        data, kind, _ = self._tensors[name]
        rows = dequantize(data[begin:end], kind)
        # The library maps the file: pages that were read would count as memory of this process.
        self._data._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
        array = rows.astype(np.float32, copy=False)
        module = name.split(".")[-2]
        if module in self._heads and len(array):
            heads = self._heads[module] * len(array) // self.shape(name)[0]
            array = halves_from_interleaved(array, heads)
        return array

    def digest(self) -> str:
        return file_digest([self._path])


class GgufTarget:
    """A llama GGUF file: configuration, tensors, tokenizer and chat template in one."""

    def __init__(self, path: Path) -> None:
        try:
            reader = GGUFReader(path)
            self._fields = {key: field.contents() for key, field in reader.fields.items()}
            self.config = _config(self._fields, path, {t.name for t in reader.tensors})
            self.tensors = GgufTensors(path, reader, self.config)
        except InputError:
            raise
        except Exception as error:  # the reader raises what numpy raises on a short file
            raise InputError(f"{path}: cannot be read as GGUF ({error})") from error
        self._path = path

    def text_format(self) -> TextFormat:
        kind = self._fields.get("tokenizer.ggml.pre")
        if kind not in _PRE_TOKENIZERS:
            raise InputError(f"{self._path}: the pre-tokenizer '{kind}' is not supported")
        tokens = self._fields["tokenizer.ggml.tokens"]
        return TextFormat(
            byte_level_bpe(self._fields).to_str(),
            self._fields.get("tokenizer.chat_template", ""),
            tokens[self._fields["tokenizer.ggml.bos_token_id"]],
            tokens[self._fields["tokenizer.ggml.eos_token_id"]],
        )


def _config(fields: dict[str, Any], path: Path, tensors: set[str]) -> TargetConfig:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise InputError(f"{path}: the architecture '{architecture}' is not one of llama")
    prefix = "llama."
    values = {k.removeprefix(prefix): v for k, v in fields.items() if k.startswith(prefix)}
    read = ConfigReader(values, str(path))
    heads, hidden = read.integer("attention.head_count"), read.integer("embedding_length")
    return TargetConfig(
        architecture=architecture,
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=read.integer("feed_forward_length"),
        num_layers=read.integer("block_count"),
        num_heads=heads,
        num_kv_heads=read.integer("attention.head_count_kv", heads),
        head_dim=read.integer("attention.key_length", hidden // heads),
        rms_norm_eps=float(np.float32(read.number("attention.layer_norm_rms_epsilon"))),
        rope=Rope(read.number("rope.freq_base", 10000.0)),
        max_positions=read.integer("context_length"),
        tied_embeddings="output.weight" not in tensors,
        stop_ids=(fields["tokenizer.ggml.eos_token_id"],),
    )


def byte_level_bpe(fields: dict[str, Any]) -> Tokenizer:
    """The GPT-2 style tokenizer that the file describes."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer
