"""What is measured of a real SGLang server: cache hits, and the time to the first token."""

from __future__ import annotations

from corelm import Backend
from helpers.measuring import check_cache_hits, check_first_token


def test_the_second_call_finds_the_prompt_in_the_cache(shared: Backend) -> None:
    check_cache_hits(shared)


def test_the_first_token_comes_before_the_others(shared: Backend) -> None:
    check_first_token(shared)
