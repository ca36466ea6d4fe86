"""No secret reaches a file, nor a message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_ddp.spec import load_job

SECRET = "hf_" + "aB3" * 12


@pytest.mark.parametrize(
    "text",
    [
        "network: {env: {WANDB_API_KEY: s3cr3t}}",
        "network: {env: {HF_TOKEN: s3cr3t}}",
        "network: {env: {my_db_password: s3cr3t}}",
        "network: {env: {AWS_SECRET_ACCESS_KEY: s3cr3t}}",
        "network: {env: {HTTPS_PROXY: 'http://me:s3cr3t@proxy:80'}}",
        f"network: {{env: {{X: {SECRET}}}}}",
        "launch: {setup: ['export WANDB_API_KEY=s3cr3t']}",
        "launch: {setup: ['true', 'HF_TOKEN=\"s3cr3t\" python x.py']}",
        f"launch: {{setup: ['login {SECRET}']}}",
        f"params: {{nested: [{{login: {SECRET}}}]}}",
        f"script: train.py\nargs: [--login, {SECRET}]",
        f"slurm: {{extra: {{comment: {SECRET}}}}}",
    ],
)
def test_secrets_are_refused_and_not_repeated(mistakes: Callable[..., str], text: str) -> None:
    message = mistakes(text)
    assert "export it in the shell" in message
    assert "s3cr3t" not in message
    assert SECRET not in message


def test_a_secret_given_as_an_override_is_not_repeated(mistakes: Callable[..., str]) -> None:
    message = mistakes("", "network.env.WANDB_API_KEY=s3cr3t")
    assert message.startswith("--set network.env.WANDB_API_KEY=...: ")
    assert "s3cr3t" not in message


@pytest.mark.parametrize(
    "text",
    [
        "network: {env: {TOKENIZERS_PARALLELISM: false, NCCL_IB_HCA: 'mlx5_0,mlx5_1', MAX_TOKENS: 3, KEYBOARD: us}}",
        'launch: {setup: ["export WANDB_API_KEY=$(cat ~/.wandb)", "export HF_TOKEN=\\"$MY_TOKEN\\""]}',
        "params: {pad_token: '<pad>', url: 'http://host:80/a@b', sort_key: length}",
    ],
)
def test_what_only_sounds_like_a_secret_is_taken(job: Callable[..., Path], text: str) -> None:
    load_job(str(job(text)))
