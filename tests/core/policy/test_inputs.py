"""What a policy reads: bare and nested values, dense and ragged tokens, with and without masks, and empty batches."""

import copy

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tokenizers import processors

import corelm
from corelm import History, LLMPolicy, Masks, Text, Tokens
from corelm.errors import InvalidRequestError, MissingKeyError
from corelm_testing.toy import Bigram
from helpers.each import each
from helpers.refusals import refused
from helpers.rendering import TOKENIZER
from helpers.toy_prompts import QUESTIONS, SAMPLING, chat


def test_an_attention_mask_removes_the_pads(backend):
    tokens = torch.tensor([[256, 256, 72, 105], [72, 101, 108, 256]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    td = TensorDict({"tokens": tokens, ("masks", "all_attention_mask"): mask}, batch_size=[2])
    policy = LLMPolicy(backend, input_mode="tokens", generate=False, pad_output=True, inplace=False)
    out = policy(td)
    assert corelm.ragged(out, ("tokens", "full")).tolist() == [[72, 105], [72, 101, 108]]
    assert torch.equal(out["masks"].all_attention_mask, mask)
    assert out["log_probs"].scored_mask.tolist() == [[False, False, False, True], [False, True, True, False]]


ROWS = [torch.tensor([72]), torch.tensor([72, 105, 111])]


@each("generate", [True, False])
@each("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_has_one_row_per_sequence(backend, layout, generate):
    nested = torch.nested.nested_tensor(ROWS, layout=layout)
    policy = LLMPolicy(backend, input_mode="tokens", generate=generate, sampling_params=SAMPLING, inplace=False)
    part = "prompt" if generate else "full"
    given = [TensorDict(tokens=nested), TensorDict(tokens={part: nested})]
    if layout == torch.jagged:  # tensordict does not take the other layout with a batch size
        given.append(TensorDict(tokens=nested, batch_size=[2]))
    for td in given:
        out = policy(td)
        assert tuple(out.batch_size) == (2,)
        assert corelm.ragged(out, ("tokens", part)).tolist() == [[72], [72, 105, 111]]


@each("layout", [torch.jagged, torch.strided])
@each("parts", [("full",), ("prompt", "full")])
def test_nested_tokens_may_hold_the_pad_id_and_are_rows_once_scores_join_them(backend, parts, layout):
    rows = [[72, 105, backend.pad_id], [72, 105]]
    held = {part: [row[:1] if part == "prompt" else row for row in rows] for part in parts}
    nested = {
        part: torch.nested.nested_tensor(list(map(torch.tensor, each)), layout=layout) for part, each in held.items()
    }
    td = TensorDict({"tokens": Tokens(**nested, batch_size=[2])}, batch_size=[2])
    LLMPolicy(backend, input_mode="tokens", generate=False)(td)
    assert corelm.ragged(td, ("tokens", "full")).tolist() == rows
    assert corelm.ragged(td, ("log_probs", "full")).lengths.tolist() == [3, 2]


@each(
    "nested",
    [
        torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged),
        torch.nested.nested_tensor([torch.zeros(1, 4).long(), torch.zeros(2, 4).long()], layout=torch.jagged),
    ],
)
def test_a_nested_tensor_that_holds_no_rows_of_ids_is_refused_by_row(backend, nested):
    with refused(InvalidRequestError, field="tokens.prompt", rows=(0, 1)):
        LLMPolicy(backend, input_mode="tokens")(TensorDict(tokens=nested))


@each("padded", [False, True])
@each("generate", [True, False])
def test_later_writes_to_the_input_do_not_change_the_output(backend, padded, generate):
    ids = [[65, 66, 67], [70, 71]]
    given = TensorDict(tokens=torch.tensor([[65, 66, 67], [70, 71, 72]]), batch_size=[2])
    if not padded:
        given = lazy_stack([TensorDict(tokens=torch.tensor(row)) for row in ids])
    policy = LLMPolicy(backend, input_mode="tokens", generate=generate, sampling_params=SAMPLING, inplace=False)
    part = "prompt" if generate else "full"
    out = policy(given)
    rows = [given["tokens"]] if padded else given.get("tokens", as_list=True)
    expected = [row.tolist() for row in (rows[0] if padded else rows)]
    for row in rows:
        row.zero_()
    assert [row.tolist() for row in getattr(out["tokens"], part)] == expected


@each("shape", [(0,), (2, 0), (0, 2)])
@each("mode", ["history", "text", "tokens"])
@each("pad", [True, False])
def test_an_empty_batch_gives_an_empty_output_in_every_mode(backend, shape, mode, pad):
    out = LLMPolicy(backend, pad_output=pad, sampling_params=SAMPLING)(TensorDict(history=History.of([], shape)))
    scorer = LLMPolicy(backend, input_mode=mode, generate=False, pad_output=pad, inplace=False)
    assert tuple(scorer(out).batch_size) == shape
    assert tuple(scorer.get_dist(out).batch_shape[:-1]) == shape


def test_the_input_may_have_a_key_of_another_name_and_stays_there(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING)
    expected = policy(TensorDict(text=QUESTIONS[:2]), seed=1)["text"]
    for key, value in (
        ("query", QUESTIONS[:2]),
        (("data", "query"), QUESTIONS[:2]),
        ("given", Text(prompt=QUESTIONS[:2], batch_size=[2])),
        (("given", "prompt"), Text(prompt=QUESTIONS[:2], batch_size=[2])),
    ):
        entry = {key: value} if key != ("given", "prompt") else {"given": value}
        for batch in ([], [2]):
            td = TensorDict(entry, batch_size=batch)
            reader = policy.replace(input_key=key)
            out = reader(td, seed=1)
            assert out is td and out["text"].prompt == expected.prompt and out["text"].response == expected.response
            assert reader.in_keys == [key] and key in out.keys(True)
    chats = History.from_chats([chat(question) for question in QUESTIONS[:2]])
    read = LLMPolicy(backend, input_key="messages", sampling_params=SAMPLING)
    out = read(TensorDict(messages=chats), seed=1)
    assert isinstance(out["messages"], History) and out["history"].prompt.to_chats() == chats.to_chats()


IDS, ATTENTION = torch.tensor([[256, 72], [72, 105]]), torch.tensor([[0, 1], [1, 1]])


def jagged(values):
    rows = [row[mask.bool()] for row, mask in zip(values, ATTENTION, strict=True)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@each("part", ["prompt", "full"])
@each(
    "tokens, masks",
    [
        (IDS, {"attention_mask": ATTENTION}),
        (IDS, {"masks": TensorDict(all_attention_mask=ATTENTION, batch_size=[2])}),
        (IDS, {"masks": Masks(all_attention_mask=ATTENTION, batch_size=[2])}),
        (jagged(IDS), {"masks": Masks(all_attention_mask=jagged(ATTENTION), batch_size=[2])}),
    ],
)
@each("stacked", [False, True])
def test_a_tokens_container_is_read_with_every_form_of_mask(backend, part, tokens, masks, stacked):
    key = "attention_mask" if "attention_mask" in masks else None
    policy = LLMPolicy(
        backend,
        input_mode="tokens",
        generate=part == "prompt",
        attention_mask_key=key,
        sampling_params=SAMPLING,
        inplace=False,
    )
    td = TensorDict({"tokens": Tokens(**{part: tokens}, batch_size=[2]), **masks}, batch_size=[2])
    td = td.to_lazystack(0) if stacked else td
    out = policy(td)
    assert corelm.ragged(out, ("tokens", part)).tolist() == [[72], [72, 105]]
    assert tuple(policy(td[1]).batch_size) == ()


def test_a_mask_for_tokens_in_rows_of_unequal_length_is_refused(backend):
    policy = LLMPolicy(backend, input_mode="tokens", attention_mask_key="attention_mask")
    rows = lazy_stack([Tokens(prompt=row, padded=False) for row in ROWS])
    with refused(InvalidRequestError, field="masks"):
        policy(TensorDict(tokens=rows, attention_mask=torch.ones(2, 3), batch_size=[2]))


MASKED = [([256, 72], [0, 1]), ([72, 105, 111], [1, 1, 1])]


def masked_rows(padded, container=None):
    """Return a lazy stack of rows of different widths, each with its mask: bare, or in a container."""
    found = []
    for ids, shown in MASKED:
        tokens = Tokens(prompt=torch.tensor(ids), full=torch.tensor(ids), padded=padded)
        mask = torch.tensor(shown)
        given = {"attention_mask": mask} if container is None else {"masks": container(all_attention_mask=mask)}
        found.append(TensorDict({"tokens": tokens, **given}))
    return lazy_stack(found)


FORMS = each("container", [None, TensorDict, Masks])


@FORMS
@each("generate", [True, False])
def test_a_mask_in_rows_is_never_dropped(backend, container, generate):
    key = "attention_mask" if container is None else None
    options = {"input_mode": "tokens", "generate": generate, "attention_mask_key": key, "inplace": False}
    policy = LLMPolicy(backend, **options, **({"sampling_params": SAMPLING} if generate else {}))
    name = "attention_mask" if container is None else r"masks\.all_attention_mask"
    with pytest.raises(InvalidRequestError, match=f"{name}: .*leave their attention mask out.*padded=True"):
        policy(masked_rows(False, container))
    # Rows may be padded to different widths.
    out = policy(masked_rows(True, container))
    assert corelm.ragged(out, ("tokens", "prompt" if generate else "full")).tolist() == [[72], [72, 105, 111]]
    groups = policy(lazy_stack([masked_rows(True, container)] * 2))
    assert tuple(groups.batch_size) == (2, 2)
    assert corelm.ragged(groups, ("tokens", "prompt" if generate else "full")).tolist() == [[72], [72, 105, 111]] * 2


def test_an_assistant_mask_in_rows_is_kept(backend):
    said = [torch.tensor([False]), torch.tensor([False, True, True])]
    rows = [
        TensorDict({"tokens": Tokens(full=row, padded=False), "masks": TensorDict(all_assistant_mask=mask)})
        for row, mask in zip(ROWS, said, strict=True)
    ]
    out = LLMPolicy(backend, input_mode="tokens", generate=False)(lazy_stack(rows))
    assert corelm.ragged(out, ("masks", "all_assistant_mask")).tolist() == [mask.tolist() for mask in said]


ODD_MASKS = {
    "additive": (torch.tensor([[-torch.inf, 0.0], [0.0, 0.0]]), "a mask that holds -inf"),
    "nan": (torch.tensor([[0.0, torch.nan], [1.0, 1.0]]), "a mask that holds nan"),
    "weights": (torch.tensor([[0.5, 1.0], [1.0, 1.0]]), "a mask that holds 0.5"),
    "positions": (torch.tensor([[0, 1], [2, 3]]), "a mask that holds 2"),
    "meta": (torch.ones(2, 2, dtype=torch.bool, device="meta"), "a tensor on the meta device"),
}


@each("tokens", ["bare", "container", "nested"])
@each("kind", ODD_MASKS)
def test_a_mask_of_other_numbers_is_refused(backend, tokens, kind):
    mask, what = ODD_MASKS[kind]
    nested = torch.nested.nested_tensor(list(IDS), layout=torch.jagged)
    ids = {"bare": IDS, "container": Tokens(prompt=IDS, batch_size=[2]), "nested": nested}[tokens]
    policy = LLMPolicy(backend, input_mode="tokens", attention_mask_key="mask", sampling_params=SAMPLING)
    with pytest.raises(InvalidRequestError, match=f"True and False, or 1 and 0; got {what}"):
        policy(TensorDict(tokens=ids, mask=mask, batch_size=[2]))


@each("dtype", [torch.bool, torch.uint8, torch.float32])
def test_a_mask_of_zeros_and_ones_has_any_type(backend, dtype):
    policy = LLMPolicy(backend, input_mode="tokens", attention_mask_key="mask", sampling_params=SAMPLING)
    out = policy(TensorDict(tokens=IDS, mask=ATTENTION.to(dtype), batch_size=[2]))
    assert corelm.ragged(out, ("tokens", "prompt")).tolist() == [[72], [72, 105]]


def test_a_policy_that_reads_something_else_forgets_the_key_of_its_input(backend):
    policy = LLMPolicy(backend, input_mode="text", input_key="query", sampling_params=SAMPLING)
    assert policy.replace(pad_output=True).options.input_key == "query"
    # The query is a prompt, not a sequence to score.
    scorer = policy.replace(generate=False)
    assert scorer.options.input_key is None and scorer.in_keys == [("text", "full")]
    assert policy.replace(input_mode="tokens").in_keys == [("tokens", "prompt")]
    assert policy.replace(generate=False, input_key="texts").in_keys == ["texts"]
    assert "log_probs" in scorer.replace(inplace=False)(policy(TensorDict(query=QUESTIONS[:2]))).keys()


def test_missing_keys_of_the_input_and_of_the_mask_are_named(backend):
    policy = LLMPolicy(backend, input_mode="tokens", input_key="ids", attention_mask_key="mask")
    with refused(MissingKeyError, field="ids"):
        policy(TensorDict(other=torch.zeros(2)))
    with refused(MissingKeyError, field="attention_mask_key"):
        policy(TensorDict(ids=torch.ones(2, 2, dtype=torch.int64)))
    with refused(InvalidRequestError, field="attention_mask_key"):
        LLMPolicy(backend, input_mode="text", attention_mask_key="mask")
    # The first part of the key is that of a tensor.
    with refused(MissingKeyError, field="ids.row"):
        policy.replace(input_key=("ids", "row"))(TensorDict(ids=torch.ones(2, 2, dtype=torch.int64)))


def test_a_text_that_begins_with_the_bos_gets_no_second_one():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.bos_token = "<|start|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", bos)]
    )
    model = Bigram(torch.zeros(len(tokenizer), len(tokenizer)))
    with corelm.get_backend("toy", model, tokenizer=tokenizer) as backend:
        policy = LLMPolicy(backend, generate=False, input_mode="text", inplace=False)
        rows = policy(TensorDict(text=["Rome", "<|start|>Rome", "<|start|>"], batch_size=[3]))["tokens"].full
        assert rows[0].tolist() == rows[1].tolist() and rows[0].tolist().count(bos) == 1
        pairs = Text(prompt=["<|start|>Rome"], response=[" is"], batch_size=[1])
        both = policy(TensorDict(text=pairs, batch_size=[1]))
        assert both["tokens"].full[0].tolist().count(bos) == 1


def test_the_assistants_mask_of_a_plain_tensordict_is_kept_beside_another_attention_mask(backend):
    ids, attention = torch.tensor([[0, 72, 105], [72, 105, 111]]), torch.tensor([[0, 1, 1], [1, 1, 1]]).bool()
    assistant = torch.tensor([[0, 0, 1], [0, 1, 1]]).bool()
    masks = TensorDict(all_attention_mask=attention, all_assistant_mask=assistant, batch_size=[2])
    td = TensorDict(tokens=ids, masks=masks, seen=attention, batch_size=[2])
    scorer = LLMPolicy(backend, input_mode="tokens", generate=False, attention_mask_key="seen", inplace=False)
    assert corelm.ragged(scorer(td), ("masks", "all_assistant_mask")).tolist() == [[False, True], [False, True, True]]
