"""`wide_model` saves a model with which a mistake is visible, and `PlainOracle` is its plain forward."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import corelm
from corelm import History
from corelm.errors import InvalidRequestError
from corelm_testing import PlainOracle, tiny, wide_model
from corelm_testing.reference import MIN_P_VALUE, OPENINGS
from corelm_testing.tiny import build_tiny
from corelm_testing.wide_models import CONTEXT, FAMILIES, VOCAB
from helpers.tiny_models import random_rows, tiny_tokenizer


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.nightly] if number > 3 else []) for number, name in enumerate(FAMILIES)],
)
def test_every_family_is_wide_and_ends_some_of_its_answers(family: str, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    folder = wide_model(tmp_path / "model", family)
    assert torch.equal(torch.get_rng_state(), before)
    oracle, tokenizer = PlainOracle.load(folder), AutoTokenizer.from_pretrained(folder)
    texts = [*OPENINGS, *(opening + " end." for opening in OPENINGS)]
    rows = [*random_rows(*[3] * 24), *tokenizer(texts)["input_ids"]]
    found = torch.stack([oracle.next_logprobs(row, 1.0) for row in rows])
    assert found.shape == (len(rows), VOCAB) and float(found.std(-1).min()) > 1.0
    # The kit samples until an answer ends, after the prompt where that is likeliest, and at most 2000 times.
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer("It is so")["input_ids"] == tiny_tokenizer()("It is so")["input_ids"]
    assert math.log(MIN_P_VALUE) / math.log1p(-float(found[:, 2].exp().max())) < 2000


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_the_same_arguments_give_the_same_weights_and_another_seed_others(family: str, tmp_path: Path) -> None:
    one, same, other, small = (
        AutoModelForCausalLM.from_pretrained(wide_model(tmp_path / str(number), family, **given)).state_dict()
        for number, given in enumerate(({}, {}, {"seed": 1}, {"num_hidden_layers": 1}))
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert one.keys() == other.keys() and not any(torch.equal(one[name], other[name]) for name in one)
    assert small.keys() < one.keys()


def test_the_folder_is_one_that_a_backend_opens(tmp_path: Path) -> None:
    folder = wide_model(tmp_path / "model")
    oracle = PlainOracle.load(folder)
    with corelm.get_backend("transformers", folder) as backend:
        assert backend.capabilities.max_context == CONTEXT
        prompts = History.from_chats([[{"role": "user", "content": "Who?"}]]).apply_chat_template(backend.tokenizer)
        assert "<|im_start|>user" in prompts[0]
        answers = backend.generate([[5, 6, 7]], {"max_new_tokens": 5, "seed": 1})
        expected = oracle.logprobs([5, 6, 7, *answers.ids.tolist()[0]], 1.0)[3:]
        torch.testing.assert_close(answers.logprobs.values, expected, atol=1e-4, rtol=0)


def test_mistakes_say_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"'llama', 'gpt2'.*got 'lama'") as caught:
        wide_model(tmp_path / "model", "lama")
    assert caught.value.field == "family"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match="choose another folder"):
        wide_model(tmp_path / "model")


# `python -m corelm_testing.tiny` --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opens(path: Path) -> bool:
    with corelm.get_backend("transformers", path, dtype="float32") as backend:
        prompts = backend.tokenize(["What is your name?"]).ids
        return len(backend.generate(prompts, {"max_new_tokens": 4}).ids) == 1


def test_the_command_makes_a_model_that_a_backend_opens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiny, "build_tiny", partial(build_tiny, steps=3))
    tiny.main(["made"])
    out, err = capsys.readouterr()
    # A pipe gets no progress bars.
    assert (out, err) == ("saved to made; open it with corelm.get_backend('transformers', 'made')\n", "")
    assert opens(folder / "made")


@pytest.mark.process
@pytest.mark.nightly
def test_the_module_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "corelm_testing.tiny"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("saved to tiny-model;")
    assert opens(tmp_path / "tiny-model")


def test_a_folder_with_files_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "model.safetensors").write_bytes(b"weeks of training")
    with pytest.raises(SystemExit) as ended:
        tiny.main(["mine"])
    assert ended.value.code == 2 and "'mine' exists already" in capsys.readouterr().err
    assert (folder / "mine" / "model.safetensors").read_bytes() == b"weeks of training"
    with pytest.raises(InvalidRequestError) as caught:
        build_tiny(folder / "mine", steps=1, progress=False)
    assert caught.value.field == "path"


def test_impossible_sizes_are_refused(folder: Path) -> None:
    for options in ({"heads": 3}, {"heads": 0}, {"layers": 0}):
        with pytest.raises(InvalidRequestError) as caught:
            build_tiny(folder / "model", **options)
        assert caught.value.field == next(iter(options)), options


def test_without_transformers_the_command_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tiny.main(["--help"])
    assert "python -m corelm_testing.tiny" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as ended:
        tiny.main(["made"])
    assert ended.value.code == 2 and 'pip install "transformers' in capsys.readouterr().err
    assert not (folder / "made").exists()
