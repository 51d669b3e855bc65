"""Secrets are masked wherever they are in a message, and nothing else is."""

from __future__ import annotations

import traceback

import pytest

from corelm.errors import EngineError
from corelm_engine_kit import Secrets

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


def test_errors_of_a_block_are_masked_and_so_are_their_causes() -> None:
    secrets = Secrets([KEY])
    with pytest.raises(EngineError) as caught, secrets.masking_errors():
        try:
            int(KEY)
        except ValueError as cause:
            raise EngineError(f"no {KEY}", usable=True) from cause
    assert str(caught.value) == "no ***" and caught.value.usable
    assert KEY not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(EngineError) as caught, secrets.masking_errors():
        raise EngineError("a") from KeyError("b")
    assert isinstance(caught.value.__cause__, KeyError)


def test_without_secrets_nothing_changes() -> None:
    assert Secrets().masked("a b c") == "a b c" and Secrets([None, "", "abc"], {}).longest == 0
    assert str(Secrets([KEY]).masked_error(EngineError(f"no {KEY}", usable=True))) == "no ***"


def test_the_words_of_a_key_are_not_secret() -> None:
    assert Secrets(["the key of a server"]).masked("the server refuses the key of a server") == "the server refuses ***"
