"""New weights for an open engine: loaded completely or not at all, from a state dict or a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from corelm import Backend
from corelm.errors import BackendAsleepError, CapabilityError, InvalidRequestError
from corelm.spec import When
from engines.vllm.engine_access import unfinished_requests
from helpers import oracle
from helpers.processes import wait_until
from helpers.tiny_models import CONTEXT, random_rows, tiny_model, tiny_tokenizer

Open = Callable[..., Backend]
#: A prompt that is long enough for the prefix cache.
(IDS,) = random_rows(200)
LONG = {"max_new_tokens": CONTEXT - 8, "ignore_eos": True}


def model_of(seed: int, family: str = "qwen2") -> nn.Module:
    return tiny_model(family, hidden_size=128, seed=seed)


@pytest.fixture
def backend(open_vllm: Open) -> Iterator[Backend]:
    with open_vllm(engine="sync") as backend:
        yield backend


def matches_model(backend: Backend, model: nn.Module) -> bool:
    """Compare an answer, a whole score, and a score that vLLM may compute from cached prefixes."""
    answer = backend.generate([IDS], {"max_new_tokens": 4, "temperature": 0.0})
    assert answer.logprobs is not None
    expected = oracle.answer_logprobs(model, IDS, answer.ids.tolist()[0])
    scores = oracle.logprobs(model, IDS)
    return (
        close(answer.logprobs.values, expected)
        and close(backend.score_logprobs([IDS]).logprobs.values, scores)
        and close(backend.score_logprobs([IDS], score_from=[199]).logprobs.values[-1:], scores[-1:])
    )


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=0, atol=1e-4)


def test_weights_are_loaded_from_a_state_dict_or_a_folder(backend: Backend, tmp_path: Path) -> None:
    assert matches_model(backend, model_of(0))
    backend.update_weights(model_of(1).state_dict())
    assert matches_model(backend, model_of(1)) and not matches_model(backend, model_of(0))
    model_of(2).save_pretrained(tmp_path / "two")  # type: ignore[operator]
    backend.update_weights(tmp_path / "two")
    assert matches_model(backend, model_of(2))
    # In several files that an index lists.
    model_of(3).save_pretrained(tmp_path / "three", max_shard_size="100KB")  # type: ignore[operator]
    assert len([*(tmp_path / "three").glob("*.safetensors")]) > 1
    assert backend.update_weights(tmp_path / "three", version="three") == "three"
    assert matches_model(backend, model_of(3))
    # The checkpoint that the engine was opened on is remembered, so names can still be checked.
    backend.update_weights(model_of(0).state_dict())
    assert matches_model(backend, model_of(0))


def test_a_model_object_is_loaded(backend: Backend) -> None:
    assert backend.update_weights(torch.compile(model_of(1))) == "1"
    assert matches_model(backend, model_of(1)) and not matches_model(backend, model_of(0))


def one_by_one(model: nn.Module, stop: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield weights in the same memory, as a trainer that gathers shards does."""
    memory = torch.empty(max(tensor.numel() for tensor in model.state_dict().values()))
    for name, tensor in list(model.state_dict().items())[:stop]:
        yield name, memory[: tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["sync", "async"])
def test_an_iterator_is_loaded_if_it_is_complete(open_vllm: Open, engine: str) -> None:
    with open_vllm(engine=engine) as backend:
        with pytest.raises(InvalidRequestError, match="missing"):
            backend.update_weights(one_by_one(model_of(1), stop=9))
        assert backend.weight_version == "0" and matches_model(backend, model_of(0))
        assert backend.update_weights(one_by_one(model_of(1)), version="one") == "one"
        assert matches_model(backend, model_of(1)) and not matches_model(backend, model_of(0))


@pytest.mark.nightly
def test_experts_are_not_replaced_on_a_cpu(open_vllm: Open, tmp_path: Path) -> None:
    """Loading them again, also from a folder, leaves vLLM 0.32 with wrong answers."""
    model_of(0, "qwen3-moe").save_pretrained(tmp_path)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path)
    with open_vllm(tmp_path, engine="sync") as backend:
        assert matches_model(backend, model_of(0, "qwen3-moe"))
        with pytest.raises(CapabilityError):
            backend.update_weights(model_of(1, "qwen3-moe"))


def test_a_state_dict_may_have_another_dtype(backend: Backend) -> None:
    new = model_of(1)
    short = {name: tensor.bfloat16() for name, tensor in new.state_dict().items()}
    new.load_state_dict(short)
    backend.update_weights(short)
    assert matches_model(backend, new) and not matches_model(backend, model_of(1))


def test_weights_are_refused_if_vllm_would_keep_the_old_tied_head(open_vllm: Open, tmp_path: Path) -> None:
    model_of(0, "qwen2-tied").save_pretrained(tmp_path)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path)
    with open_vllm(tmp_path, engine="sync") as backend:
        assert matches_model(backend, model_of(0, "qwen2-tied"))
        with pytest.raises(CapabilityError, match=r"lacks update_weights: on a CPU.*lm_head\.weight"):
            backend.update_weights(model_of(1, "qwen2-tied").state_dict())


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["sync", "async"])
@pytest.mark.parametrize("has_weights", [True, False])
def test_an_engine_without_weights_answers_once_it_was_given_some(
    open_vllm: Open, tmp_path: Path, engine: str, has_weights: bool
) -> None:
    model_of(0).save_pretrained(tmp_path)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path)
    if not has_weights:
        (tmp_path / "model.safetensors").unlink()
    with open_vllm(tmp_path, engine=engine, load_format="dummy") as backend:
        for call in (lambda: backend.generate([IDS], {"max_new_tokens": 2}), lambda: backend.score_logprobs([IDS])):
            with pytest.raises(BackendAsleepError, match="has no weights yet"):
                call()
        short = {**model_of(1).state_dict(), "model.norm.weight": torch.zeros(3)}
        with pytest.raises(InvalidRequestError, match=r"model\.norm\.weight"):
            backend.update_weights(short)
        with pytest.raises(BackendAsleepError, match="no weights"):
            backend.score_logprobs([IDS])
        backend.update_weights(model_of(1).state_dict())
        assert matches_model(backend, model_of(1))
        model_of(2).save_pretrained(tmp_path / "two")  # type: ignore[operator]
        backend.update_weights(tmp_path / "two")
        assert matches_model(backend, model_of(2))


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3-moe"])
def test_an_engine_without_weights_that_could_not_be_given_any_is_not_opened(
    open_vllm: Open, tmp_path: Path, family: str
) -> None:
    model_of(0, family).save_pretrained(tmp_path)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(CapabilityError, match="load_format='dummy' needs weights later"):
        open_vllm(tmp_path, engine="sync", load_format="dummy")


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["drain", "abort"])
def test_answers_in_flight_are_made_with_the_old_weights_only(open_vllm: Open, when: When) -> None:
    prompts = random_rows(4, 5, 6)
    with open_vllm() as backend, ThreadPoolExecutor(2) as pool:
        call = pool.submit(backend.generate, prompts, LONG)
        assert wait_until(lambda: unfinished_requests(backend) == 3)
        backend.update_weights(model_of(1).state_dict(), version="new", when=when)
        result = call.result()
        assert result.weight_versions == ("0",) * 3 and result.logprobs is not None
        assert result.finish_reasons == ("length" if when == "drain" else "abort",) * 3
        for prompt, answer, found in zip(prompts, result.ids.tolist(), result.logprobs.split(), strict=True):
            assert close(found, oracle.answer_logprobs(model_of(0), prompt, answer))
        assert matches_model(backend, model_of(1))
