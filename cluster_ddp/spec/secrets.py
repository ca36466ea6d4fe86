"""Keeping secrets out of the job: the job file's copy in the run directory and the script are read by others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from cluster_ddp.spec.fields import refused

_ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_SECRET_WORDS = {
    "KEY", "KEYS", "APIKEY", "PRIVATEKEY", "ACCESSKEY",
    "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "PAT",
}  # fmt: skip
# The issuers' own prefixes, a password in an address, and private keys in PEM form.
_SECRET_TEXT = (
    r"\bhf_[A-Za-z0-9]{30,}|\bgh[oprsu]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{32,}|\bAKIA[0-9A-Z]{16}\b|\bxox[abprs]-[0-9A-Za-z-]{10,}"
    r"|://[^/\s:@$]*:[^/\s@$]+@|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_ASSIGNMENT = r"\b([A-Za-z_][A-Za-z0-9_]*)=(?![\"']?\$)[\"']?[^\s\"';]"
_ADVICE = "nothing secret in a job file: export it in the shell you submit from (Slurm hands the environment on)"


def is_secret_name(name: str) -> bool:
    """Say whether a variable of this name holds a key, token or password: ``WANDB_API_KEY``, ``HF_TOKEN``."""
    return not _SECRET_WORDS.isdisjoint(name.upper().split("_"))


def check_environment(variables: Mapping[str, str]) -> None:
    """Refuse names that no shell takes, and what is or looks like a secret (``network.env``)."""
    for name, value in variables.items():
        if not re.fullmatch(_ENV_NAME, name):
            allowed = "a name of letters, digits and '_', no digit first"
            raise refused("does not belong to the name of a variable", allowed=allowed, at=(name,), show=False)
        if is_secret_name(name):
            raise refused("is the name of a secret", allowed=_ADVICE, at=(name,), show=False)
        if re.search(_SECRET_TEXT, value):
            raise refused("looks like a secret", allowed=_ADVICE, at=(name,), show=False)


def check_texts(*, setup: Iterable[str], others: Mapping[str, object]) -> None:
    """Refuse secrets in the set-up lines and, by their form, in any text below the keys of `others`."""
    for number, line in enumerate(setup):
        assigned = [name for name in re.findall(_ASSIGNMENT, line) if is_secret_name(name)]
        if assigned or re.search(_SECRET_TEXT, line):
            what = f"gives {assigned[0]} a value" if assigned else "looks like it holds a secret"
            raise refused(what, allowed=_ADVICE, at=("launch", "setup", str(number)), show=False)
    for key, value in others.items():
        for path, text in _texts(value, tuple(key.split("."))):
            if re.search(_SECRET_TEXT, text):
                raise refused("looks like a secret", allowed=_ADVICE, at=path, show=False)


def _texts(value: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _texts(below, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for number, below in enumerate(value):
            yield from _texts(below, (*path, str(number)))
