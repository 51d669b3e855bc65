"""What a tokenizer returns, with its pads: read with its mask, and never sampled from as if pads were tokens."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

import corelm
from corelm import LLMPolicy, Tokens
from corelm.errors import InvalidRequestError, MissingKeyError
from corelm_testing.toy import Bigram, ByteTokenizer
from helpers.each import each
from helpers.refusals import refused
from helpers.tiny_models import tiny_tokenizer
from helpers.toy_prompts import SAMPLING

PAD, EOS = ByteTokenizer.pad_token_id, ByteTokenizer.eos_token_id
#: "Hi" and "Who", padded on the left and on the right.
ROWS = [[72, 105], [87, 104, 111]]
LEFT = {"input_ids": torch.tensor([[PAD, 72, 105], ROWS[1]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
RIGHT = {"input_ids": torch.tensor([[72, 105, PAD], ROWS[1]]), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}


class PadsWithEos(ByteTokenizer):
    """As most people set it: ``tokenizer.pad_token = tokenizer.eos_token``."""

    pad_token, pad_token_id = ByteTokenizer.eos_token, EOS


class WithoutPad(ByteTokenizer):
    pad_token = pad_token_id = None


def tokens_policy(backend, generate, **options):
    return LLMPolicy(
        backend, input_mode="tokens", generate=generate, sampling_params=SAMPLING, inplace=False, **options
    )


@each("generate", [True, False])
@each("side", [LEFT, RIGHT])
@each("batch", [[], [2]])
def test_a_tokenizers_batch_is_read_as_it_comes(backend, side, batch, generate):
    part = "prompt" if generate else "full"
    given = [
        TensorDict(**side, batch_size=batch),
        TensorDict(tokens=TensorDict(**side, batch_size=batch), batch_size=batch),
        TensorDict({"chosen_input_ids": side["input_ids"], "chosen_attention_mask": side["attention_mask"]}, batch),
        TensorDict(tokens=side["input_ids"], attention_mask=side["attention_mask"], batch_size=batch),
    ]
    for td in given:
        policy = tokens_policy(backend, generate, input_key="chosen_input_ids" if "chosen_input_ids" in td else None)
        assert corelm.ragged(policy(td), ("tokens", part)).tolist() == ROWS
    in_place = policy.replace(inplace=None, input_key=None)(given[0])
    assert in_place is given[0] and {"input_ids", "attention_mask", "tokens"} <= set(in_place.keys())


@each("generate", [True, False])
def test_the_batch_of_a_real_tokenizer_is_read_as_it_comes(generate):
    tokenizer, texts = tiny_tokenizer(), ["Who are you?", "Hello! My name is Pip."]
    padded, expected = tokenizer(texts, return_tensors="pt", padding=True), tokenizer(texts)["input_ids"]
    model = Bigram(torch.zeros(len(tokenizer), len(tokenizer)))
    with corelm.get_backend("toy", model, tokenizer=tokenizer) as opened:
        policy = tokens_policy(opened, generate)
        for td in (
            TensorDict(**padded),
            TensorDict(dict(padded), batch_size=[2]),
            TensorDict(tokens=padded),
            TensorDict(tokens=tokenizer(texts)),
            TensorDict(**tokenizer(texts)),
        ):
            assert corelm.ragged(policy(td), ("tokens", "prompt" if generate else "full")).tolist() == expected
        with refused(InvalidRequestError, field="input_ids", rows=(0,)):
            policy(TensorDict(input_ids=padded["input_ids"]))
        with pytest.raises(InvalidRequestError, match=r"pass its 'input_ids', tokenized without padding"):
            opened.generate(padded)


def test_an_input_key_and_tokens_come_before_a_tokenizers_batch(backend):
    other = torch.tensor([[65, 66], [67, 68]])
    policy = tokens_policy(backend, True)
    td = TensorDict(**LEFT, tokens=other, masks=TensorDict(all_attention_mask=torch.ones(2, 2)))
    assert corelm.ragged(policy(td), ("tokens", "prompt")).tolist() == other.tolist()
    td = TensorDict(**LEFT, ids=other)
    assert corelm.ragged(policy.replace(input_key="ids")(td), ("tokens", "prompt")).tolist() == other.tolist()
    with refused(MissingKeyError, field="tokens.prompt"):
        policy(TensorDict(attention_mask=LEFT["attention_mask"]))
    with refused(MissingKeyError, field="text.prompt"):
        policy.replace(input_mode="text")(TensorDict(**LEFT))


@each("generate", [True, False])
@each("side", [LEFT, RIGHT])
def test_dense_ids_with_pads_and_no_mask_are_refused_by_row_in_every_form(backend, side, generate):
    ids, part = side["input_ids"], "prompt" if generate else "full"
    policy = tokens_policy(backend, generate)
    for key, td in (
        (f"tokens.{part}", TensorDict(tokens=ids)),
        (f"tokens.{part}", TensorDict(tokens=ids.tolist())),
        (f"tokens.{part}", TensorDict(tokens=np.array(ids))),
        (f"tokens.{part}", TensorDict(tokens=TensorDict({part: ids}, batch_size=[2]))),
        (f"tokens.{part}", TensorDict(tokens=Tokens(**{part: ids}, batch_size=[2]))),
        (f"tokens.{part}", TensorDict(tokens=lazy_stack([Tokens(**{part: row}) for row in ids]))),
        ("input_ids", TensorDict(input_ids=ids)),
    ):
        with refused(InvalidRequestError, rows=(0,)) as error:
            policy(td)
        assert error.value.field == key
        assert "attention_mask_key" in str(error.value) and "Tokens.from_rows" in str(error.value)


@each(
    "shape, says, rows",
    [
        ((2, 3), "row 0: the mask has 3 values for 2 tokens; likewise row 1", (0, 1)),
        ((4, 2), "the mask has 4 rows, but the tokens have 2", (2,)),
    ],
)
def test_a_mask_of_another_shape_is_named_as_what_is_wrong(backend, shape, says, rows):
    td = TensorDict(tokens=torch.tensor([[65, 66], [67, 68]]), mask=torch.ones(shape))
    with refused(InvalidRequestError, field="tokens.prompt", rows=rows) as error:
        tokens_policy(backend, True, attention_mask_key="mask")(td)
    assert says in str(error.value)
    with refused(InvalidRequestError, field="masks.all_assistant_mask", rows=rows) as error:
        masks = TensorDict(all_assistant_mask=torch.ones(shape))
        tokens_policy(backend, False)(TensorDict(tokens=Tokens(full=td["tokens"], batch_size=[2]), masks=masks))
    assert says in str(error.value)


@each("generate", [True, False])
def test_ids_without_pads_need_no_mask_in_any_form(backend, generate):
    ids, part = torch.tensor([[72, 105], [72, PAD], [72, 111]])[::2], "prompt" if generate else "full"
    policy = tokens_policy(backend, generate)
    for td in (
        TensorDict(tokens=ids),
        TensorDict(tokens=Tokens(**{part: ids}, batch_size=[2])),
        TensorDict(tokens=Tokens(**{part: ids}, batch_size=[2]), batch_size=[2]),
    ):
        assert corelm.ragged(policy(td), ("tokens", part)).tolist() == ids.tolist()
    stack = lazy_stack([Tokens(**{part: torch.tensor(row)}) for row in ROWS])
    assert corelm.ragged(policy(TensorDict(tokens=stack)), ("tokens", part)).tolist() == ROWS
    # Pads within a row are tokens: a prompt may contain the pad id.
    inside = torch.tensor([[72, PAD, 105]])
    assert corelm.ragged(policy(TensorDict(tokens=inside)), ("tokens", part)).tolist() == inside.tolist()


def test_a_mask_of_ones_says_that_pad_ids_are_tokens(backend):
    td = TensorDict(input_ids=LEFT["input_ids"], attention_mask=torch.ones(2, 3))
    out = tokens_policy(backend, False)(td)
    assert corelm.ragged(out, ("tokens", "full")).tolist() == LEFT["input_ids"].tolist()
    rows = tokens_policy(backend, False)(TensorDict(tokens=Tokens.from_rows(full=LEFT["input_ids"].tolist())))
    assert corelm.ragged(rows, ("tokens", "full")).tolist() == LEFT["input_ids"].tolist()


@each(
    "rows, bad",
    [
        ([[72, 105, EOS]], ()),
        ([[72, 105, EOS], [87, 104, EOS]], ()),
        ([[EOS, 72], [EOS, 87]], ()),  # GPT-2 begins texts with its EOS
        ([[EOS], [EOS]], ()),
        ([[72, 105, 111], [87, 104, EOS]], (1,)),  # may be a pad: the longest row has none
        ([[72, EOS, EOS], [87, 104, EOS]], (0,)),
        ([[72, EOS, EOS], [87, EOS, EOS]], (0, 1)),
        ([[EOS, 72, 105], [87, 104, 111]], (0,)),
        ([[EOS, EOS, 72], [EOS, 87, 104]], (0,)),
    ],
)
@each("kind", [PadsWithEos, WithoutPad])
def test_one_eos_at_the_edge_of_every_row_is_a_token_where_eos_is_the_pad(rows, bad, kind):
    with corelm.get_backend("toy", tokenizer=kind()) as opened:
        scorer = tokens_policy(opened, False)
        td = TensorDict(tokens=torch.tensor(rows))
        if not bad:
            assert corelm.ragged(scorer(td), ("tokens", "full")).tolist() == rows
            assert opened.score_logprobs(torch.tensor(rows)).logprobs.lengths.tolist() == [len(row) for row in rows]
            return
        with refused(InvalidRequestError, field="tokens.full", rows=bad):
            scorer(td)
        with refused(InvalidRequestError, field="sequences", rows=bad):
            opened.score_logprobs(torch.tensor(rows))
        assert opened.score_logprobs(rows).logprobs.lengths.tolist() == [3] * len(rows)


def test_a_backend_refuses_a_padded_tensor_and_takes_lists(backend):
    for padded in (LEFT["input_ids"], np.array(LEFT["input_ids"])):
        with refused(InvalidRequestError, field="prompts", rows=(0,)):
            backend.generate(padded, SAMPLING)
    assert len(backend.generate(LEFT["input_ids"].tolist(), SAMPLING).ids) == 2
    assert len(backend.generate(ROWS, SAMPLING).ids) == 2


#: Rows whose first id is hidden, and is not the tokenizer's pad id.
HIDDEN = torch.tensor([[1, 72, 105], ROWS[1]])
FORMS = {
    "bare": (None, lambda ids, part: {"tokens": ids}),
    "Tokens": (None, lambda ids, part: {"tokens": Tokens(**{part: ids}, batch_size=[2])}),
    "plain": (None, lambda ids, part: {"tokens": TensorDict({part: ids}, batch_size=[2])}),
    "input_key": ("prompt_ids", lambda ids, part: {"prompt_ids": ids}),
    "input_key of Tokens": ("mine", lambda ids, part: {"mine": Tokens(**{part: ids}, batch_size=[2])}),
    "rows": (None, lambda ids, part: {"tokens": ids.tolist()}),
}


@each("generate", [True, False])
@each("form", FORMS)
@each("ids", [HIDDEN, LEFT["input_ids"]])
def test_an_attention_mask_next_to_the_ids_is_read_in_every_form(backend, form, ids, generate):
    input_key, held = FORMS[form]
    part = "prompt" if generate else "full"
    policy = tokens_policy(backend, generate, input_key=input_key)
    td = TensorDict(**held(ids, part), attention_mask=LEFT["attention_mask"])
    assert corelm.ragged(policy(td), ("tokens", part)).tolist() == ROWS
    if form == "plain":
        inside = TensorDict(tokens=TensorDict({part: ids, "attention_mask": LEFT["attention_mask"]}, batch_size=[2]))
        assert corelm.ragged(policy(inside), ("tokens", part)).tolist() == ROWS
    if input_key == "prompt_ids":
        own = TensorDict(prompt_ids=ids, prompt_attention_mask=LEFT["attention_mask"], attention_mask=torch.ones(2, 3))
        assert corelm.ragged(policy(own), ("tokens", part)).tolist() == ROWS
        in_place = policy.replace(inplace=None)(td)
        assert corelm.ragged(policy(in_place), ("tokens", part)).tolist() == ROWS


def test_a_mask_of_another_shape_is_refused_unless_it_is_that_of_input_ids(backend):
    policy, mask = tokens_policy(backend, True), LEFT["attention_mask"]
    tokens = Tokens(prompt=torch.tensor([[65, 66], [67, 68]]), batch_size=[2])
    with refused(InvalidRequestError, field="masks"):
        policy(TensorDict(tokens=tokens, attention_mask=mask))
    td = TensorDict(tokens=tokens, attention_mask=mask, input_ids=HIDDEN)
    assert corelm.ragged(policy(td), ("tokens", "prompt")).tolist() == [[65, 66], [67, 68]]
    completions = Tokens(prompt=HIDDEN, response=HIDDEN, batch_size=[2])
    scorer = tokens_policy(backend, False)
    with refused(InvalidRequestError, field="masks"):
        scorer(TensorDict(tokens=completions, attention_mask=mask))
    both = TensorDict(tokens=completions, attention_mask=torch.cat([mask, mask], -1))
    assert corelm.ragged(scorer(both), ("tokens", "full")).tolist() == [row * 2 for row in ROWS]


@each("pad_output", [True, False])
def test_the_mask_of_the_prompts_is_not_taken_for_that_of_their_answers(backend, pad_output):
    policy = tokens_policy(backend, True, return_masks=False, pad_output=pad_output)
    policy = policy.replace(inplace=None, sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    td = policy(TensorDict(tokens=torch.tensor([[72, 105, 111], [87, 104, 111]]), attention_mask=torch.ones(2, 3)))
    full = (
        corelm.ragged(td, ("tokens", "full"), masks="none").tolist() if not pad_output else td["tokens"].full.tolist()
    )
    scorer = tokens_policy(backend, False)
    assert corelm.ragged(scorer(td), ("tokens", "full")).tolist() == full
    td["attention_mask"] = torch.tensor([[1] * 6, [0] + [1] * 5])
    with pytest.raises(InvalidRequestError, match=r"that of their prompts; .* attention_mask_key='attention_mask'"):
        scorer(td)
    rows = TensorDict(tokens=Tokens.from_rows(full=HIDDEN.tolist()), attention_mask=LEFT["attention_mask"])
    with refused(InvalidRequestError, field="masks"):
        scorer(rows)


@each("mask", [["ab", "c"], [None, [1]], 3, [[[1, 1]], [[1]]]])
def test_a_mask_that_is_not_numbers_is_refused_by_row(backend, mask):
    with refused(InvalidRequestError, field="tokens.prompt"):
        tokens_policy(backend, True)(TensorDict(tokens=[[72, 105], [87]], attention_mask=mask))


@each("where", ["inside", "beside"])
def test_a_mask_of_padded_prompts_beside_ragged_responses_is_refused(backend, where):
    parts = {"prompt": torch.tensor([[PAD, 72, 105], ROWS[1]]), "response": [[33], [33, 33]]}
    mask = {"attention_mask": LEFT["attention_mask"]}
    td = TensorDict(
        tokens=TensorDict(parts | (mask if where == "inside" else {})), **(mask if where == "beside" else {})
    )
    with refused(InvalidRequestError, field="masks"):
        tokens_policy(backend, False)(td)


def test_completions_are_scored_also_beside_input_ids(backend):
    parts = {"prompt": torch.tensor([ROWS[1]]), "response": torch.tensor([[33, 34]])}
    alone, beside = (
        corelm.ragged(tokens_policy(backend, False)(TensorDict(tokens=TensorDict(td))), ("log_probs", "full"))
        for td in (parts, {**parts, "input_ids": torch.tensor([[1, 2]])})
    )
    assert alone.tolist() == beside.tolist() and alone.lengths.tolist() == [5]


def test_the_row_of_a_mask_that_holds_something_else_is_named(backend):
    mask = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.5, 1.0]])
    with pytest.raises(InvalidRequestError, match=r"row 1: .* holds 0\.5"):
        tokens_policy(backend, True)(TensorDict(tokens=LEFT["input_ids"], attention_mask=mask))
