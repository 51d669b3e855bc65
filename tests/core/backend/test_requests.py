"""Requests that a backend refuses, rows that it skips, and what it sends to the engine."""

import math

import numpy as np
import pytest
import torch

import corelm
from corelm import Backend, DynamicBatcher, Ragged
from corelm.backend.arguments import answer_seeds
from corelm.errors import CapabilityError, EngineError, InvalidRequestError, spelled_out
from helpers.each import each
from helpers.fakes import CONTEXT, EOS, SHORT, VOCAB, Fake, fake, sent
from helpers.refusals import refused


def test_core_expands_samples():
    backend = fake()
    out = backend.generate([[1], [3]], {"num_samples": 2, "seed": 5, **SHORT})
    assert out.ids.tolist() == [[1, 1], [1, 1], [3, 3], [3, 3]]
    request = sent(backend)[-1]
    assert len(request.prompts) == 4 and request.sampling.num_samples is None
    assert len(set(request.seeds.tolist())) == 4


@each(
    "prompts, rows, says",
    [
        ([[1], [VOCAB]], (1,), f"row 1: id {VOCAB} at position 0 is outside the vocabulary of {VOCAB}"),
        ([[1, -1], [1]], (0,), "row 0: id -1 at position 1"),
        ([[], [1], []], (0, 2), "row 0: has no tokens"),
        ([[1] * (CONTEXT - 1), [1]], (0,), "row 0: 11 tokens and max_new_tokens=2 do not fit the context of 12"),
        ([[1], ["x"]], (1,), "row 1: expected a list of token ids"),
        ([[1], [1.5]], (1,), "row 1: expected a list of token ids"),
        ([[1], [True]], (1,), "row 1: expected a list of token ids"),
        ([[1], 3], (1,), "row 1: expected a list of token ids"),
        ([[99], [], [1], [-5]], (0, 1, 3), "row 3"),
    ],
)
def test_all_bad_prompts_are_reported_and_nothing_runs(prompts, rows, says):
    backend = fake()
    with refused(InvalidRequestError, field="prompts", rows=rows) as error:
        backend.generate(prompts, SHORT)
    assert says in str(error.value)
    assert sent(backend) == []


@each(
    "length, sampling, says",
    [
        (
            3,
            {},
            "3 tokens and max_new_tokens=256 (256 is the default) do not fit the context of 12; give max_new_tokens=9",
        ),
        (12, {"max_new_tokens": None}, "12 tokens leave no room for an answer"),
    ],
)
def test_a_prompt_without_room_for_its_answer_is_told_what_to_change(length, sampling, says):
    with refused(InvalidRequestError, field="prompts", rows=(0,)) as error:
        fake().generate([[1] * length], sampling)
    assert says in str(error.value)


def hand_made(values, lengths) -> Ragged:
    """Return a `Ragged` that was not validated when it was made."""
    rows = object.__new__(Ragged)
    rows.__dict__.update(values=values, lengths=lengths)
    return rows


@each(
    "ids, says",
    [
        (lambda: torch.ones(1, 2, dtype=torch.int64, device="meta"), "meta device"),
        (lambda: torch.ones(1, 2, dtype=torch.int64).to_sparse(), "a sparse_coo tensor"),
        (lambda: [[1], torch.ones(2, dtype=torch.int64, device="meta")], "row 1: expected a list of token ids"),
        (lambda: [[1], torch.ones(2, dtype=torch.int64).to_sparse()], "row 1: expected a list of token ids"),
        (lambda: np.array([["a"]]), "row 0: expected a list of token ids"),
        (lambda: hand_made([1], torch.tensor([1])), "a list, which is not a tensor"),
        (lambda: hand_made(torch.tensor([1]), [1]), "a list, which is not a tensor"),
        (lambda: hand_made(torch.tensor([1, 3]), torch.tensor([1.5, 0.5])), "one integer per length"),
        (lambda: hand_made(torch.tensor([1, 3]), torch.tensor([3])), "lengths add up to 3, but there are 2 values"),
    ],
)
def test_ids_that_cannot_be_read_are_refused(ids, says):
    for call, field in ((fake().generate, "prompts"), (fake().score_logprobs, "sequences")):
        with pytest.raises(InvalidRequestError, match=says) as error:
            call(ids())
        assert error.value.field == field


ROWS = [torch.tensor([1, 3]), torch.tensor([4])]
NESTED = [torch.nested.nested_tensor(ROWS, layout=layout) for layout in (torch.jagged, torch.strided)]


@each("prompts", [[[1, 3], [4]], ROWS, Ragged.from_list([[1, 3], [4]]), *NESTED, [np.array([1, 3]), [np.int64(4)]]])
def test_prompts_may_be_lists_tensors_arrays_or_ragged(prompts):
    assert fake().generate(prompts, SHORT).ids.tolist() == [[3, 3], [4, 4]]
    assert fake().generate(np.array([[1, 3], [4, 5]]), SHORT).ids.tolist() == [[3, 3], [5, 5]]


def test_the_context_may_be_filled_but_not_exceeded():
    backend = fake()
    assert len(backend.generate([[1] * (CONTEXT - 2)], SHORT).ids) == 1
    assert len(backend.generate([[1] * (CONTEXT - 1)], {"max_new_tokens": None}).ids) == 1
    with refused(InvalidRequestError, field="prompts", rows=(0,)):
        backend.generate([[1] * CONTEXT], {"max_new_tokens": None})
    # A scored row may be exactly as long as the context.
    assert len(backend.score_logprobs([[1] * CONTEXT]).logprobs) == 1
    with refused(InvalidRequestError, field="sequences", rows=(0,)):
        backend.score_logprobs([[1] * (CONTEXT + 1)])


def test_a_parameter_the_engine_does_not_honour_is_refused():
    with pytest.raises(CapabilityError, match=r"does not honour top_k=3; it honours: stop, temperature") as error:
        fake().generate([[1]], {"top_k": 3, **SHORT})
    assert error.value.capability == "top_k"
    with refused(InvalidRequestError, field="temperature"):
        fake().generate([[1]], {"temperature": 2.5, **SHORT}, logprobs="none")
    with refused(InvalidRequestError, field="stop_token_ids"):
        fake().generate([[1]], {"stop_token_ids": [99], **SHORT})
    with refused(CapabilityError, capability="per_answer_seeds"):
        fake(per_answer_seeds=False).generate([[1]], {"seed": 1, **SHORT})
    assert fake(per_answer_seeds=False).generate([[1]], SHORT).ids.tolist() == [[1, 1]]


@each("sampling", [{}, {"temperature": 0}])
def test_seeds_that_are_free_are_always_sent(sampling):
    backend = fake()
    for seed in (1, 1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            backend.generate([[1], [3]], {**SHORT, **sampling}, logprobs="none")
    first, second, third = (request.seeds.tolist() for request in sent(backend))
    assert first == second and (third == first) == bool(sampling)


def test_seeds_that_are_costly_are_sent_only_if_the_caller_gave_some():
    backend = fake(seeds_are_costly=True)
    before = torch.get_rng_state()
    backend.generate([[1], [3]], SHORT)
    backend.generate([[1], [3]], {**SHORT, "temperature": 0, "seed": 5}, logprobs="none")
    assert [request.seeds for request in sent(backend)] == [None, None]
    assert torch.equal(torch.get_rng_state(), before), "a call without seeds must leave torch's generator alone"
    backend.generate([[1], [3]], {**SHORT, "seed": 7})
    backend.generate([[1], [3]], SHORT, seeds=[4, 5])
    assert sent(backend)[2].seeds.tolist() == answer_seeds(7, range(2)).tolist()
    assert sent(backend)[3].seeds.tolist() == [4, 5]
    with refused(InvalidRequestError, field="seeds"):
        backend.generate([[1], [3]], SHORT, seeds=[4])


def test_another_mode_is_used_only_if_it_gives_the_same_numbers():
    backend = fake()
    assert backend.generate([[1]], SHORT, logprobs="processed").mode == "processed"
    for other in ({"temperature": 0.5}, {"temperature": 0}):
        with refused(CapabilityError, capability="generation_modes"):
            backend.generate([[1]], {**SHORT, **other}, logprobs="processed")
    beams = fake(sampling={"num_beams": None}, generation_modes=frozenset({"raw"}))
    with refused(CapabilityError, capability="num_beams"):
        beams.generate([[1]], {**SHORT, "num_beams": 2})


@each(
    "options, capability",
    [({"temperature": 0.5}, "score_temperature"), ({"return_logits": True}, "logits"), ({"grad": True}, "gradients")],
)
def test_scoring_options_need_capabilities(options, capability):
    with pytest.raises(CapabilityError) as error:
        fake().score_logprobs([[1, 2]], **options)
    assert error.value.capability == capability


def test_stop_ids_are_eos_and_the_callers():
    backend = fake()
    for sampling, expected in [
        ({}, {EOS}),
        ({"stop_token_ids": [5]}, {EOS, 5}),
        ({"ignore_eos": True}, set()),
        ({"stop_token_ids": [5], "ignore_eos": True}, {5}),
    ]:
        backend.generate([[1]], {**SHORT, **sampling})
        assert sent(backend)[-1].stop_ids == expected
    listed = fake(eos_token_ids=frozenset({7, 8}))
    listed.generate([[1]], SHORT)
    assert sent(listed)[-1].stop_ids == {7, 8}


def test_seeds_stay_with_their_rows_if_others_are_skipped():
    backend = fake()
    backend.generate([[1], [3], [4]], {"seed": 5, **SHORT})
    whole = sent(backend)[-1].seeds.tolist()
    backend.generate([[99], [3], [4]], {"seed": 5, **SHORT}, on_error="skip")
    assert sent(backend)[-1].seeds.tolist() == whole[1:]


@each(
    "call, field",
    [
        (lambda b: b.generate(None), "prompts"),
        (lambda b: b.generate(5), "prompts"),
        (lambda b: b.generate("text"), "prompts"),
        (lambda b: b.generate([[2**70]]), "prompts"),
        (lambda b: b.generate(torch.zeros(2, 2)), "prompts"),
        (lambda b: b.generate(torch.ones(2, 2, dtype=torch.bool)), "prompts"),
        (lambda b: b.generate(torch.zeros(3, dtype=torch.int64)), "prompts"),
        (lambda b: b.generate([[1]], SHORT, seeds=torch.ones(1, dtype=torch.int64, device="meta")), "seeds"),
        (lambda b: b.score_logprobs([[1, 3]], score_from=torch.ones(1).long().to_sparse()), "score_from"),
        (lambda b: b.generate([[1]], SHORT, request_ids=["a", "b"]), "request_ids"),
        (lambda b: b.generate([[1]], SHORT, request_ids="a"), "request_ids"),
        (lambda b: b.generate([[1]], SHORT, seeds=[0.5]), "seeds"),
        (lambda b: b.generate([[1]], SHORT, seeds=[1, 2]), "seeds"),
        (lambda b: b.generate([[1]], SHORT, seeds=[-1]), "seeds"),
        (lambda b: b.generate([[1]], SHORT, timeout=-1), "timeout"),
        (lambda b: b.generate([[1]], SHORT, timeout=float("nan")), "timeout"),
        (lambda b: b.generate([[1]], 5), "sampling_params"),
        (lambda b: b.generate([[1]], logprobs="cooked"), "logprobs"),
        (lambda b: b.generate([[1]], on_error="ignore"), "on_error"),
        (lambda b: b.score_logprobs([[1, 2]], score_from="abc"), "score_from"),
        (lambda b: b.score_logprobs([[1, 2]], score_from=[1, 2]), "score_from"),
        (lambda b: b.score_logprobs([[1, 2]], score_from=1.5), "score_from"),
        (lambda b: b.score_logprobs([[1, 2]], device="nowhere"), "device"),
        *((lambda b, t=t: b.score_logprobs([[1, 2]], temperature=t), "temperature") for t in (0, -1, math.nan, "1")),
        (lambda b: b.score_logprobs([[1, 2]], temperature=10**400), "temperature"),
        (lambda b: b.score_logprobs([[1, 2]], temperature=True), "temperature"),
        (lambda b: b.tokenize(None), "texts"),
        (lambda b: b.tokenize(["1", 2]), "texts"),
        (lambda b: b.update_weights({}, version=7), "version"),
        (lambda b: Backend.from_plugin(Fake(), "fake", retry="3"), "retry"),
        (lambda b: Backend.from_plugin(Fake(), "fake", timeout=0), "timeout"),
        (lambda b: corelm.get_backend(None), "name"),
    ],
)
def test_an_argument_of_another_kind_is_refused_with_its_name(call, field):
    with pytest.raises(InvalidRequestError) as error:
        call(fake())
    assert error.value.field == field


# Skipping bad rows ---------------------------------------------------------------------------------------------------


def test_request_ids_of_skipped_rows_are_not_sent():
    backend = fake()
    backend.generate([[1], [99], [3]], SHORT, request_ids=["a", "b", "c"], on_error="skip")
    assert sent(backend)[-1].request_ids == ("a", "c")
    backend.score_logprobs([[1, 2], [99, 1]], request_ids=["a", "b"], on_error="skip")
    assert sent(backend)[-1].request_ids == ("a",)


def test_the_engine_is_not_called_without_rows_to_serve():
    backend = fake()
    assert len(backend.generate([], SHORT).ids) == 0
    assert len(backend.generate([[99]], SHORT, on_error="skip").ids) == 1
    assert len(backend.score_logprobs([]).logprobs) == 0
    assert sent(backend) == []


# Opening -------------------------------------------------------------------------------------------------------------


def test_an_unknown_option_is_refused_with_the_nearest_known_one():
    with pytest.raises(InvalidRequestError, match=r"max_contxt.*did you mean 'max_context'") as error:
        corelm.get_backend("toy", max_contxt=64)
    assert error.value.field == "max_contxt"
    with corelm.get_backend("toy", max_context=64) as backend:
        assert backend.capabilities.max_context == 64


@each(
    "call, said",
    [
        (lambda b: b.generate([[5]], temperature=0.5, max_tokens=3), "'temperature': 0.5, 'max_new_tokens': 3"),
        (
            lambda b: b.submit_generate([[5]], top_p=0.5),
            "generate has no argument 'top_p'; give sampling={'top_p': 0.5}",
        ),
        (lambda b: b.stream([[5]], top_p=0.5), "give sampling={'top_p': 0.5}"),
        (lambda b: b.generate([[5]], on_eror="skip"), "generate has no argument 'on_eror'; did you mean 'on_error'"),
        (lambda b: b.score_logprobs([[5, 6]], return_argmaks=True), "did you mean 'return_argmax'"),
        (lambda b: b.submit_score_logprobs([[5, 6]], on_eror="skip"), "score_logprobs has .* did you mean 'on_error'"),
        (lambda b: b.update_weights({}, verison="1"), "update_weights has .* did you mean 'version'"),
        (lambda b: b.load_adapter("a", {}, versions="1"), "load_adapter has .* did you mean 'version'"),
    ],
)
def test_an_argument_that_a_call_does_not_have_is_refused_with_what_to_type(call, said):
    with corelm.get_backend("toy") as backend, pytest.raises(TypeError, match=said):
        call(backend)


@each("name", ["read", "problems", "engine", "on_tokens", "new_turn", "unknown", "self_"])
def test_what_core_passes_to_itself_is_no_argument_of_a_call(name):
    calls = ["generate", "score_logprobs", "submit_score_logprobs", "submit_generate", "stream"]
    documented = {"on_tokens": calls[3:], "new_turn": calls[3:]}.get(name, [])
    with corelm.get_backend("toy") as backend:
        for call in set(calls) - {*documented}:
            with pytest.raises(TypeError, match=f"has no argument '{name}'"):
                getattr(backend, call)([[5, 6]], **{name: None})
        with backend.stream([[5]], {"max_new_tokens": 2}, new_turn=True) as stream:
            assert sum(len(chunk.ids) for chunk in stream) == len(stream.result.ids.values)


# Arguments of a wrong type --------------------------------------------------------------------------------------------


def test_a_mapping_of_texts_is_refused():
    with refused(InvalidRequestError, field="texts"):
        fake().tokenize({"12": "34"})


def test_truth_values_are_no_positions_and_no_seeds_and_any_integer_is():
    backend = fake()
    for wrong in (True, [True], [torch.tensor(True)], torch.tensor([True]), np.array([True]), torch.tensor(True)):
        with refused(InvalidRequestError, field="score_from"):
            backend.score_logprobs([[1, 2, 3]], score_from=wrong)
        with refused(InvalidRequestError, field="seeds"):
            backend.generate([[1]], SHORT, seeds=wrong)
    for position in (2, np.int64(2), torch.tensor(2), [np.int32(2)], np.array([2])):
        assert backend.score_logprobs([[1, 2, 3]], score_from=position).scored.tolist() == [[False, False, True]]
    with refused(InvalidRequestError, field="prompts", rows=(0,)):
        backend.generate([[3, torch.tensor(True)]], SHORT)


# Rows that a plugin refuses, named as the caller knows them -----------------------------------------------------------


def refuses(*rows, error=InvalidRequestError):
    """Return a `bend` that refuses these rows of the request."""
    problems = {row: f"number {row}" for row in rows}

    def bend(batch):
        raise error(f"prompts: {spelled_out(problems)}", problems=problems)

    return bend


@each("error", [InvalidRequestError, EngineError])
@each("batched", [False, True])
def test_rows_that_a_plugin_refuses_are_named_as_the_caller_knows_them(batched, error):
    backend = fake(refuses(4, 5, 6, 7, error=error))
    with DynamicBatcher(backend) if batched else backend as asked, pytest.raises(error) as caught:
        asked.generate([[1], [3]], {**SHORT, "num_samples": 4})
    assert caught.value.rows == (1,) and str(caught.value) == "prompts: row 1: number 4"


def test_rows_that_a_plugin_refuses_are_counted_among_the_skipped_ones():
    backend = fake(refuses(1))
    with refused(InvalidRequestError, rows=(2,)) as caught:
        backend.generate([[1], [99], [3]], SHORT, on_error="skip")
    assert caught.value.problems == {2: "number 1"}
    with refused(InvalidRequestError, rows=(3,)) as caught:
        backend.score_logprobs([[], [1, 2], [99], [3, 4]], on_error="skip")
    assert caught.value.problems == {3: "number 1"}
    out = backend.generate([[99], [99]], SHORT, on_error="skip")
    assert out.finish_reasons == ("error", "error"), "no row is left for the engine"
