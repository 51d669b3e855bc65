"""Prompts for a trained model, and checks of what a backend says of them against the plain forward of the model.

Tolerances, measured on these rows with the plain float32 forward against the same forward in float64: the log-probs
differ by 1.4e-5 on the mean and by 4.3e-5 at most. Two float32 programs may differ by the sum of their errors; the
largest has some room, since rounding depends on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from corelm import Backend
from helpers import oracle

MEAN, MOST = 3e-5, 3e-4
Rows = list[list[int]]

_LONG = "The harbour was quiet. A boat came in, and two men carried boxes of fish up the stone steps to the market. "
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "Water boils at 100 degrees Celsius, or 212 degrees",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "for (int i = 0; i < 10; i++) {\n\tprintf(",
    "SELECT name, age FROM users WHERE age > 30 ORDER BY",
    '{"name": "Ada", "born": 1815, "languages": ["English",',
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "3.14159265358979",
    "12345 + 67890 =",
    "On 24 December 1968, at 03:50 UTC,",
    "½ cup of sugar, 2¾ cups of flour and ³",
    "٣ و ٤",
    "πρωτεύουσα της Ελλάδας είναι",
    "Столица России —",
    "日本の首都は",
    "La capital de España es",
    "Où est la bibliothèque ? Elle est",
    "Die Straße über die Brücke führt nach",
    "नमस्ते, आप कैसे",
    "👩\u200d🚀 Mission: 🚀🚀🌙",
    "e\u0301 and é are not the same",
    "a",
    "The",
    "\n\n\n",
    "   indented by three",
    "# Title\n\n- one\n- two\n-",
    "The quick brown fox jumps over the lazy dog. " * 3,
    _LONG * 4,
    _LONG * 10,
)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello! Who are you?"}],
    [{"role": "user", "content": "What is 7 * 8?"}],
    [{"role": "system", "content": "Answer with one word."}, {"role": "user", "content": "Which colour has the sky?"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "Name three fruits."}],
    [
        {"role": "user", "content": "My name is Zoë."},
        {"role": "assistant", "content": "Nice to meet you, Zoë!"},
        {"role": "user", "content": "What is my name?"},
    ],
    [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "Where is the ship?"},
        {"role": "assistant", "content": "Arr, at sea!"},
        {"role": "user", "content": "And the gold?"},
        {"role": "assistant", "content": "Buried, matey."},
        {"role": "user", "content": "Where?"},
    ],
    [{"role": "user", "content": "Write a Python function that adds two numbers."}],
    [{"role": "user", "content": "Translate into French: good morning"}],
    [{"role": "user", "content": "Sum up: " + _LONG * 3}],
    [{"role": "user", "content": "🙂"}],
)


def rows_of(tokenizer: Any) -> Rows:
    """Return the ids of all texts and chats; the chats end where the assistant's turn begins."""
    texts = [tokenizer(text).input_ids for text in TEXTS]
    return texts + [tokenizer.apply_chat_template(c, add_generation_prompt=True).input_ids for c in CHATS]


def close(found: Tensor, expected: Tensor, what: str) -> None:
    """Assert that log-probs are as near as two float32 programs are."""
    assert found.shape == expected.shape, what
    away = (found.detach() - expected.detach()).abs()
    if away.numel():
        assert float(away.mean()) < MEAN and float(away.max()) < MOST, (
            f"{what}: {float(away.mean())} on the mean, {float(away.max())} at most"
        )


def check_scores(backend: Backend, model: nn.Module, rows: Rows, **options: Any) -> None:
    """Check the log-probs of given ids, and of the most probable ids at each place if the backend gives them."""
    top = min(4, backend.capabilities.score_top_k)
    made = backend.score_logprobs(rows, top_k=top, **options)
    found, expected, tops, expected_tops, tails = [], [], [], [], []
    for number, row in enumerate(rows):
        table = oracle.next_logits(model, row).log_softmax(-1)[:-1]
        found.append(made.logprobs.split()[number][1:])
        expected.append(table.gather(-1, torch.tensor(row[1:], dtype=torch.int64)[:, None])[:, 0])
        if top:
            assert made.top_ids is not None and made.top_logprobs is not None and made.tail_log_mass is not None
            ids = made.top_ids.split()[number][1:]
            tops += [made.top_logprobs.split()[number][1:], made.top_logprobs.split()[number][1:]]
            # The ids named have these log-probs, and no others have higher ones.
            expected_tops += [table.gather(-1, ids), table.topk(top).values]
            rest = table.scatter(-1, ids, -torch.inf).logsumexp(-1)
            tails.append((made.tail_log_mass.split()[number][1:], rest))
    close(torch.cat(found), torch.cat(expected), "scores")
    if top:
        close(torch.cat(tops), torch.cat(expected_tops), "most probable ids")
        close(torch.cat([one for one, _ in tails]), torch.cat([other for _, other in tails]), "tails")


def check_greedy(backend: Backend, model: nn.Module, prompts: Rows, length: int) -> Rows:
    """Check that each greedy token is the most probable one, its log-prob, and why answers end; return the answers."""
    made = backend.generate(prompts, {"temperature": 0.0, "max_new_tokens": length})
    assert made.logprobs is not None
    answers: Rows = made.ids.tolist()
    for prompt, answer, found, reason in zip(prompts, answers, made.logprobs.split(), made.finish_reasons, strict=True):
        table = _answer_table(model, prompt, answer)
        chosen = table.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        # Of two ids that are nearer to each other than float32 tells, either may be chosen.
        assert float((table.amax(-1) - chosen).max()) < MOST, (prompt, answer)
        close(found, chosen, "greedy answers")
        ended = answer[-1] in backend.eos_token_ids
        assert (reason, ended or len(answer) == length) == ("stop" if ended else "length", True)
        assert not backend.eos_token_ids & set(answer[:-1])
    return answers


def check_sampled(backend: Backend, model: nn.Module, prompts: Rows, length: int) -> None:
    """Check the log-probs of sampled answers, raw and as sampled, and that seeds give the same answers again."""
    temperature = 0.8
    sampling = {"temperature": temperature, "max_new_tokens": length}
    for logprobs in ("raw", "processed"):
        if logprobs == "processed" and "processed" not in backend.capabilities.generation_modes:
            continue
        seeds = list(range(7, 7 + len(prompts))) if backend.capabilities.per_answer_seeds else None
        made = backend.generate(prompts, sampling, logprobs=logprobs, seeds=seeds)  # type: ignore[arg-type]
        assert made.logprobs is not None
        found, expected = [], []
        for prompt, answer, own in zip(prompts, made.ids.tolist(), made.logprobs.split(), strict=True):
            table = _answer_table(model, prompt, answer, made.temperature)
            found.append(own)
            expected.append(table.gather(-1, torch.tensor(answer)[:, None])[:, 0])
        assert made.temperature == (1.0 if made.mode == "raw" else temperature)
        close(torch.cat(found), torch.cat(expected), f"sampled, {logprobs}")
        if seeds:
            again = backend.generate(prompts, sampling, logprobs=logprobs, seeds=seeds)  # type: ignore[arg-type]
            assert again.ids.tolist() == made.ids.tolist()


def check_stream(backend: Backend, prompts: Rows, length: int) -> None:
    """Check that the chunks of streams, joined, are the answers of one call."""
    sampling = {"temperature": 0.0, "max_new_tokens": length}
    whole = backend.generate(prompts, sampling)
    ids: Rows = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    reasons: dict[int, str | None] = {}
    chunks = 0
    with backend.stream(prompts, sampling) as stream:
        for chunk in stream:
            ids[chunk.row] += chunk.ids
            logprobs[chunk.row] += chunk.logprobs
            reasons[chunk.row] = chunk.finish_reason
            chunks += 1
    assert ids == whole.ids.tolist() and whole.logprobs is not None
    close(torch.tensor([each for row in logprobs for each in row]), whole.logprobs.values, "streams")
    assert [reasons[row] for row in range(len(prompts))] == list(whole.finish_reasons)
    if backend.capabilities.streaming:
        assert chunks > len(prompts)


def check_kept_ids(backend: Backend, model: nn.Module, prompts: Rows, length: int) -> None:
    """Check the ids that top-k and top-p had left, their mass, and scores over these ids."""
    temperature, top_k, top_p = 0.9, 12, 0.8
    made = backend.generate(
        prompts,
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "max_new_tokens": length, "seed": 3},
        logprobs="processed",
        return_support=True,
    )
    assert made.kept_ids is not None and made.kept_log_mass is not None and made.logprobs is not None
    kept, answers = made.kept_ids.tolist(), made.ids.tolist()
    sizes, found, expected, masses = set(), [], [], []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        table = _answer_table(model, prompt, answer, temperature)
        for place, ids in enumerate(kept[number]):
            top = table[place].topk(top_k)
            shares = top.values.softmax(-1)
            before = shares.cumsum(-1) - shares
            # Rounding decides about an id at the edge.
            sure, possible = (top.indices[before < top_p + way].tolist() for way in (-1e-4, 1e-4))
            assert set(sure) <= set(ids) <= set(possible), (number, place)
            masses.append(table[place][ids].logsumexp(-1))
            sizes.add(len(ids))
            expected.append(table[place][answer[place]] - masses[-1])
        found.append(made.logprobs.split()[number])
    assert len(sizes) > 3
    close(made.kept_log_mass.values, torch.stack(masses), "mass of the kept ids")
    close(torch.cat(found), torch.stack(expected), "log-probs among the kept ids")
    if backend.capabilities.score_support:
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        starts = [len(prompt) for prompt in prompts]
        scores = backend.score_logprobs(rows, score_from=starts, support=kept, temperature=temperature)
        close(scores.logprobs.values[scores.scored.values], torch.stack(expected), "scores over the kept ids")


def _answer_table(model: nn.Module, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Return float32[len(answer), V]: the log-probs of all ids where each token of the answer was chosen."""
    logits = oracle.next_logits(model, [*prompt, *answer][:-1])[len(prompt) - 1 :]
    return (logits / temperature).log_softmax(-1)
