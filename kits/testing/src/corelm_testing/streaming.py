"""Tokens that are streamed are those of the result, and come before it."""

from __future__ import annotations

from tensordict import TensorDict

from corelm import AnswerChunk, Backend, LLMPolicy
from corelm_testing.base import ConformanceBase, needs
from corelm_testing.reference import OPENINGS, repeatable, seeded

NEW = 12


class StreamingPromises(ConformanceBase):
    def test_the_chunks_of_a_stream_are_its_result(self, backend: Backend) -> None:
        logprobs = bool(backend.capabilities.generation_modes)
        sampling = seeded(backend, {"max_new_tokens": NEW, "num_samples": 2})
        policy = LLMPolicy(backend, input_mode="text", sampling_params=sampling, return_log_probs=logprobs)
        with policy.stream(TensorDict(text=list(OPENINGS))) as stream:
            rows = _by_row(list(stream), 2 * len(OPENINGS))
        out = stream.result.reshape(-1)
        for row, chunks in enumerate(rows):
            assert [token for chunk in chunks for token in chunk.ids] == out["tokens"].response[row].tolist()
            assert "".join(chunk.text for chunk in chunks) == out["text"].response[row]
            assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [out["finish_reason"][row]]
            assert chunks[-1].finish_reason, "tokens were streamed after the end of the answer"
            if logprobs:
                found = [value for chunk in chunks for value in chunk.logprobs]
                assert found == out["log_probs"].response[row].tolist()

    @needs("streaming")
    def test_tokens_are_streamed_before_the_answer_ends(self, backend: Backend) -> None:
        sampling = repeatable(backend, {"max_new_tokens": NEW, "ignore_eos": True})
        with backend.stream(self.rows(backend, 5), sampling, logprobs="none") as stream:
            pieces = [chunk for chunk in stream if chunk.ids]
        # Core hands over what the backend does not, in one piece at the end of the call.
        assert len(pieces) > 1, "the whole answer came in one piece; hand tokens to request.on_tokens as they come"

    @needs("streaming", "per_answer_seeds")
    def test_streaming_changes_no_answer(self, backend: Backend) -> None:
        prompts, sampling = self.rows(backend, 5, 9, 3), {"max_new_tokens": NEW, "seed": 7}
        with backend.stream(prompts, sampling, logprobs="none") as stream:
            list(stream)
        plain = backend.generate(prompts, sampling, logprobs="none")
        assert stream.result.ids.tolist() == plain.ids.tolist()
        assert stream.result.finish_reasons == plain.finish_reasons

    @needs("streaming", "generation_modes")
    def test_streamed_log_probs_are_true(self, backend: Backend) -> None:
        prompts = self.rows(backend, 5, 9, 3)
        with backend.stream(prompts, seeded(backend, {"max_new_tokens": NEW})) as stream:
            list(stream)
        self.assert_true_answers(prompts, stream.result)

    @needs("streaming")
    def test_leaving_a_stream_early_leaves_the_backend_usable(self, backend: Backend) -> None:
        prompts = self.rows(backend, 5, 9)
        with backend.stream(prompts, {"max_new_tokens": NEW, "ignore_eos": True}, logprobs="none") as stream:
            next(stream)
        assert list(stream) == []
        batch = backend.generate(prompts, {"max_new_tokens": 2, "ignore_eos": True}, logprobs="none")
        assert batch.ids.lengths.tolist() == [2, 2]


def _by_row(chunks: list[AnswerChunk], rows: int) -> list[list[AnswerChunk]]:
    return [[chunk for chunk in chunks if chunk.row == row] for row in range(rows)]
