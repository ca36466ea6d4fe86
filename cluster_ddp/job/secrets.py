"""Keeps secrets out of the job: others can read the copy of the job file in the run directory, and the script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster_ddp.job.models import JobSpec

_SECRET_WORDS = {
    "KEY", "KEYS", "APIKEY", "PRIVATEKEY", "ACCESSKEY",
    "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "PAT", "PASS",
}  # fmt: skip
# Words that may be attached to the previous one: PGPASSWORD, DBPASS, AUTHTOKEN; but PWD only after another word.
_SECRET_ENDS = re.compile(
    r"(PASSWORD|PASSWD|PASSPHRASE|APIKEY|SECRET|(AUTH|ACCESS|API|HF|REFRESH|SESSION)TOKEN|(DB|PG|SQL|SSH|USER|ROOT|MY)PASS"
    r"|[A-Z]_PWD|(DB|SQL|PG)PWD)$"
)
# Endings of names that describe a secret without containing one: KEY_SIZE, TOKEN_DIM, API_KEY_FILE. An id may be one
# half of a secret.
_ABOUT_ONE = re.compile(r"_(SIZE|DIM|LEN|LENGTH|RATE|COUNT|TYPE|FILE|PATH|DIR)$")
# How the name of a secret parameter or option ends. Most that end in key or token are not secret: sort_key, pad_token.
_SECRET_SETTING = re.compile(
    r"(password|passwd|passphrase|api-?key|access-?key(-?id)?|private-?key|secret-?key|client-?secret|auth-?key"
    r"|(auth|access|api|bearer|refresh|hf|huggingface|hub|wandb|github|gitlab|slack|session|login)-?token"
    r"|(^|-)secrets?|(^|-)pwd|(^|-)(db|user|login|root)-?pass)$"
)
# The issuers' own prefixes, a password in a URL, a header, and private keys in PEM form.
_SECRET_TEXT = (
    r"\bhf_[A-Za-z0-9]{30,}|\bgh[oprsu]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{32,}|\bAKIA[0-9A-Z]{16}\b|\bxox[abprs]-[0-9A-Za-z-]{10,}"
    r"|\bhooks\.slack\.com/services/[^\s$\"']+"
    r"|://[^/\s:@$]*:[^/\s@$]+@|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\b[Aa]uthorization:\s*(?:[Bb]earer|[Bb]asic|[Tt]oken)\s+[^\s$\"']"
)
_IN_ADDRESS = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")
_ASSIGNMENT = r"\b([A-Za-z_][A-Za-z0-9_]*)=(?![\"']?\$)[\"']?[^\s\"';]"
_SETTING = r"(?:^|(?<=[\s;,'\"+]))-{0,2}([A-Za-z_][A-Za-z0-9_.-]*)\s*[=:]\s*([^\s,;]+)"
_OPTION = r"(?:^|\s)--?([A-Za-z][A-Za-z0-9_-]*)[ =]+(?!-)([^\s;|&]+)"
_LOGIN = r"\bwandb\s+login\s+(?:--?[\w-]+(?:=\S+)?\s+)*(?![\"']?\$|-|[;|&]|$)\S"
_HUB_LOGIN = r"\b(?:huggingface-cli|hf)\s+(?:auth\s+)?login\b.*\s--token[ =]+(?![\"']?\$)\S"
_DOCKER_LOGIN = r"\b(?:docker|podman|apptainer|singularity)\b.*\blogin\b.*\s-p\s*(?![\"']?\$)\S"
_CURL_USER = r"\bcurl\b.*\s(?:-u|--user)[ =]*[\"']?[^\s:$\"']+:[^\s$\"']"


def is_secret_name(name: str) -> bool:
    """Whether a variable with this name contains a key, token or password: ``WANDB_API_KEY``, ``DBPASS``."""
    upper = name.upper()
    if _ABOUT_ONE.search(upper):
        return False
    return not _SECRET_WORDS.isdisjoint(upper.split("_")) or _SECRET_ENDS.search(upper) is not None


def without_password(text: str) -> str:
    """Return `text` with the passwords in its URLs masked: ``http://me:***@proxy``."""
    return _IN_ADDRESS.sub(r"\1***@", text)


def secrets_in(job: JobSpec) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what is or looks like a secret, by its name or its own form: its key, and what is wrong with it.

    Keys listed in the job's own ``not_secret`` are exempt.
    """
    image = job.launch.container.image if job.launch.container else None
    others = {
        "launch.container.image": image,
        "args": job.args,
        "args_on_resume": job.args_on_resume,
        "params": job.params,
        "slurm.extra": job.slurm.extra,
    }
    lines: dict[tuple[str, ...], str] = {
        ("launch", "setup", str(number)): line for number, line in enumerate(job.launch.setup)
    }
    if job.notify is not None:
        lines["notify", "command"] = job.notify.command
    found = (
        *((("network", "env", name), _wrong_with_variable(name, value)) for name, value in job.network.env.items()),
        *((path, _wrong_with_line(line)) for path, line in lines.items()),
        *((path, what) for key, value in others.items() for path, what in _wrong_below(value, tuple(key.split(".")))),
    )
    for path, what in found:
        names = {".".join(path[:depth]) for depth in range(1, len(path) + 1)}
        if what and names.isdisjoint(job.not_secret):
            yield path, what


def _wrong_with_variable(name: str, value: str) -> str:
    if is_secret_name(name):
        return "is the name of a secret"
    return "looks like a secret" if re.search(_SECRET_TEXT, value) else ""


def _wrong_with_line(line: str) -> str:
    assigned = [name for name in re.findall(_ASSIGNMENT, line) if is_secret_name(name)]
    if assigned:
        return f"gives {assigned[0]} a value"
    options = [name for name, value in re.findall(_OPTION, line) if _is_secret_setting(name, value)]
    if options:
        return f"gives --{options[0]} a value"
    forms = (_SECRET_TEXT, _LOGIN, _HUB_LOGIN, _DOCKER_LOGIN, _CURL_USER)
    return "looks like it holds a secret" if any(re.search(form, line) for form in forms) else ""


def _wrong_below(value: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            if _is_secret_setting(str(key), below):
                yield (*path, str(key)), "is the name of a secret"
            yield from _wrong_below(below, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        before = ""
        for number, below in enumerate(value):
            if re.fullmatch(r"--?[A-Za-z][\w-]*", before) and _is_secret_setting(before, below):
                yield (*path, str(number)), f"is what {before} is set to: the name of a secret"
            yield from _wrong_below(below, (*path, str(number)))
            before = below if isinstance(below, str) else ""
    elif isinstance(value, str):
        found = (pair for form in (_SETTING, _OPTION) for pair in re.findall(form, value))
        set_here = [name for name, given in found if _is_secret_setting(name, given)]
        if set_here:
            yield path, f"gives {set_here[0]} a value"
        elif re.search(_SECRET_TEXT, value):
            yield path, "looks like a secret"


def _is_secret_setting(name: str, value: object) -> bool:
    """Whether a parameter or option with that name and value is a secret; where to find a secret is not one."""
    if value is None or isinstance(value, (bool, float, Mapping, list, tuple)) or str(value) == "":
        return False
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.rpartition(".")[2]).lower().strip("-").replace("_", "-")
    return _SECRET_SETTING.search(words) is not None and not str(value).strip("\"'").startswith(("$", "/", "~", "-"))
