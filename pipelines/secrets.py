"""Secrets stay in the environment: a params.yaml that holds one is refused, and what logs and errors say of one is covered up.

A secret is the value of an environment variable whose name says so (HF_TOKEN, AWS_SECRET_ACCESS_KEY, MLFLOW_TRACKING_PASSWORD ...) and that
looks like one, the password in a URL, or a text of a known form (an AWS key, a Hugging Face or GitHub token, a private key).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASS|PASSPHRASE|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY|SECRET_KEY|AUTH)(_ID)?(_|$)",
    re.IGNORECASE,
)
LEAST = 8  # characters: a shorter value would cover up ordinary words
# Bounded, so that a megabyte without a space is searched in linear time
URL_PASSWORD = re.compile(r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,20}://[^\s/:@]{0,200}:([^\s/@]{1,500})@")
FORMS = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{30,}\b|\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bgithub_pat_[A-Za-z0-9_]{50,}\b"
    r"|\bxox[abprs]-[A-Za-z0-9-]{20,}|\bsk-[A-Za-z0-9_-]{32,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
BLOCK = 1 << 20


def known(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Secret -> the name of the environment variable that holds it."""
    found = {}
    for name, value in (os.environ if environment is None else environment).items():
        if NAME.search(name) and _looks_secret(value):
            found[value] = name
        for password in URL_PASSWORD.findall(value):
            if len(password) >= LEAST:
                found[password] = name
    return found


def _looks_secret(value: str) -> bool:
    """Not a word, a number, a path or an address."""
    return (
        len(value) >= LEAST
        and not value.startswith(("/", "~", "./"))
        and "://" not in value
        and not re.fullmatch(r"[a-z]+|[A-Z]+|[A-Z]?[a-z]+|[0-9.]+", value)
    )


def refuse(value: Any) -> None:
    """ValueError where plain values hold a secret; it says where, and not what."""
    secrets = known()
    for place, text in _texts(value, ""):
        remedy = "leave it to the environment, which workers have too; a study's files are shared, and go into git"
        if URL_PASSWORD.search(text):
            raise ValueError(f"{place}: is a URL with a password in it; {remedy}.")
        if FORMS.search(text):
            raise ValueError(f"{place}: looks like a secret (a key or an access token); {remedy}.")
        for secret, name in secrets.items():
            if secret in text:
                raise ValueError(f"{place}: holds the value of the environment variable {name}; {remedy}.")


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield f"a name in {place or 'params'}", str(key)
            yield from _texts(entry, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _texts(entry, f"{place}[{number}]")
    elif isinstance(value, str):
        yield place, value


def covered(text: str) -> str:
    """A text with a star for every character of a secret."""
    for secret in sorted(known(), key=len, reverse=True):
        text = text.replace(secret, "*" * len(secret))
    text = URL_PASSWORD.sub(lambda match: match[0].replace(f":{match[1]}@", f":{'*' * len(match[1])}@"), text)
    return FORMS.sub(lambda match: "*" * len(match[0]), text)


def cover(path: Path) -> None:
    """The same to a file, in its place: whoever appends to it goes on. A file that is not there is no matter."""
    secrets = [secret.encode() for secret in sorted(known(), key=len, reverse=True)]
    longest = max((len(secret) for secret in secrets), default=0)
    try:
        with path.open("r+b") as file:
            start = 0
            while block := _at(file, start, BLOCK + longest):
                clean = block
                for secret in secrets:
                    clean = clean.replace(secret, b"*" * len(secret))
                clean = _sub(clean)
                if clean != block:
                    file.seek(start)
                    file.write(clean)
                start += BLOCK
    except FileNotFoundError:
        return


def _at(file: Any, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


def _sub(block: bytes) -> bytes:
    """Known forms and passwords in URLs, byte for byte: text that is no UTF-8 stays as it is."""
    text = block.decode("latin-1")
    text = URL_PASSWORD.sub(lambda match: match[0].replace(f":{match[1]}@", f":{'*' * len(match[1])}@"), text)
    return FORMS.sub(lambda match: "*" * len(match[0]), text).encode("latin-1")
