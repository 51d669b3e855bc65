"""Secrets are masked wherever they are in a message, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corelm.errors import EngineError
from corelm.support import Secrets

KEY = "sk-0123456789"


@pytest.mark.parametrize("text", [KEY, f"x{KEY}y", f"Bearer {KEY}", f"b'{KEY}\\r\\n'", f'{{"k": "{KEY}"}}'])
def test_a_key_is_masked_wherever_it_is(text: str) -> None:
    for secrets in (
        Secrets([KEY]),
        Secrets(headers={"X-Key": KEY}),
        Secrets(headers={"Authorization": f"Bearer {KEY}"}),
    ):
        masked = secrets.masked(text)
        assert KEY not in masked and "***" in masked


def test_the_scheme_of_a_header_is_not_a_secret() -> None:
    assert Secrets(headers={"Authorization": f"Bearer {KEY}"}).masked("expected: Bearer KEY") == "expected: Bearer KEY"


def test_a_short_key_is_masked_only_as_a_whole_word() -> None:
    secrets = Secrets(["token"])
    assert secrets.masked("bad key token!") == "bad key ***!" and secrets.masked("token_id:7") == "token_id:7"


def test_the_longest_secret_is_masked_first() -> None:
    assert Secrets([KEY, KEY + "-more"]).masked(KEY + "-more") == "***"


def masked_reply(secrets: Secrets, reply: Any) -> Any:
    return secrets.masked_reply(reply, json.dumps(reply).encode())


def test_a_reply_keeps_its_numbers_and_names() -> None:
    reply = {"12345": [12345, -1.5, "12345", None, True], "a": {"b": "key 12345"}}
    assert masked_reply(Secrets(["12345"]), reply) == {"12345": [12345, -1.5, "***", None, True], "a": {"b": "key ***"}}


def test_a_reply_keeps_what_a_header_without_a_key_holds() -> None:
    reply = {"model": "a-model-of-ours", "said": KEY}
    headers = {"X-Model": "a-model-of-ours", "X-Api-Key": KEY}
    assert masked_reply(Secrets(headers=headers), reply) == {"model": "a-model-of-ours", "said": "***"}
    assert Secrets(headers=headers).masked("no a-model-of-ours") == "no ***"


def test_without_secrets_nothing_changes() -> None:
    assert Secrets().masked("a b c") == "a b c" and Secrets([None, "", "abc"], {}).longest == 0
    assert str(Secrets([KEY]).masked_error(EngineError(f"no {KEY}", usable=True))) == "no ***"
