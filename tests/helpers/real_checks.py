"""Prompts for a trained model, and checks of what a backend says of them against the plain forward of the model.

Tolerances: in float32 on a CPU, log-probs were at most 1.2e-5 from the plain forward's on the mean, and 6.4e-5 for one
token, with transformers, vLLM and SGLang; the latter two normalise by a float32 log_softmax. The largest has more room,
since rounding depends on the machine.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from corelm import Backend, History, LLMPolicy
from helpers import oracle
from helpers.tool_templates import HERMES

MEAN, MOST = 3e-5, 3e-4
Rows = list[list[int]]
#: The prompts that every change is tried with: two texts, one token and a chat.
FEW = (0, 11, 22, -10)

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
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Say what the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOL_TEMPLATE = "{% for tool in tools %}<|im_start|>system\n{{ tool | tojson }}<|im_end|>\n{% endfor %}" + HERMES
TOOL_CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "What is the weather in Oslo?"}],
    [
        {"role": "user", "content": "Is it cold in Zürich?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
        },
        {"role": "tool", "content": "-3 °C"},
    ],
)


def plain_model(folder: Path) -> Any:
    """Load the model for plain forwards, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def rows_of(tokenizer: Any) -> Rows:
    """Return the ids of all texts and chats; the chats end where the assistant's turn begins."""
    texts = [tokenizer(text).input_ids for text in TEXTS]
    return texts + [tokenizer.apply_chat_template(c, add_generation_prompt=True).input_ids for c in CHATS]


def long_rows(backend: Backend, room: int) -> Rows:
    """Return the ids of two texts, of which the longer one leaves so much room in the context, and in 1,024 tokens."""
    ids = backend.tokenizer("\n".join(TEXTS) * 10).input_ids
    most = min(backend.capabilities.max_context or 1024, 1024) - room
    assert len(ids) > most > 1000
    return [ids[:most], ids[500:1100]]


def check_tools(backend: Backend, model: nn.Module, length: int) -> None:
    """Check the prompts and greedy answers of conversations with tools, of a first turn and of a second one."""
    policy = LLMPolicy(
        backend,
        sampling_params={"temperature": 0.0, "max_new_tokens": length},
        chat_template=TOOL_TEMPLATE,
        template_kwargs={"tools": [WEATHER]},
    )
    first = policy(TensorDict(history=History.from_chats(list(TOOL_CHATS))))
    asked = first["history"].full.append({"role": "tool", "content": "4 °C"})
    second = policy(TensorDict(history=asked.append({"role": "user", "content": "And in Rome?"})))
    for row, chat in enumerate(TOOL_CHATS):
        text = backend.tokenizer.apply_chat_template(
            chat, chat_template=TOOL_TEMPLATE, tools=[WEATHER], add_generation_prompt=True, tokenize=False
        )
        prompt = backend.tokenizer(text, add_special_tokens=False).input_ids
        assert first["tokens"].prompt[row].tolist() == prompt, text
        whole = first["tokens"].full[row].tolist()
        assert second["tokens"].prompt[row].tolist()[: len(whole)] == whole
        for td in (first, second):
            ids, answer = (part[row].tolist() for part in (td["tokens"].prompt, td["tokens"].response))
            table = _answer_table(model, ids, answer)
            close(td["log_probs"].response[row], _at(table, answer), "answers to tools")
            assert float((table.amax(-1) - _at(table, answer)).max()) < MOST, (ids, answer)


def check_numbers(backend: Backend, model: nn.Module, rows: Rows, length: int) -> None:
    """Check scores, and greedy and sampled answers of at most this length: all that a backend says of a trained model.

    Args:
        model: the same weights in float32, on the CPU.
    """
    check_scores(backend, model, rows)
    check_greedy(backend, model, rows, length)
    check_sampled(backend, model, rows, length)
    check_stream(backend, rows[:8], length)
    if backend.capabilities.return_support:
        check_kept_ids(backend, model, rows[:12], length)


def check_scores(backend: Backend, model: nn.Module, rows: Rows, **options: Any) -> None:
    """Check the log-probs of given ids, and of the most probable ids at each place if the backend gives them."""
    top = min(4, backend.capabilities.score_top_k)
    made = backend.score_logprobs(rows, top_k=top, **options)
    tops = [each.split() for each in (made.top_ids, made.top_logprobs, made.tail_log_mass) if each is not None]
    assert len(tops) == 3 * bool(top)
    compared = _Compared(backend)
    for number, (row, found) in enumerate(zip(rows, made.logprobs.split(), strict=True)):
        table = _table(model, row)[:-1]
        compared.add("scores", found[1:], _at(table, row[1:]))
        if top:
            compared.add_top(table, *(each[number][1:] for each in tops))
    compared.check()


def check_greedy(backend: Backend, model: nn.Module, prompts: Rows, length: int) -> Rows:
    """Check that each greedy token is the most probable one, log-probs, and why answers end; return the answers."""
    top = min(4, backend.capabilities.top_logprobs)
    made = backend.generate(prompts, {"temperature": 0.0, "max_new_tokens": length}, top_logprobs=top)
    assert made.logprobs is not None
    tops = [each.split() for each in (made.top_ids, made.top_logprobs, made.tail_log_mass) if each is not None]
    assert len(tops) == 3 * bool(top)
    answers: Rows = made.ids.tolist()
    compared = _Compared(backend)
    for number, (prompt, answer, found) in enumerate(zip(prompts, answers, made.logprobs.split(), strict=True)):
        table = _answer_table(model, prompt, answer)
        chosen = _at(table, answer)
        # Of two ids that are nearer to each other than float32 tells, either may be chosen.
        assert float((table.amax(-1) - chosen).max()) < MOST, (prompt, answer)
        compared.add("greedy answers", found, chosen)
        if top:
            compared.add_top(table, *(each[number] for each in tops))
        ended = answer[-1] in backend.eos_token_ids
        assert (made.finish_reasons[number], ended or len(answer) == length) == ("stop" if ended else "length", True)
        assert not backend.eos_token_ids & set(answer[:-1])
    compared.check()
    return answers


def check_sampled(backend: Backend, model: nn.Module, prompts: Rows, length: int) -> None:
    """Check the log-probs of sampled answers, raw and as sampled; their scores; and that seeds give them again."""
    temperature, modes = 0.8, backend.capabilities.generation_modes
    sampling = {"temperature": temperature, "max_new_tokens": length}
    seeds = list(range(7, 7 + len(prompts))) if backend.capabilities.per_answer_seeds else None
    asked: list[Literal["raw", "processed"]] = ["raw"] * ("raw" in modes) + ["processed"] * bool(modes - {"raw"})
    assert asked
    for logprobs in asked:
        made = backend.generate(prompts, sampling, logprobs=logprobs, seeds=seeds)
        assert made.logprobs is not None
        assert made.temperature == (1.0 if logprobs == "raw" else temperature)
        answers = made.ids.tolist()
        pairs = zip(prompts, answers, strict=True)
        expected = [_at(_answer_table(model, *pair, made.temperature), pair[1]) for pair in pairs]
        close(made.logprobs.values, torch.cat(expected), f"sampled, {logprobs}")
        if logprobs == "raw" or backend.capabilities.score_temperature:
            rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
            starts = [len(prompt) for prompt in prompts]
            scores = backend.score_logprobs(rows, score_from=starts, temperature=made.temperature)
            close(scores.logprobs.values[scores.scored.values], made.logprobs.values, f"scored as sampled, {logprobs}")
        if seeds:
            again = backend.generate(prompts, sampling, logprobs=logprobs, seeds=seeds)
            assert again.ids.tolist() == answers


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
    """Check the ids that top-p had left, their mass, and scores over these ids."""
    temperature, top_p = 0.9, 0.6
    raw = backend.capabilities.generation_modes == {"raw"}
    made = backend.generate(
        prompts,
        {"temperature": temperature, "top_p": top_p, "max_new_tokens": length},
        logprobs="raw" if raw else "processed",
        seeds=list(range(3, 3 + len(prompts))) if backend.capabilities.per_answer_seeds else None,
        return_support=True,
    )
    assert made.kept_ids is not None and made.kept_log_mass is not None and made.logprobs is not None
    kept, answers = made.kept_ids.tolist(), made.ids.tolist()
    sizes, expected, masses = set(), [], []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        table = _answer_table(model, prompt, answer, temperature)
        for place, ids in enumerate(kept[number]):
            ranked = table[place].sort(descending=True)
            before = ranked.values.exp().cumsum(-1) - ranked.values.exp()
            # Rounding decides about an id at the edge.
            sure, possible = (ranked.indices[before < top_p + way].tolist() for way in (-1e-4, 1e-4))
            assert set(sure) <= set(ids) <= set(possible), (number, place)
            masses.append(table[place][ids].logsumexp(-1))
            sizes.add(len(ids))
            expected.append(table[place][answer[place]] - masses[-1])
    assert len(sizes) > 3
    close(made.kept_log_mass.values, torch.stack(masses), "mass of the kept ids")
    if not raw:
        close(made.logprobs.values, torch.stack(expected), "log-probs among the kept ids")
    if backend.capabilities.score_support:
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        starts = [len(prompt) for prompt in prompts]
        scores = backend.score_logprobs(rows, score_from=starts, support=kept, temperature=temperature)
        close(scores.logprobs.values[scores.scored.values], torch.stack(expected), "scores over the kept ids")


def close(found: Tensor, expected: Tensor, what: str) -> None:
    """Assert that log-probs are as near as two float32 programs are."""
    assert found.shape == expected.shape, what
    away = (found.detach().double() - expected.detach().double()).abs()
    if away.numel():
        assert float(away.mean()) < MEAN and float(away.max()) < MOST, (
            f"{what}: {float(away.mean())} on the mean, {float(away.max())} at most"
        )


class _Compared:
    """Log-probs of many rows and what they should be, by what they are."""

    def __init__(self, backend: Backend) -> None:
        # An engine that hides its logits has the rest by subtraction: of a small one only its size is known.
        self._logits = backend.capabilities.logits
        self._pairs: defaultdict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def add(self, what: str, found: Tensor, expected: Tensor) -> None:
        self._pairs[what].append((found, expected))

    def add_top(self, table: Tensor, ids: Tensor, logprobs: Tensor, tails: Tensor) -> None:
        """Add the most probable ids, ``[positions, k]``, and the log of what all others have."""
        # The ids named have these log-probs, and no others have higher ones.
        self.add("the ids that are named most probable", logprobs, table.gather(-1, ids))
        self.add("the most probable ids", logprobs, table.topk(ids.shape[-1]).values)
        rest = table.scatter(-1, ids, -torch.inf).logsumexp(-1)
        self.add("the share of the rest", tails.exp(), rest.exp())
        if self._logits:
            self.add("the rest", tails, rest)

    def check(self) -> None:
        for what, pairs in self._pairs.items():
            found, expected = zip(*pairs, strict=True)
            close(torch.cat(found), torch.cat(expected), what)


def _at(table: Tensor, ids: Sequence[int]) -> Tensor:
    return table.gather(-1, torch.tensor(ids, dtype=torch.int64)[:, None])[:, 0]


def _answer_table(model: nn.Module, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Return float64[len(answer), V]: the log-probs of all ids where each token of the answer was chosen."""
    return _table(model, [*prompt, *answer][:-1], temperature)[len(prompt) - 1 :]


def _table(model: nn.Module, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    return (oracle.next_logits(model, ids).double() / temperature).log_softmax(-1)
