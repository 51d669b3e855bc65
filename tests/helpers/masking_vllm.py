"""`MaskingVLLM`: the fake server as if it was started with ``--return-sampling-mask --enable-scale-out``."""

import math
import random
from typing import Any

from helpers.fake_vllm import VOCAB, FakeVLLM, next_logprobs
from helpers.http_server import Reply, Request, json_reply

ROUTE = "/inference/v1/generate"


def kept(ids: list[int], top_k: int, top_p: float) -> tuple[list[int], float]:
    """Return the ids that the token after `ids` is drawn from, ascending, and the log of their mass."""
    logprobs = next_logprobs(ids)
    ranked = sorted(range(VOCAB), key=logprobs.__getitem__, reverse=True)[:top_k]
    total, before, left = sum(math.exp(logprobs[token]) for token in ranked), 0.0, []
    for token in ranked:
        if before < top_p * total:
            left.append(token)
        before += math.exp(logprobs[token])
    return sorted(left), math.log(sum(math.exp(logprobs[token]) for token in left))


class MaskingVLLM(FakeVLLM):
    """Returns the ids that tokens were drawn from on its second route, at temperature 1.

    Attributes:
        masks: whether it does so. If not, it was started without ``--return-sampling-mask``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mode, self.masks = "processed", True
        self.pages["/openapi.json"]["paths"][ROUTE] = {}

    def __call__(self, request: Request) -> Reply:
        asked = request.body if isinstance(request.body, dict) else {}
        sampling: dict[str, Any] = asked.get("sampling_params", asked)
        if self.masks and "temperature" in sampling and not (sampling["temperature"] > 0 and sampling["top_k"] > 0):
            return json_reply({"error": {"message": "", "type": "InternalServerError", "code": 500}}, 500)
        if request.path != ROUTE:
            return super().__call__(request)
        fault = self.fault(request)
        if fault is not None:
            return fault
        choice = self._answer(asked["token_ids"], sampling)
        self.spoil(choice)
        return json_reply({"request_id": f"generate-tokens-{asked.get('request_id')}", "choices": [choice]})

    def _answer(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        stream = random.Random(str((prompt, sampling.get("seed"))))
        ids: list[int] = []
        masks, content = [], []
        while len(ids) < sampling["max_tokens"]:
            left, mass = kept([*prompt, *ids], sampling["top_k"], sampling.get("top_p", 1.0))
            logprobs = next_logprobs([*prompt, *ids])
            token = stream.choices(left, [math.exp(logprobs[each]) for each in left])[0]
            among = {each: logprobs[each] - mass if each in left else -9999.0 for each in range(VOCAB)}
            best = sorted(among, key=among.__getitem__, reverse=True)[: sampling.get("logprobs") or 0]
            top = [{"token_id": each, "logprob": among[each]} for each in dict.fromkeys([token, *best])]
            masks.append(left)
            content.append({**top[0], "top_logprobs": top})
            ids.append(token)
        return {
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": ids,
            "sampling_mask": masks if self.masks else None,
            "logprobs": {"content": content},
        }
