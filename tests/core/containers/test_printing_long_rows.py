"""What is printed of long rows costs no more than what is shown."""

from __future__ import annotations

from tensordict import TensorDict

import corelm
from corelm.containers.assemble import assemble
from corelm.spec.message import Message
from corelm.spec.records import ContainerRequest, Parts
from corelm.tensors.ragged import Ragged
from helpers.four_rows import RAW


def long_rows(words: int, layout: str) -> TensorDict:
    """Eight rows with a turn that has its ids, of which a notebook shows the last 50 and the first 150 tokens."""
    tokens = Ragged.from_list([[1] * words] * 8)
    half = tokens.lengths // 2
    answers = ((Message("assistant", "A", token_ids=(1,) * words),),) * 8
    td = assemble(
        ContainerRequest(
            batch_size=(8,),
            fields=frozenset({"text", "tokens", "masks", "log_probs", "history"}),
            tokens=Parts(tokens.slice(half * 0, half), tokens.slice(half, tokens.lengths), tokens),
            texts=Parts(("Q" * words,) * 8, ("A" * words,) * 8, ("QA" * words,) * 8),
            chats=Parts(answers, answers, answers),
            logprobs=Ragged(-tokens.values.float(), tokens.lengths),
            scored=tokens.with_values(tokens.positions >= words // 2),
            provenance=RAW,
            finish_reasons=("stop",) * 8,
            pad_output=layout == "dense",
        )
    )
    return td[:] if layout == "made" else td


def test_a_cut_row_says_how_many_tokens_are_left_out_and_which_are_not_scored() -> None:
    td = long_rows(1000, "rows")
    page = td["log_probs"]._repr_html_()
    assert page.count("… 800 more") == 8 and "probability" not in page and page.count("·") == 8 * 200
    page = corelm.summary(td)._repr_html_()
    assert page.count("… 450 before") == page.count("… 350 more") == 8
    assert page.count("position 450, id 1, prompt") == page.count("position 649, id 1, response") == 8
    assert page.count("log-prob -1, ") == 8 * 150
