"""lm-eval's own client of the OpenAI protocol asks a server for log-likelihoods and answers."""

from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the server needs the extra serve")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

import corelm
from corelm_serve import ServerOptions, ServerThread
from helpers import oracle
from helpers.tiny_models import tiny_model, tiny_tokenizer

PAIRS = [("The cat", " is on the mat"), ("Where is", " the sea?"), ("A small bird", " sings")]


@pytest.mark.parametrize("tokenized", [True, False])
def test_log_likelihoods_and_answers_over_http(
    tokenized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    with (
        corelm.get_backend("transformers", model, tokenizer=tokenizer) as backend,
        ServerThread(backend, ServerOptions(model_name="m")) as server,
    ):
        monkeypatch.setenv("OPENAI_API_KEY", server.api_key)
        harness = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model="m",
            tokenizer=str(tmp_path),
            tokenized_requests=tokenized,
            batch_size=2,
        )
        asked = [Instance("loglikelihood", {}, pair, at) for at, pair in enumerate(PAIRS)]
        for (context, continuation), (found, greedy) in zip(PAIRS, harness.loglikelihood(asked), strict=True):
            ids = tokenizer(context + continuation)["input_ids"]
            begin = len(tokenizer(context)["input_ids"])
            assert found == pytest.approx(float(oracle.logprobs(model, ids)[begin:].sum()), abs=1e-4)
            best = oracle.next_logits(model, ids).argmax(-1).tolist()
            assert greedy == (best[begin - 1 : -1] == ids[begin:])
        options = {"until": ["\n"], "max_gen_toks": 12, "temperature": 0}
        (answer,) = harness.generate_until([Instance("generate_until", {}, (PAIRS[0][0], options), 0)])
        row = tokenizer(PAIRS[0][0])["input_ids"]
        plain = backend.generate([row], {"max_new_tokens": 12, "temperature": 0.0, "stop": "\n"})
        assert backend.detokenize(plain.ids)[0].startswith(answer)
