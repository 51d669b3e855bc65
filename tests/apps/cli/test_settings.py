"""The settings saved with every answer suffice to recognise them, and hold no secret."""

from __future__ import annotations

from typing import Any

from corelm import SamplingParams
from corelm_cli.settings import recorded_options, recorded_sampling
from helpers.command_line import generate, settings_of

KEY = "sk-hush"

SECRET: list[dict[str, Any]] = [
    {"api_key": KEY},
    {"hf_token": KEY},
    {"API_KEYS": f"{KEY},{KEY}"},
    {"password": 123456789},
    {"ssl_keyfile_password": KEY},
    {"hf_auth": KEY},
    {"headers": {"Authorization": f"Bearer {KEY}"}},
    {"headers": {"X-Anything": KEY}},
    {"env": {"HF_TOKEN": KEY, "PGPASSWORD": KEY, "PLAIN": KEY}},
    {"model_kwargs": {"token": KEY, "auth": {"user": KEY, "number": 123456789}}},
    {"server_args": ["--admin-api-key", KEY]},
    {"deep": [{"deeper": [[KEY]]}]},
    {"proxy": f"http://me:{KEY}@host:8000/v1"},
]


def test_a_secret_is_not_saved():
    for options in SECRET:
        settings = [recorded_options(options), recorded_sampling(SamplingParams(engine_kwargs=options))]
        assert KEY not in str(settings) and "123456789" not in str(settings), next(iter(options))


def test_options_that_are_not_secret_are_saved_as_they_are():
    options = {
        "dtype": "bfloat16",
        "tokenizer": "here",
        "max_num_batched_tokens": 8192,
        "trust_remote_code": True,
        "use_auth_token": False,
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "add_bos_token": True,
        "base_url": "http://host:8000/v1",
        "rope_scaling": {"factor": 2.0, "type": None},
    }
    assert recorded_options(options) == options


def test_another_token_of_the_tokenizer_is_another_setting():
    for name in ("bos_token", "pad_token", "mask_token", "add_bos_token", "add_eos_token"):
        one, two = ({name: value} for value in ((True, False) if name.startswith("add") else ("<s>", "</s>")))
        assert recorded_options(one) != recorded_options(two) != recorded_options({}), name
        assert recorded_options({"tokenizer_kwargs": one}) != recorded_options({"tokenizer_kwargs": two}), name


def test_another_value_is_another_setting_unless_it_is_a_secret():
    made = recorded_options({"env": {"ATTENTION": "flash", "HF_TOKEN": "one"}, "api_key": "one"})
    assert made == recorded_options({"env": {"ATTENTION": "flash", "HF_TOKEN": "two"}, "api_key": "two"})
    assert made == recorded_options({"env": {"ATTENTION": "flash", "HF_TOKEN": "one"}})
    assert made != recorded_options({"env": {"ATTENTION": "eager", "HF_TOKEN": "one"}, "api_key": "one"})


def test_no_file_of_a_run_holds_a_secret(files, fabricate):
    accepting = """
from corelm_testing.toy import ToyBackend

class Accepting(ToyBackend):
    @classmethod
    def open(cls, model=None, **options):
        return super().open()
"""
    fabricate("accepting", "1", {"accepting": "accepting:Accepting"}, {"accepting": accepting})
    with files[0].open("a") as file:
        file.write("not json\n")
    secrets = ("--option", f"api_key={KEY}", "--option", f'headers={{"X-Mine": "{KEY}", "Authorization": "{KEY}"}}')
    for more in (secrets, secrets, (*secrets[:-1], 'headers={"X-Mine": "other"}')):
        result = generate(files, *more, backend="accepting")
        assert KEY not in result.output
    assert result.exit_code == 2 and "was made with options" in result.stderr
    for path in files[1].parent.glob("answers*"):
        assert KEY not in path.read_text()
    assert settings_of(files[1])["settings"]["options"]["headers"]["Authorization"] == "***"


def test_an_option_that_is_not_what_it_seems_is_refused(files):
    for option, message in (
        (["x={not json}"], "x is not valid JSON"),
        (["x=[NaN]"], "x is not valid JSON: JSON has no number for NaN"),
        (['x={"a": 1, "a": 2}'], "the key 'a' occurs more than once"),
        (["max_context=99", "max_context=98"], "max_context is given more than once"),
    ):
        result = generate(files, *(word for each in option for word in ("--option", each)))
        said = " ".join(result.stderr.replace("│", " ").split())
        assert result.exit_code == 2 and message in said and not files[1].exists(), option


def test_a_sampling_parameter_of_the_engine_is_never_left_out():
    """The name of an engine option may say that it is a secret. A parameter under this name still changes answers."""
    made = [recorded_sampling(SamplingParams(engine_kwargs={"stop_at_token": value})) for value in (5, 6)]
    assert made[0] != made[1] and made[0] != recorded_sampling(SamplingParams())
