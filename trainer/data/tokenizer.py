"""Tokenizers: text to token ids and back."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

# Tokens with which published tokenizers end a document, most common first.
_END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
)


class Tokenizer(Protocol):
    """What a source and `meshloom generate` need from a tokenizer.

    `end` is the token after each document; it also starts a text to be generated.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def end(self) -> int: ...

    def encode(self, text: str | bytes) -> np.ndarray: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


class Bytes:
    """Bytes as tokens 0 to 255, and 256 for the end of a document."""

    vocab_size = 257
    end = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text without end tokens; invalid UTF-8 becomes U+FFFD."""
        ids = np.asarray(ids)
        if ids.size and (ids.min() < 0 or ids.max() > self.end):
            raise ValueError(
                f"Bytes: token {ids.max() if ids.max() > self.end else ids.min()} is "
                f"outside 0..{self.end}. A model with a padded vocabulary must not "
                "sample from the padding."
            )
        return bytes(ids[ids != self.end].tolist()).decode(errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` package (an extra).

    Args:
      end_token: the token that ends a document, as text or id; None looks for one of
        the common ones.
    """

    def __init__(self, path: str | Path, end_token: str | int | None = None):
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(
                f"tokenizer '{path}': the package `tokenizers` is not installed. "
                "Run: pip install 'meshloom[tokenizers]'"
            ) from error
        if not Path(path).is_file():
            raise ValueError(
                f"tokenizer '{path}': no such file. Name a tokenizer.json file."
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # The package raises plain Exception for every kind of bad file.
        except Exception as error:
            raise ValueError(
                f"tokenizer '{path}': not a tokenizer.json file ({error}). Save one "
                "with `tokenizers.Tokenizer.save`."
            ) from error
        # The file may contain settings that truncate or pad every document.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        if isinstance(end_token, int):
            self.end = end_token
        else:
            self.end = _find_end(path, vocabulary, end_token)
        self.digest = file_digest(path)

    def encode(self, text: str | bytes) -> np.ndarray:
        if isinstance(text, bytes):
            text = text.decode()
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text, without special tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist())


def file_digest(path: str | Path) -> str:
    """Returns the SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find_end(path: str | Path, vocabulary: dict[str, int], token: str | None) -> int:
    candidates = _END_TOKENS if token is None else (token,)
    known = [name for name in candidates if name in vocabulary]
    if not known:
        raise ValueError(
            f"tokenizer '{path}': none of {', '.join(candidates)} is among its "
            f"{len(vocabulary)} tokens, so there is none to end a document with. Add "
            "such a token to the file, or name another one as end_token."
        )
    return vocabulary[known[0]]
