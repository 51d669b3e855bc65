"""Which options of an engine are secrets, by their names."""

import pytest

from corelm_engine_kit.redaction import is_secret


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "apikey", "OPENAI-API-KEY", "hf_token", "api_keys", "auth_tokens", "password", "bearer"),
        *("openai_api_key_prod", "api_token_prod", "token_1", "access_key_id", "token_file", "keys-of-all"),
        *("keyfile", "ssl_keyfile", "header", "http_headers_json"),
    ],
)
def test_these_are_secrets(name):
    assert is_secret(name, "sk-0123") and is_secret(name, ["sk-0123", "sk-4567"]) and not is_secret(name, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_num_batched_tokens", 8), ("num_key_value_heads", 4), ("token_sizes", [8, 16])),
        *(("bos_token", "<s>"), ("add_eos_token", "yes"), ("additional_special_tokens", ["<a>"])),
        *(("tokenizer", "PATH"), ("tokenizer_mode", "slow"), ("tokenizers", ["PATH"]), ("keyword", "word")),
        *(("headers", {"X-Tenant": "a"}), ("dtype", "float32")),
    ],
)
def test_these_are_not(name, value):
    assert not is_secret(name, value)
