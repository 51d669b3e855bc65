"""Prompts for policies on the toy backend, and log-probs from its bigram table."""

import torch
from tensordict import TensorDict

from corelm import History
from corelm_testing.toy import Bigram, ByteTokenizer

TABLE = Bigram.of_talk().table.detach().double().log_softmax(-1)
TOKENIZER = ByteTokenizer()
QUESTIONS = ["Where is the cat?", "Is the tea hot?", "Who?", "When is it dark?"]
SAMPLING = {"max_new_tokens": 12}


def chat(question):
    return [{"role": "user", "content": question}]


def nested(values, shape):
    if not shape:
        return values[0]
    step = len(values) // shape[0] if shape[0] else 0
    return [nested(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def flat(value):
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, list) else [value]


def prompts(mode, shape):
    """Return a TensorDict with prompts under the key that `mode` reads, and the ids they must give."""
    count = int(torch.Size(shape).numel())
    questions = (QUESTIONS * count)[:count]
    rendered = [TOKENIZER.apply_chat_template(chat(q), add_generation_prompt=True) for q in questions]
    if mode == "history":
        td = TensorDict(history=History.of([chat(q) for q in questions], shape), batch_size=shape)
        return td, [TOKENIZER([text], add_special_tokens=False)["input_ids"][0] for text in rendered]
    if mode == "text":
        ids = TOKENIZER(questions)["input_ids"] if questions else []
        td = TensorDict({}, batch_size=shape)
        td["text"] = nested(questions, shape) if count else []
        return td, ids
    width = 5
    ids = [[(7 * row + column) % 256 for column in range(width)] for row in range(count)]
    tokens = torch.tensor(ids, dtype=torch.int64).reshape(*shape, width)
    return TensorDict(tokens=tokens, batch_size=shape), ids
