"""An engine that says what a test tells it to: the toy, except that every answer is the next text of a script."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from corelm import Backend, Ragged, hookimpl
from corelm.spec import GenerateRequest, GenerateResult, TokenChunk
from corelm_testing.toy import Bigram, ByteTokenizer, ToyBackend


class Listening(ByteTokenizer):
    """Remembers the tools that its chat template is given."""

    def __init__(self) -> None:
        self.tools: list[Any] = []

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], *args: Any, **options: Any) -> str:
        self.tools.append(options.get("tools"))
        return super().apply_chat_template(conversation, *args, **options)


class Scripted(ToyBackend):
    """Answers with the given texts, byte by byte, each of log-prob 0.

    Args:
        texts: the answers; the last one is repeated.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__(Bigram.of_talk(), Listening(), 4096)
        self._texts, self._said = list(texts), 0

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        rows = []
        for row in range(len(request.prompts)):
            text = self._texts[min(self._said, len(self._texts) - 1)]
            self._said += 1
            ids = [*text.encode(), ByteTokenizer.eos_token_id][: request.sampling.max_new_tokens]
            for each in ids if request.on_tokens is not None else ():
                request.on_tokens(TokenChunk(row=row, ids=[each], logprobs=[0.0]))
            rows.append(ids)
        answers = Ragged.from_list(rows)
        ended = [row[-1] == ByteTokenizer.eos_token_id for row in rows]
        return GenerateResult(
            ids=answers,
            logprobs=Ragged.full(answers.lengths, 0.0, torch.float32),
            finish_reasons=tuple("stop" if each else "length" for each in ended),
        )


def scripted_bytes(*texts: str) -> Backend:
    """Return a `Backend` that says these texts."""
    return Backend.from_plugin(Scripted(texts), "scripted")
