"""Responses to given prompts are scored: loglikelihoods, multiple choice, preference pairs."""

import warnings

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import LLMPolicy, Text, Tokens
from corelm.errors import InvalidRequestError, MissingKeyError, TokenBoundaryWarning
from corelm.kl import KLComputation
from corelm_testing.tiny import build_tokenizer, read_chats
from corelm_testing.toy import Bigram
from helpers.each import each
from helpers.refusals import refused

ASKED = [{"role": "user", "content": "Hi"}]
PROMPTS, RESPONSES = ["The cat ", "The sea"], ["is on", " comes and goes"]


@pytest.fixture(scope="module")
def bpe():
    """Yield a backend whose tokenizer merges bytes and adds no special tokens."""
    tokenizer = build_tokenizer("\n".join(turn["content"] for chat in read_chats() for turn in chat), 512)
    size = len(tokenizer)
    table = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    with corelm.get_backend("toy", Bigram(table), tokenizer=tokenizer) as opened:
        yield opened


def texts(prompts=PROMPTS, responses=RESPONSES, batch=None):
    batch = (len(prompts),) if batch is None else batch
    return TensorDict({"text": Text(prompt=prompts, response=responses, batch_size=batch)}, batch_size=batch)


def scorer(backend, mode="text", **options):
    return LLMPolicy(backend, input_mode=mode, generate=False, **options)


def lm_eval_pair(tokenizer, context, continuation):
    """Return the ids of context and continuation, by the rules that lm-eval documents."""
    moved = len(context) - len(context.rstrip())
    if moved:
        context, continuation = context[:-moved], context[-moved:] + continuation
    whole = tokenizer(context + continuation)["input_ids"]
    start = len(tokenizer(context)["input_ids"])
    return whole[:start], whole[start:]


# Texts ----------------------------------------------------------------------------------------------------------------


def test_only_the_response_of_each_prompt_is_scored(backend):
    td = scorer(backend)(texts())
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids = backend.tokenize(prompt + response).ids.tolist()[0]
        start = len(ids) - len((prompt + response)[len(prompt.rstrip()) :])
        assert td["tokens"].prompt[row].tolist() == ids[:start]
        assert td["tokens"].response[row].tolist() == ids[start:]
        expected = backend.score_logprobs([ids], score_from=start).logprobs.values
        assert torch.equal(td["log_probs"].full[row], expected)
        assert torch.equal(td["log_probs"].response[row], expected[start:])
        assert td["log_probs"].scored_mask[row].tolist() == [at >= start for at in range(len(ids))]
        assert td["masks"].all_response_mask[row].tolist() == [at >= start for at in range(len(ids))]


def test_joint_tokens_are_those_of_lm_eval_and_separate_ones_those_of_dpo_trainers(bpe):
    td = texts(["Hello ", "What is your", "Hello"], ["there, my friend", " name?", "!\n"])
    joint = scorer(bpe, inplace=False)(td)["tokens"]
    separate = scorer(bpe, inplace=False, completion_boundary="separate")(td)
    for row, (prompt, response) in enumerate(zip(td["text"].prompt, td["text"].response, strict=True)):
        found = joint.prompt[row].tolist(), joint.response[row].tolist()
        assert found == lm_eval_pair(bpe.tokenizer, prompt, response)
        alone = [bpe.tokenizer(one, add_special_tokens=False)["input_ids"] for one in (prompt, response)]
        assert [separate["tokens"].prompt[row].tolist(), separate["tokens"].response[row].tolist()] == alone
    assert separate["text"].prompt == td["text"].prompt and separate["text"].full[0] == "Hello there, my friend"


def test_special_tokens_that_end_a_text_are_not_the_prompts():
    class Ending:
        """Adds BOS and EOS, as some T5 and Llama tokenizers do."""

        eos_token_id, pad_token_id = 259, 256

        def __call__(self, given, *, add_special_tokens=True, **options):
            rows = [list(text.encode()) for text in given]
            return {"input_ids": [[257, *row, 259] if add_special_tokens else row for row in rows]}

        def decode(self, ids, skip_special_tokens=True):
            return bytes(one for one in ids if one < 256).decode()

    with corelm.get_backend("toy", tokenizer=Ending()) as backend:
        joint = scorer(backend, inplace=False)(texts(["ab"], ["cd"]))["tokens"]
        separate = scorer(backend, inplace=False, completion_boundary="separate")(texts(["ab"], ["cd"]))["tokens"]
    assert (joint.prompt[0].tolist(), joint.response[0].tolist()) == ([257, *b"ab"], [*b"cd", 259])
    assert (separate.prompt[0].tolist(), separate.response[0].tolist()) == ([257, *b"ab"], [*b"cd"])


def test_several_responses_to_each_prompt_take_a_batch_dimension_more(backend):
    td = texts(["The cat", "The sea"], [[" is on", " sings"], [" comes", " is"]])
    out = scorer(backend, inplace=False, pad_output=True)(td)
    assert out.batch_size == (2, 2)
    flat = scorer(backend, inplace=False)(
        texts(["The cat", "The cat", "The sea", "The sea"], [" is on", " sings", " comes", " is"])
    )
    totals = [float(row.sum()) for row in flat["log_probs"].response]
    assert out["log_probs"].response.sum(-1).flatten().tolist() == pytest.approx(totals)
    assert out["log_probs"].response.sum(-1).argmax(-1).tolist() == [totals[0] < totals[1], totals[2] < totals[3]]
    with pytest.raises(InvalidRequestError, match="inplace=False"):
        scorer(backend)(td)
    with refused(InvalidRequestError, field="text.response"):
        scorer(backend, inplace=False)(texts(["a", "b"], [["c", "d"], ["e"]]))
    with refused(InvalidRequestError, field="text.response"):
        scorer(backend, inplace=False)(texts([["a", "b"], ["c", "d"]], ["e", "f"]))


@each("boundary", ["joint", "separate"])
def test_a_second_policy_scores_the_same_responses_in_place(backend, boundary):
    td = texts()
    first = scorer(backend, completion_boundary=boundary)
    first(td)
    reference = first.replace(log_probs_key="ref_log_probs")
    reference(td)
    assert td["text"].full is None and td["text"].response == RESPONSES
    for field in ("full", "response", "scored_mask"):
        for one, other in zip(getattr(td["log_probs"], field), getattr(td["ref_log_probs"], field), strict=True):
            assert torch.equal(one, other)
    kl = KLComputation(assistant_only=False, add_to_reward=False)(td)["kl_penalty"].full
    assert [len(row) for row in kl] == [len(row) for row in td["tokens"].full] and not any(row.any() for row in kl)
    records = corelm.to_records(td)
    assert records[1]["response"] == RESPONSES[1] and len(records[1]["log_probs"]) == len(td["log_probs"].response[1])
    other = {"joint": "separate", "separate": "joint"}[boundary]
    with refused(InvalidRequestError, field="tokens", rows=(0,)):
        first.replace(completion_boundary=other)(td)


def test_rows_that_cannot_be_scored_are_named(backend):
    options = {"tokenizer_kwargs": {"add_special_tokens": False}}
    td = texts(["The cat", "", "a", "  "], [" is", "x", "", "y"])
    with refused(InvalidRequestError, field="text.response", rows=(1, 2, 3)) as caught:
        scorer(backend, **options)(td)
    assert sorted(caught.value.problems) == [1, 2, 3] and "BOS or EOS" in str(caught.value)
    out = scorer(backend, on_error="skip", inplace=False, **options)(td)
    assert [bool(error) for error in out["errors"]] == [False, True, True, True]
    assert [int(row.sum()) for row in out["log_probs"].scored_mask] == [3, 0, 0, 0]
    assert out["text"].prompt[0] == "The cat"
    # With BOS, an empty prompt has a token, as in lm-eval.
    assert scorer(backend, inplace=False)(texts([""], ["x"]))["tokens"].prompt[0].tolist() == [257]
    with refused(InvalidRequestError, field="completion_boundary"):
        scorer(backend, completion_boundary="trl")


def test_a_response_that_merges_with_its_prompt_is_reported(bpe):
    word = max((one for one in bpe.tokenizer.get_vocab() if one.isalpha() and one.isascii()), key=len)
    half, rest = word[:-1], word[-1]
    with refused(InvalidRequestError, field="text.response", rows=(0,)):
        scorer(bpe)(texts([half], [rest]))
    with pytest.warns(TokenBoundaryWarning, match=r"text.response: rows 1: .*completion_boundary='separate'") as warned:
        out = scorer(bpe, inplace=False)(texts(["Hello", half], [" there", f"{rest}, hello, hello, hello, hello"]))
    assert warned[0].filename == __file__
    found = out["tokens"].prompt[1].tolist(), out["tokens"].response[1].tolist()
    assert found == lm_eval_pair(bpe.tokenizer, half, f"{rest}, hello, hello, hello, hello")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = scorer(bpe, inplace=False, completion_boundary="separate")(texts([half], [rest]))
    assert bpe.detokenize(out["tokens"].response) == [rest]


# Plain TensorDicts, and keys of data sets -----------------------------------------------------------------------------


def test_a_plain_tensordict_of_texts_is_scored_as_completions(backend):
    plain = TensorDict(text=TensorDict(prompt=PROMPTS, response=RESPONSES))
    expected = scorer(backend, inplace=False)(texts())["log_probs"]
    policy = scorer(backend)
    for again in (False, True):
        policy.replace(overwrite=again)(plain)
        for one, other in zip(plain["log_probs"].full, expected.full, strict=True):
            assert torch.equal(one, other)
    assert plain["text"].response == RESPONSES and plain["text"].full is None


@each(
    "prompt, response",
    [
        (torch.tensor([[72, 105], [87, 104]]), torch.tensor([[111], [105]])),
        ([[72, 105], [87]], [[111], [105]]),
        ([[72, 105], [87, 104]], [[111, 111], [105]]),
    ],
)
def test_a_plain_tensordict_of_ids_is_scored_as_completions(backend, prompt, response):
    rows = [(list(map(int, one)), list(map(int, other))) for one, other in zip(prompt, response, strict=True)]
    expected = [backend.score_logprobs([a + b], score_from=len(a)).logprobs.values for a, b in rows]
    td = TensorDict(tokens=TensorDict(prompt=prompt, response=response))
    for again in (False, True):
        scorer(backend, "tokens", overwrite=again)(td)
        for one, other in zip(td["log_probs"].full, expected, strict=True):
            assert torch.equal(one, other)


@each(
    "held",
    [
        {"prompt": PROMPTS, "response": RESPONSES},
        {"prompt": PROMPTS, "chosen": RESPONSES, "rejected": RESPONSES},
        {"prompt": [ASKED], "completion": [[{"role": "assistant", "content": "Ho"}]]},
    ],
)
@each("mode", ["text", "tokens", "history"])
def test_prompts_and_responses_under_the_keys_of_data_sets_are_refused_and_never_scored_alone(backend, held, mode):
    with refused(MissingKeyError, field=f"{mode}.full") as error:
        scorer(backend, mode, inplace=False)(TensorDict(held))
    # Reading the prompts under this key would score the prompts alone.
    assert "input_key" not in str(error.value)


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_dense_tokens_without_pads(backend):
    tokens = Tokens(prompt=torch.tensor([[84, 104], [101, 32]]), response=torch.tensor([[101], [99]]), batch_size=(2,))
    td = scorer(backend, "tokens")(TensorDict({"tokens": tokens}, batch_size=2))
    rows = [[84, 104, 101], [101, 32, 99]]
    expected = backend.score_logprobs(rows, score_from=2).logprobs.values.reshape(2, 3)
    assert torch.equal(td["log_probs"].full, expected) and torch.equal(td["log_probs"].response, expected[:, 2:])
    assert td["log_probs"].scored_mask.tolist() == [[False, False, True]] * 2
    scorer(backend, "tokens", log_probs_key="ref_log_probs")(td)
    assert torch.equal(td["ref_log_probs"].full, expected)
    fresh = scorer(backend, "tokens", inplace=False, pad_output=True)(td)
    assert fresh["tokens"].full.tolist() == rows and fresh["tokens"].response.tolist() == [[101], [99]]


def test_padded_tokens_need_their_mask(backend):
    tokens = Tokens(
        prompt=torch.tensor([[256, 104], [101, 32]]), response=torch.tensor([[101, 256], [99, 98]]), batch_size=(2,)
    )
    td = TensorDict({"tokens": tokens}, batch_size=2)
    with refused(InvalidRequestError, field="tokens.prompt", rows=(0,)):
        scorer(backend, "tokens")(td)
    td["attention_mask"] = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    out = scorer(backend, "tokens", attention_mask_key="attention_mask")(td)
    expected = backend.score_logprobs([[104, 101], [101, 32, 99, 98]], score_from=[1, 2]).logprobs.tolist()
    assert out["log_probs"].response.tolist() == [[expected[0][1], 0.0], expected[1][2:]]
    assert out["log_probs"].scored_mask.tolist() == [[False, False, True, False], [False, False, True, True]]


def test_tokens_in_rows_of_their_own_length(backend):
    tokens = Tokens.from_rows(prompt=[[84, 104], [101]], response=[[101], [32, 99]])
    # With `full`, these are whole sequences, and the prompts are scored as well.
    whole = scorer(backend, "tokens", inplace=False)(TensorDict({"tokens": tokens}, batch_size=2))
    td = scorer(backend, "tokens")(TensorDict({"tokens": tokens.exclude("full")}, batch_size=2))
    for row in range(2):
        assert torch.equal(td["log_probs"].response[row], whole["log_probs"].response[row])
    assert [row.tolist() for row in td["log_probs"].scored_mask] == [[False, False, True], [False, True, True]]


def test_tokens_with_nothing_to_score_are_named(backend):
    td = TensorDict({"tokens": Tokens.from_rows(prompt=[[84], [], [5]], response=[[101], [32], []])}, batch_size=3)
    td["tokens"] = td["tokens"].exclude("full")
    with refused(InvalidRequestError, field="tokens.response", rows=(1, 2)) as caught:
        scorer(backend, "tokens")(td)
    assert sorted(caught.value.problems) == [1, 2]
    out = scorer(backend, "tokens", on_error="skip", inplace=False)(td)
    assert [bool(error) for error in out["errors"]] == [False, True, True]
    with refused(InvalidRequestError, field="tokens.response"):
        tokens = Tokens(prompt=torch.ones(2, 3).long(), response=torch.ones(2, 2, 3).long(), batch_size=(2,))
        scorer(backend, "tokens")(TensorDict({"tokens": tokens}, batch_size=2))


def test_gradients_reach_the_model_from_the_responses_alone(backend):
    (row,) = scorer(backend).log_prob(texts(["The cat"], [" is"]))
    assert row.requires_grad and row.detach().ne(0).tolist() == [False] * 8 + [True] * 3
