"""Keeps keys and passwords out of what is written: logs, run folders, manifests.

A value is masked if it may be a secret, by its name (WANDB_API_KEY, --set x.token=...)
or by its form (hf_..., https://user:password@host). Only a value that certainly is one
is refused: `eos_token` and `text_key` are settings like any other.
"""

import re
from collections.abc import Mapping, Sequence

MASK = "***"

# How a word of the name ends. "tokens" and "tokenizer" do not count.
_ENDINGS = ("key", "keys", "token", "secret", "secrets", "password", "passwd")
_WORDS = {"passphrase", "credential", "credentials", "signature", "sig", "auth"}

# Names that mean nothing else, and what keys look like whatever they are called.
_CERTAIN_NAME = re.compile(
    r"passw(or)?d|passphrase|secret|credential"
    r"|(api|access|private|auth|bearer|hf|github|wandb)[_-]?(key|token)",
    re.IGNORECASE,
)
_KEY = re.compile(
    r"\b(?:sk-|hf_|gh[opsu]_|glpat-|xox[abps]-|AKIA|AIza|eyJ)[\w\-]{16,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_RANDOM = re.compile(r"(?=(?:\D*\d){4})(?=.*[A-Za-z])[A-Za-z0-9]{20,}")

_PASSWORD = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]*(?=@)")
_PAIR = re.compile(r"([A-Za-z_][\w.\-]*)=([^\s&'\"]+)")


def looks_secret(name: str) -> bool:
    """Whether a value with this name may be a secret, and is masked.

    `token_file` is the name of a file, which tells nobody anything.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    if words and words[-1] == "file":
        return False
    return any(word.endswith(_ENDINGS) or word in _WORDS for word in words)


def is_secret(name: str, value: str) -> bool:
    """Whether a value is certainly a secret, by its name, its form, or both."""
    if not value:
        return False
    if holds_secret(value) or _CERTAIN_NAME.search(name):
        return True
    return looks_secret(name) and _RANDOM.fullmatch(value.strip("'\"")) is not None


def holds_secret(text: str) -> bool:
    """Whether the text contains a key of a known form, or a URL with a password."""
    return bool(_PASSWORD.search(text) or _KEY.search(text))


def secret_argument(command: Sequence[str]) -> str | None:
    """Returns the first argument that certainly is a secret, masked, if any."""
    before = ""
    for word, shown in zip(command, masked_command(command), strict=True):
        if word != shown:
            at = _secret_value(word)
            name, value = (word[:at], word[at:]) if at else (before, word)
            if is_secret(name, value):
                return shown
        before = word
    return None


def masked(values: Mapping[str, str]) -> dict[str, str]:
    """Masks secrets in variables and their values; an empty value is not one."""
    return {
        name: MASK if value and looks_secret(name) else masked_text(value)
        for name, value in values.items()
    }


def masked_text(text: str) -> str:
    """Masks keys, passwords in URLs and the values of secret NAME=VALUE pairs."""

    def mask(pair: re.Match) -> str:
        return f"{pair[1]}={MASK}" if looks_secret(pair[1]) else pair[0]

    return _PAIR.sub(mask, _KEY.sub(MASK, _PASSWORD.sub(MASK, text)))


def masked_command(command: Sequence[str]) -> list[str]:
    """Masks secrets in a command line: NAME=VALUE, --name=VALUE and --name VALUE."""
    shown: list[str] = []
    follows_secret = False
    for word in command:
        if follows_secret and not word.startswith("--"):
            shown.append(MASK)
        else:
            shown.append(_masked_word(word))
        follows_secret = (
            word.startswith("--") and "=" not in word and looks_secret(word)
        )
    return shown


def _masked_word(word: str) -> str:
    at = _secret_value(word)
    return f"{word[:at]}{MASK}" if at else masked_text(word)


def _secret_value(word: str) -> int | None:
    """Returns where a secret value begins; it extends to the end of the word."""
    for equals in re.finditer("=", word):
        name = re.split(r"[=?&\s]", word[: equals.start()])[-1]
        if looks_secret(name):
            return equals.end()
    return None
