"""No secret reaches a file, nor a message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_ddp.job import JobFileError, load_job, load_resolved, load_run_job

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
        "notify: {command: 'curl -d @- https://hooks.slack.com/services/T1/B2/s3cr3t'}",
        "notify: {command: 'PUSH_TOKEN=s3cr3t push'}",
        f"params: {{nested: [{{login: {SECRET}}}]}}",
        f"script: train.py\nargs: [--login, {SECRET}]",
        f"slurm: {{extra: {{comment: {SECRET}}}}}",
        "network: {env: {PGPASSWORD: s3cr3t}}",
        "network: {env: {DBPASS: s3cr3t}}",
        "network: {env: {AUTHTOKEN: s3cr3t}}",
        "network: {env: {MYSQL_PWD: s3cr3t}}",
        "network: {env: {SSHPASS: s3cr3t}}",
        "script: train.py\nargs: [--password=s3cr3t]",
        "script: train.py\nargs: [--api-key, s3cr3t]",
        "script: train.py\nargs: ['--api-key s3cr3t']",
        "script: train.py\nargs_on_resume: [--api-key, s3cr3t]",
        "script: train.py\nargs: [wandb.api_key=s3cr3t]",
        "script: train.py\nargs: ['+logger.apiKey=s3cr3t']",
        "params: {wandb_api_key: s3cr3t}",
        "params: {nested: {dbPassword: s3cr3t}}",
        "params: {hub_token: s3cr3t, secret: x}",
        "launch: {setup: [wandb login s3cr3t]}",
        "launch: {setup: [wandb login --relogin s3cr3t]}",
        "launch: {setup: ['huggingface-cli login --hub-token s3cr3t']}",
        "launch: {setup: ['huggingface-cli login --token s3cr3t']}",
        "launch: {setup: ['hf auth login --token=s3cr3t']}",
        "launch: {setup: ['mysql --password=s3cr3t']}",
        "launch: {setup: ['docker login -u me -p s3cr3t registry']}",
        "launch: {setup: ['curl -u me:s3cr3t https://host/file']}",
        "launch: {setup: ['curl -H \"Authorization: Bearer s3cr3t\" https://host']}",
        "launch: {container: {image: 'docker://user:s3cr3t@registry/image'}}",
        "slurm: {extra: {comment: 'password=s3cr3t'}}",
    ],
)
def test_secrets_are_refused_and_not_repeated(errors_of: Callable[..., str], text: str) -> None:
    message = errors_of(text)
    assert "export it in the shell" in message
    assert "s3cr3t" not in message
    assert SECRET not in message


def test_a_secret_given_as_an_override_is_not_repeated(errors_of: Callable[..., str]) -> None:
    message = errors_of("", "network.env.WANDB_API_KEY=s3cr3t")
    assert message.startswith("--set network.env.WANDB_API_KEY=...: ")
    assert "s3cr3t" not in message


@pytest.mark.parametrize(
    "text",
    [
        "network: {env: {TOKENIZERS_PARALLELISM: false, NCCL_IB_HCA: 'mlx5_0,mlx5_1', MAX_TOKENS: 3, KEYBOARD: us}}",
        'launch: {setup: ["export WANDB_API_KEY=$(cat ~/.wandb)", "export HF_TOKEN=\\"$MY_TOKEN\\""]}',
        "params: {pad_token: '<pad>', url: 'http://host:80/a@b', sort_key: length}",
        "params: {token_dim: 64, passes: 3, key_size: 8, n_tokens: 9, keys: [a], token: '[CLS]', secret: false}",
        "params: {api_key_file: /home/me/.key, password_length: 8, monkey: x, compass: N, tokenizer: bpe, num_keys: 4}",
        "params: {api_key: $WANDB_API_KEY, access_token: ~/.token, max_passes: 2, key: value, token: 3}",
        "script: train.py\nargs: [--token-dim, 64, --passes=3, --sort-key, length, 'ratio=1:2', --n-passes, 2]",
        "network: {env: {PWD: /x, BYPASS: 1, COMPASS_MODE: a, PASSES: 3, TOKENS: 5, MONKEY: x}}",
        "launch: {setup: ['wandb login', 'wandb login $KEY', 'module load x', 'export A=$(cat ~/.pw)', 'cd key-size']}",
        "network: {env: {KEY_SIZE: 8, TOKEN_DIM: 9, PASS_RATE: 1, WANDB_API_KEY_FILE: /home/me/.key}}",
        "launch: {setup: ['KEY_SIZE=8 TOKEN_DIM=3 python x.py', 'hf auth login --token $HF_TOKEN']}",
        "launch: {setup: ['source ~/.secrets', 'python prepare.py --key-size 8 --passes=2', 'curl -u \"$U\" https://h']}",
        "slurm: {extra: {comment: 'passes: 3, token_dim=4'}}",
    ],
)
def test_what_only_sounds_like_a_secret_is_taken(job: Callable[..., Path], text: str) -> None:
    load_job(str(job(text)), check_target=False)


def test_a_false_alarm_is_switched_off_by_its_key(job: Callable[..., Path], errors_of: Callable[..., str]) -> None:
    text = "params: {api_key: not-one, other: {secret: s3cr3t}}\n"
    assert "not_secret: [params.api_key]" in errors_of(text)
    assert "not_secret: [params.other.secret]" in errors_of(text + "not_secret: [params.api_key]\n")
    load_job(str(job(text + "not_secret: [params.api_key, params.other]\n")))


def test_an_exported_value_is_not_repeated(errors_of: Callable[..., str]) -> None:
    message = errors_of("slurm: {extra: {export: 'ALL,KEY=s3cr3t'}}")
    assert "use network.env" in message and "s3cr3t" not in message


OLD = """
name: old
task: a:B
params: {api_key: s3cr3t, x: 1}
launch: {setup: ['#SBATCH -N 2']}
slurm: {extra: {arra: 1}}
"""


def test_a_run_goes_on_with_what_it_was_submitted_with(tmp_path: Path, errors_of: Callable[..., str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(OLD)
    assert load_resolved(file).params["api_key"] == "s3cr3t"
    job = load_run_job(file, ["slurm.time=10:00", "launch.setup=['#SBATCH -N 2', 'true']"])
    assert job.spec.slurm.time == 600


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("params.api_key=an0ther", "params.api_key: is the name of a secret"),
        ("params.password=an0ther", "params.password: is the name of a secret"),
        ("launch.setup=['#SBATCH -N an0ther']", "launch.setup.0: is a directive that sbatch may obey"),
        ("slurm.extra.outpu=an0ther", "slurm.extra.outpu: is short for output to sbatch"),
    ],
)
def test_what_a_person_changes_in_a_run_is_checked(tmp_path: Path, setting: str, words: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(OLD)
    with pytest.raises(JobFileError) as caught:
        load_run_job(file, [setting])
    assert words in str(caught.value) and "an0ther" not in str(caught.value)
    assert str(caught.value).startswith(f"--set {setting.partition('=')[0]}=...: ")
