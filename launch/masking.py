"""Keeps keys and passwords out of what is written: logs, run folders, manifests.

A secret is known by the name it stands under (WANDB_API_KEY, --set service.token=...)
or by its place in an address (https://user:password@host). What stands under another
name is not known as one: secrets belong into environment variables with such names.
"""

import re
from collections.abc import Mapping, Sequence

MASK = "***"

# The last letters of a word of the name. "tokens" and "tokenizer" are no token.
_ENDINGS = ("key", "keys", "token", "secret", "secrets", "password", "passwd")
_WORDS = {"passphrase", "credential", "credentials", "signature", "sig", "auth"}

_PASSWORD = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]*(?=@)")
_PAIR = re.compile(r"([A-Za-z_][\w.\-]*)=([^\s&'\"]+)")


def looks_secret(name: str) -> bool:
    """Whether what stands under this name is a secret, going by the name."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return any(word.endswith(_ENDINGS) or word in _WORDS for word in words)


def holds_password(text: str) -> bool:
    """Whether the text has an address with a password, such as https://me:pw@host."""
    return _PASSWORD.search(text) is not None


def masked(values: Mapping[str, str]) -> dict[str, str]:
    """Variables and their values, without secrets. An empty value hides nothing."""
    return {
        name: MASK if value and looks_secret(name) else masked_text(value)
        for name, value in values.items()
    }


def masked_text(text: str) -> str:
    """Text without the passwords of addresses and the values of secret NAME=VALUE."""

    def mask(pair: re.Match) -> str:
        return f"{pair[1]}={MASK}" if looks_secret(pair[1]) else pair[0]

    return _PAIR.sub(mask, _PASSWORD.sub(MASK, text))


def masked_command(command: Sequence[str]) -> list[str]:
    """A command line without secrets: of NAME=VALUE, --name=VALUE and --name VALUE."""
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
    """In one argument the value goes on to its end, blanks and all."""
    for equals in re.finditer("=", word):
        name = re.split(r"[=?&\s]", word[: equals.start()])[-1]
        if looks_secret(name):
            return f"{word[: equals.end()]}{MASK}"
    return masked_text(word)
