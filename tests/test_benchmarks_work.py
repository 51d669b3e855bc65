"""The work that `benchmarks.work` counts is what torch counts in the plain forward of a tiny model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers", reason="the models are those of transformers")

from benchmarks.models import random_model
from benchmarks.work import decoding_work, scoring_work

SHAPE = (96, 128, 2)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request):
    # Eager attention, because torch does not count the operations of fused attention on a CPU.
    return random_model(SHAPE, tie_word_embeddings=request.param, attn_implementation="eager")


def counted(model, ids: torch.Tensor, cache=None, **options) -> tuple[int, object]:
    """Return the operations that torch counts in a forward, and its cache."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, **options)
    return counter.get_total_flops(), out.past_key_values


def unseen(model, length: int) -> int:
    """Return the operations of attention that the plain forward does for tokens that a token does not see."""
    config = model.config
    return config.num_hidden_layers * 4 * config.hidden_size * length * (length - 1) // 2


def test_scoring_counts_what_a_plain_forward_does_but_for_unseen_tokens_and_the_last(model):
    lengths = [5, 17]
    total = 0
    for length in lengths:
        flops, _ = counted(model, torch.arange(length - 1)[None])
        total += flops - unseen(model, length - 1)
    assert scoring_work(model, lengths, sum(lengths) - len(lengths)).flops == total


def test_scoring_counts_the_head_for_scored_tokens_only(model):
    vocab, width, _ = SHAPE
    all_tokens, none = scoring_work(model, [9], 8), scoring_work(model, [9], 0)
    assert all_tokens.flops - none.flops == 8 * 2 * vocab * width


def test_decoding_counts_what_the_steps_of_a_plain_model_do(model):
    rows, prompt, new = 3, 7, 5
    flops, cache = counted(model, torch.randint(96, (rows, prompt)), logits_to_keep=1)
    flops -= rows * unseen(model, prompt)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(parameter.nbytes for parameter in model.parameters()) - (0 if table is head else table.nbytes)
    moved = weights
    for _ in range(new - 1):
        moved += weights + sum(each.nbytes for layer in cache.layers for each in (layer.keys, layer.values))
        more, cache = counted(model, torch.randint(96, (rows, 1)), cache)
        flops += more
    work = decoding_work(model, rows, prompt, new)
    assert (work.flops, work.bytes, work.dtype) == (flops, moved, "float32")


def test_weights_in_bfloat16_are_half_as_many_bytes():
    model = random_model(SHAPE)
    single = [scoring_work(model, [9], 8), decoding_work(model, 2, 4, 3)]
    model.to(torch.bfloat16)
    half = [scoring_work(model, [9], 8), decoding_work(model, 2, 4, 3)]
    assert [(2 * each.bytes, each.flops) for each in half] == [(each.bytes, each.flops) for each in single]
    assert {each.dtype for each in half} == {"bfloat16"}
