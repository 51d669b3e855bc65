"""An engine without a model that says what a test wrote, token by token of a real tokenizer."""

from collections.abc import Callable
from typing import Any

import torch

from corelm import Backend, Capabilities, Ragged, hookimpl
from corelm.spec.records import GenerateRequest, GenerateResult
from helpers import chat_templates as ct


class Scripted:
    """Answers each prompt with the text that `answer` returns for it; every log-prob is -1.

    Attributes:
        requests: what the engine was asked, in order.
    """

    requires_api = ">=1,<2"

    def __init__(
        self, answer: Callable[[str], str], *, singly: bool = False, eos: bool = True, **capabilities: Any
    ) -> None:
        """`singly` tokenizes an answer letter by letter, as no tokenizer would; `eos` ends it with one."""
        self.answer, self.singly, self.eos = answer, singly, eos
        self.tokenizer = ct.tokenizer()
        self.requests: list[GenerateRequest] = []
        self.capabilities = Capabilities(
            **{
                "vocab_size": len(self.tokenizer),
                "max_context": 4096,
                "sampling": dict.fromkeys(("temperature", "top_p", "top_k", "stop", "presence_penalty")),
                "generation_modes": frozenset({"raw"}),
                "per_answer_seeds": True,
                **capabilities,
            }
        )

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        most = request.sampling.max_new_tokens or 4096
        whole = [self._ids(self.answer(self.tokenizer.decode(row))) for row in request.prompts.tolist()]
        ids = Ragged.from_list([row[:most] for row in whole])
        reasons = tuple("length" if len(row) > most else "stop" for row in whole)
        logprobs = Ragged.full(ids.lengths, -1.0, torch.float32)
        return GenerateResult(ids=ids, logprobs=logprobs, finish_reasons=reasons)

    def _ids(self, text: str) -> list[int]:
        parts = list(text) if self.singly else [text]
        encoded = self.tokenizer(parts, add_special_tokens=False)["input_ids"]
        return [each for row in encoded for each in row] + [self.tokenizer.eos_token_id] * self.eos


def scripted(answer: Callable[[str], str], **options: Any) -> tuple[Backend, Scripted]:
    """Return a `Backend` on a `Scripted` engine, and the engine."""
    engine = Scripted(answer, **options)
    return Backend.from_plugin(engine, "scripted", model_name="script"), engine
