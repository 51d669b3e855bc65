"""Opening: what is accepted, what is refused, and what importing the plugin imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import corelm
from corelm.errors import BackendClosedError, CapabilityError, EngineError, InvalidRequestError
from helpers import oracle
from helpers.plain_forward import Open, assert_answers, assert_scores
from helpers.tiny_models import CONTEXT, DEVICE, VOCAB, random_rows, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a saved model and its tokenizer."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.process
def test_loading_the_plugin_does_not_import_transformers() -> None:
    code = "import sys, transformers_backend; print([m for m in ('transformers', 'peft') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_folder_opens_by_name(folder: Path) -> None:
    model = tiny_model()
    with corelm.get_backend("transformers", folder, dtype="float32", device="cpu") as backend:
        (ids,) = backend.tokenize(["What does a cow say?"]).ids.tolist()
        assert ids == tiny_tokenizer()("What does a cow say?")["input_ids"]
        found = backend.score_logprobs([ids]).logprobs.values
        torch.testing.assert_close(found, oracle.logprobs(model, ids), rtol=0, atol=1e-5)
        capabilities = backend.capabilities
        assert (capabilities.vocab_size, capabilities.max_context) == (VOCAB, CONTEXT)
        assert capabilities.eos_token_ids == {2} and capabilities.gradients and not capabilities.empty_prompt
    with pytest.raises(BackendClosedError):
        backend.score_logprobs([ids])


def test_options_of_loading_are_honoured(folder: Path) -> None:
    options = {"attn_implementation": "eager", "model_kwargs": {"max_position_embeddings": 99}}
    with corelm.get_backend("transformers", folder, dtype="bfloat16", **options) as backend:
        base = backend.engine.plugin.engine.base
        assert base.dtype == torch.bfloat16 and base.config._attn_implementation == "eager" and not base.training
        assert backend.capabilities.max_context == 99


def test_limits_are_the_models_not_the_tokenizers(open_model: Open) -> None:
    backend = open_model(tiny_model(vocab_size=VOCAB + 64, max_position_embeddings=64))
    assert (backend.capabilities.vocab_size, backend.capabilities.max_context) == (VOCAB + 64, 64)
    assert len(tiny_tokenizer()) <= VOCAB and tiny_tokenizer().model_max_length > 64
    assert backend.generate([[VOCAB + 63] * 63], {"max_new_tokens": 1}).ids.lengths.tolist() == [1]


def test_only_ids_that_have_an_embedding_are_read(open_model: Open) -> None:
    """A GPU that is given another id fails for the rest of the process, when it is opened with two ids as well."""
    model = tiny_model()
    model.set_input_embeddings(torch.nn.Embedding(100, 64, device=DEVICE))
    for each, embedded in ((model, 100), (tiny_model(vocab_size=2), 2)):
        seen: list[int] = []
        each.get_input_embeddings().register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(int(args[0].max()))
        )
        backend = open_model(each)
        backend.score_logprobs([[0, 1, 1]])
        assert len(seen) > 1 and max(seen) < embedded
    backend = open_model(model)
    with pytest.raises(
        InvalidRequestError, match="row 1: the model has embeddings for the 100 first ids only"
    ) as caught:
        backend.score_logprobs([[3, 4], [3, 100]])
    assert caught.value.field == "sequences" and [*caught.value.problems] == [1]
    with pytest.raises(InvalidRequestError, match="prompts: row 0"):
        backend.generate([[511]], {"max_new_tokens": 1})


def test_an_eos_outside_the_vocabulary_is_ignored(open_model: Open) -> None:
    assert open_model(tiny_model(eos_token_id=50256)).capabilities.eos_token_ids == {tiny_tokenizer().eos_token_id}
    assert open_model(tiny_model(vocab_size=2)).capabilities.eos_token_ids == frozenset()


def test_an_option_without_effect_is_an_error() -> None:
    cases: list[tuple[object, dict[str, object], str]] = [
        (tiny_model(), {"dtpye": "float32"}, "dtpye"),
        (tiny_model(), {"dtype": "bfloat16"}, "dtype"),
        (tiny_model(), {"dtype": "fp16"}, "dtype"),
        (tiny_model(), {"device": "meta"}, "device"),
        (tiny_model(), {"attn_implementation": "eager"}, "attn_implementation"),
        (tiny_model(), {"model_kwargs": {"revision": "main"}}, "model_kwargs"),
        (tiny_model(), {}, "tokenizer"),
        (None, {}, "model"),
        (3, {}, "model"),
    ]
    for model, options, field in cases:
        with pytest.raises(InvalidRequestError) as caught:
            corelm.get_backend("transformers", model, **options)
        assert caught.value.field == field, (model, options)


def test_options_that_a_model_object_has_already_are_accepted() -> None:
    options = {"dtype": "float32", "device": DEVICE, "attn_implementation": "sdpa"}
    with corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer(), **options):
        pass
    with pytest.raises(InvalidRequestError, match=r"convert it with model.to\(torch.bfloat16\), or leave dtype out"):
        corelm.get_backend("transformers", tiny_model(), dtype=torch.bfloat16)


def test_a_path_that_is_not_there_is_refused_without_asking_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "final").mkdir(parents=True)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    absent = ("./absent", "~/no-such-model", "a/b/c", str(tmp_path / "absent"), tmp_path / "absent", "x/")
    for path in absent:
        with pytest.raises(InvalidRequestError, match="model: there is no file or folder") as caught:
            corelm.get_backend("transformers", path)
        assert caught.value.__cause__ is None and caught.value.field == "model"
    with pytest.raises(InvalidRequestError, match=r"the path exists up to '.*runs'"):
        corelm.get_backend("transformers", "./runs/finl")
    with pytest.raises(InvalidRequestError, match="tokenizer: there is no file or folder"):
        corelm.get_backend("transformers", tiny_model(), tokenizer="./absent")


def test_a_name_on_a_hub_is_looked_up_also_next_to_a_folder_of_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fail(path: str, *_: object, **__: object) -> None:
        asked.append(path)
        raise OSError("no hub in this test")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen2.5-1.5B").mkdir(parents=True)
    for loader in ("AutoConfig", "AutoModelForCausalLM"):
        monkeypatch.setattr(f"transformers.{loader}.from_pretrained", fail)
    for name in ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/QwQ-32B"):
        asked.clear()
        with pytest.raises(EngineError, match=name):
            corelm.get_backend("transformers", name)
        assert set(asked) == {name}


def test_a_name_that_no_hub_has_is_one_error_without_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("absent-model is not a local folder\nand more lines")

    for loader in ("AutoConfig", "AutoModelForCausalLM"):
        monkeypatch.setattr(f"transformers.{loader}.from_pretrained", fail)
    with pytest.raises(EngineError, match=r"'absent-model' is not a folder in .*: absent-model") as caught:
        corelm.get_backend("transformers", "absent-model")
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_a_device_or_dtype_that_is_not_here_is_refused_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    for field, value in (("device", "cuda"), ("dtype", "fp16"), ("device", "gpu")):
        with pytest.raises(InvalidRequestError) as caught:
            corelm.get_backend("transformers", folder, **{field: value})
        assert caught.value.field == field, value


def test_other_kinds_of_models_are_refused(open_model: Open) -> None:
    config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    for model in (transformers.T5ForConditionalGeneration(config), tiny_model().model, torch.nn.Linear(2, 2)):
        with pytest.raises(CapabilityError, match=type(model).__name__):
            open_model(model)


def test_a_model_without_a_cache_reads_each_row_again_for_every_token(open_model: Open) -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2)
    model, (ids,) = transformers.OpenAIGPTLMHeadModel(config).eval(), random_rows(9)
    backend = open_model(model)
    assert_scores(backend, model, [ids])
    assert_answers(backend.generate([ids, ids[:4]], {"max_new_tokens": 5}), model, [ids, ids[:4]])


def test_code_that_comes_with_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (folder / "planted.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass Config: ...\nclass Model: ...\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "planted",
        "auto_map": {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError):
        corelm.get_backend("transformers", folder)
    assert not trace.exists()


def test_no_bars_in_a_pipe(tiny_model, capfd):
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    corelm.get_backend("transformers", tiny_model).close()
    assert "Loading weights" not in capfd.readouterr().err and logging.is_progress_bar_enabled() == shown
