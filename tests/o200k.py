"""The vocabulary of gpt-oss, from a package that carries it, and a tokenizer made of it."""

from __future__ import annotations

import shutil
from base64 import b64decode
from importlib import metadata
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

# litellm carries the file under the SHA-1 of its address, as tiktoken caches it.
_CACHED = "fb374d419588a4632f3f557e76b4b70aebbca790"
ROWS = 201088  # of gpt-oss's embedding
SPECIAL = {
    "<|startoftext|>": 199998, "<|endoftext|>": 199999, "<|return|>": 200002,
    "<|constrain|>": 200003, "<|channel|>": 200005, "<|start|>": 200006, "<|end|>": 200007,
    "<|message|>": 200008, "<|call|>": 200012, "<|endofprompt|>": 200018,
}  # fmt: skip


def vocabulary(folder: Path) -> Path:
    """`folder` with `o200k_base.tiktoken` in it; skips where there is none."""
    pytest.importorskip("openai_harmony", reason="the extra harmony is not installed")
    try:
        files = metadata.files("litellm") or []
    except metadata.PackageNotFoundError:
        pytest.skip("no vocabulary: the package litellm carries it")
    found = next(f for f in files if f.name == _CACHED)
    shutil.copy(str(found.locate()), folder / "o200k_base.tiktoken")
    return folder


def tokenizer(folder: Path) -> Tokenizer:
    """A `tokenizers` tokenizer of the vocabulary in `folder`, special tokens with it; merges are
    not, for they matter to encoding only."""
    characters, vocab = bytes_to_unicode(), dict(SPECIAL)
    for line in (folder / "o200k_base.tiktoken").read_bytes().splitlines():
        token, number = line.split()
        vocab["".join(characters[byte] for byte in b64decode(token))] = int(number)
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return made
