import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import JsonValue

from d9d_metrics.trackers.redaction import redact_command, redact_secrets, redact_text


@pytest.mark.parametrize(
    "name",
    [
        *("password", "db_password", "api_key", "apiKey", "OPENAI_API_KEY", "hub_token", "hubToken", "client-secret"),
        *("auth", "aws_secret_access_key", "AWS_ACCESS_KEY_ID", "privateKey", "credentials", "Authorization"),
    ],
)
def test_values_with_secret_names_are_redacted(name: str) -> None:
    assert redact_secrets({"a": [{name: "canary"}]}, {}) == {"a": [{name: "<redacted>"}]}
    assert redact_secrets({name: {"value": "canary"}}, {}) == {name: "<redacted>"}
    assert redact_secrets({name: None}, {}) == {name: None}


_TEXT_TOKENS = ("eos_token", "end_token", "padToken", "bos_token_id", "decoder_start_token_id")


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "num_tokens",
        "tokens",
        "max_token_length",
        "key",
        "keys",
        "key_size",
        "keep_last",
        "author",
        *_TEXT_TOKENS,
    ],
)
def test_values_with_other_names_are_kept(name: str) -> None:
    assert redact_secrets({name: "value"}, {}) == {name: "value"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:canary@host/path", "https://<redacted>@host/path"),
        ("curl -H 'Authorization: Bearer canary12345'", "curl -H 'Authorization: <redacted>'"),
        ("hf_canary123456", "<redacted>"),
        ("key=AKIAIOSFODNN7CANARY", "key=<redacted>"),
        ("-----BEGIN RSA PRIVATE KEY-----\ncanary\n-----END RSA PRIVATE KEY-----", "<redacted>"),
        ("the value is hunter2-canary!", "the value is <redacted>!"),
        ("https://host:80/a@b", "https://host:80/a@b"),
        ("runs/hf_models", "runs/hf_models"),
    ],
)
def test_text_with_the_format_of_a_secret_is_redacted(text: str, shown: str) -> None:
    environment = {"MY_TOKEN": "hunter2-canary", "HOME": "/root", "SHORT_TOKEN": "the"}
    assert redact_secrets({"a": [text]}, environment) == {"a": [shown]}


def test_values_that_json_lacks_become_text() -> None:
    config: dict[str, Any] = {"data": Path("/data"), "dtype": torch.bfloat16, "clip": math.inf, "labels": {0: "a"}}
    assert redact_secrets(config, {}) == {
        "data": "/data", "dtype": "torch.bfloat16", "clip": "inf", "labels": {"0": "a"}
    }  # fmt: skip


def test_returns_a_copy() -> None:
    config: dict[str, JsonValue] = {"a": {"password": "canary"}}
    redact_secrets(config)
    assert config == {"a": {"password": "canary"}}


def test_reads_environment_variables_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "canary-of-the-process")
    assert redact_secrets({"command": "--key canary-of-the-process"}) == {"command": "--key <redacted>"}


def test_the_current_folder_is_no_secret() -> None:
    environment = {"PWD": "/home/me/project", "OLDPWD": "/home/me", "DB_PWD": "hunter2"}
    config: dict[str, JsonValue] = {"folder": "/home/me/project/runs", "text": "hunter2 of /home/me"}
    assert redact_secrets(config, environment) == {**config, "text": "<redacted> of /home/me"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ConnectionError: postgres://me:canary@db:5432/x", "ConnectionError: postgres://<redacted>@db:5432/x"),
        ("GET https://host/a?token=canary123&part=2", "GET https://host/a?token=<redacted>&part=2"),
        ("login failed: password='canary 1'", "login failed: password='<redacted>'"),
        ('{"api_key": "canary"}', '{"api_key": "<redacted>"}'),
        ("redis://:canary@host", "redis://<redacted>@host"),
        ("https://me:can@ary@host/x", "https://<redacted>@host/x"),
        ("https://0123456789abcdefcanary@o1.ingest.example/2", "https://<redacted>@o1.ingest.example/2"),
        ("https://host/a?sig=canary123&part=2", "https://host/a?sig=<redacted>&part=2"),
        ("https://host/?X-Amz-Signature=canary123", "https://host/?X-Amz-Signature=<redacted>"),
        ("POST https://hooks.slack.com/services/T0/B0/canary", "POST https://hooks.slack.com/services/<redacted>"),
        ("headers {'Authorization': 'Basic canary='}", "headers {'Authorization': '<redacted>'}"),
        ("authorization: token canary12", "authorization: <redacted>"),
        ("x-api-key: canary12", "x-api-key: <redacted>"),
        ("Set-Cookie: session=canary; path=/", "Set-Cookie: <redacted>"),
        ("wandb.login(key='0123456789abcdef0123456789abcdef01234567')", "wandb.login(key='<redacted>')"),
        ("invalid API key 0123456789abcdef0123456789abcdef", "invalid API key <redacted>"),
        ("AccountKey=canarycanary/+==;Suffix=x", "AccountKey=<redacted>;Suffix=x"),
        ("run --hub.token canary1 --steps 3 failed", "run --hub.token <redacted> --steps 3 failed"),
        ("curl -u me:canary https://host", "curl -u <redacted> https://host"),
        ("sk_live_canary123456, npm_canary123456, AIzacanary123456", "<redacted>, <redacted>, <redacted>"),
        (r"body {\"api_key\": \"canary\"}", r"body {\"api_key\": \"<redacted>\"}"),
        ("KeyError: 'num_tokens'", "KeyError: 'num_tokens'"),
        ("pad_token: '<pad>', dataset.end_token = <|im_end|>", "pad_token: '<pad>', dataset.end_token = <|im_end|>"),
        ("commit 0123456789abcdef0123456789abcdef01234567", "commit 0123456789abcdef0123456789abcdef01234567"),
        ("forward pass: NaN, key=layers.0, password: None", "forward pass: NaN, key=layers.0, password: None"),
        ("tokens: 12345, batch.tokens=40000", "tokens: 12345, batch.tokens=40000"),
    ],
)
def test_secrets_in_messages_are_redacted(text: str, shown: str) -> None:
    assert redact_text(text) == shown


def test_long_texts_take_linear_time() -> None:
    assert redact_text(".a-b" * 10_000) == ".a-b" * 10_000


def test_secrets_of_a_command_line_are_redacted() -> None:
    assert redact_command(["x", "--wandb.api-key=canary", "--token=c"]) == [
        "x",
        "--wandb.api-key=<redacted>",
        "--token=<redacted>",
    ]

    command = ["train.py", "--hub.token", "canary", "--api_key=canary", "--steps", "3", "--url", "s3://a:canary@b"]
    shown = [
        "train.py",
        "--hub.token",
        "<redacted>",
        "--api_key=<redacted>",
        "--steps",
        "3",
        "--url",
        "s3://<redacted>@b",
    ]
    assert redact_command(command) == shown
