"""A tiny language model: tokenizer and weights, trained in seconds from a text in this folder.

    python -m corelm_testing.tiny tiny-model

The model memorises some forty short dialogues and knows nothing else. It is still a real model: a Qwen2 with a
byte-level BPE tokenizer and a chat template, saved in the format that every engine loads.

Making it needs transformers, which is imported by the functions and not with this module.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from corelm.errors import BackendNotInstalledError, CoreLMError, InvalidRequestError, how_to_install
from corelm.validate import count, invalid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

DIALOGUES = Path(__file__).parent / "dialogues.txt"
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] or '' }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Chat = list[dict[str, str]]


def read_chats(path: Path = DIALOGUES) -> list[Chat]:
    """Read dialogues from a text file: alternating ``Q:`` and ``A:`` lines, with a blank line between dialogues."""
    roles = {"Q": "user", "A": "assistant"}
    return [
        [{"role": roles[line[0]], "content": line[3:]} for line in block.splitlines()]
        for block in path.read_text(encoding="utf-8").strip().split("\n\n")
    ]


def build_tokenizer(text: str, vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `text`, with ChatML's special tokens and a template that marks the assistant's turns.

    The tokenizer has at most `vocab_size` entries; a short text gives fewer.

    Raises:
        BackendNotInstalledError: transformers is not installed.
    """
    require_transformers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        model_max_length=1024,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_tiny(
    path: str | Path, *, steps: int = 200, seed: int = 0, progress: bool = True, heads: int = 4, layers: int = 2
) -> Path:
    """Train a tiny Qwen2 on the shipped dialogues and save it, with its tokenizer, to the folder `path`.

    The same arguments give the same model, and models of all sizes have one tokenizer; the global generators of torch
    and Python are not changed.

    Args:
        path: the new folder.
        steps: how many batches of eight conversations to train on.
        seed: of the weights and of the batches.
        progress: whether to show a progress bar.
        heads: how many attention heads of 32, which also sets the width: an even number.
        layers: how many layers.

    Raises:
        BackendNotInstalledError: transformers is not installed.
        InvalidRequestError: `path` is a file, or a folder that is not empty; `heads` is odd, or a size is below 1.
    """
    path, chats = Path(path), read_chats()
    if count("heads", heads, 2) % 2:
        raise invalid("heads", f"expected an even number, got {heads}")
    count("layers", layers, 1)
    refuse_used_folder(path)
    require_transformers()
    from tqdm import tqdm

    tokenizer = build_tokenizer("\n".join(f"{turn['role']}\n{turn['content']}" for chat in chats for turn in chat))
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        model = _new_model(tokenizer, heads, layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps, pct_start=0.2)
        for _ in (bar := tqdm(range(steps), desc="training a tiny model", disable=not progress)):
            loss = model(**_batch(tokenizer, chats, rng)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    model.eval().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def refuse_used_folder(path: Path) -> None:
    """Raise an `InvalidRequestError` if something is at `path` that is not an empty folder."""
    # The model of another project would be overwritten: its files have the same names.
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InvalidRequestError(
            f"path: {str(path)!r} exists already, and nothing is overwritten; choose another folder, or use the model "
            "in this one if that is the one you want",
            field="path",
        )


def require_transformers() -> None:
    """Raise a `BackendNotInstalledError` that says what to install if transformers cannot be imported."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise BackendNotInstalledError(
            f"the tiny model is made with transformers: {how_to_install('transformers>=5.5')}"
        ) from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: matrices this small are computed faster by a single thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _new_model(tokenizer: PreTrainedTokenizerFast, heads: int, layers: int) -> Qwen2ForCausalLM:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=1024,
            hidden_size=32 * heads,
            intermediate_size=64 * heads,
            num_hidden_layers=layers,
            # vLLM on a CPU needs heads of 32 to run, and an untied output head to load new weights.
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=1024,
            initializer_range=0.06,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _batch(
    tokenizer: PreTrainedTokenizerFast, chats: list[Chat], rng: random.Random, rows: int = 8
) -> dict[str, Tensor]:
    """Return `rows` conversations of one or two dialogues each, so that the model learns changes of subject."""
    conversations = [list(chain.from_iterable(rng.sample(chats, rng.randint(1, 2)))) for _ in range(rows)]
    batch: Any = tokenizer.apply_chat_template(conversations, padding=True, return_dict=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "labels": labels}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m corelm_testing.tiny",
        description="Train a tiny language model in seconds and save it to a new folder. transformers has to be "
        "installed.",
    )
    parser.add_argument("path", nargs="?", default="tiny-model", help="the new folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    terminal = sys.stderr.isatty()
    try:
        require_transformers()
        if not terminal:
            # A log cannot show the bar that transformers draws while it saves a model.
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()
        path = build_tiny(options.path, progress=terminal)
    except (CoreLMError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"saved to {path}; open it with corelm.get_backend('transformers', {str(path)!r})")


if __name__ == "__main__":
    main()
