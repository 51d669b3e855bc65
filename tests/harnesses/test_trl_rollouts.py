"""`GRPORollout` in the real `GRPOTrainer`: TRL's own numbers, the weights that are handed over, and what is refused."""

import json
from typing import ClassVar

import pytest
import torch
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast

import corelm
import corelm_fleet
from corelm import LLMPolicy
from corelm.errors import InvalidRequestError
from corelm_interop.trl import GRPORollout
from helpers import oracle
from helpers.tiny_models import tiny_model, tiny_tokenizer
from helpers.trl_runs import DIFFERENCE, QUESTIONS, TEMPERATURE, Watched, logged, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using '(rollout_func|environment_factory)':UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


def scored(backend, ids):
    """Return the backend's log-probs of a sequence; the first is 0."""
    return backend.score_logprobs([ids]).logprobs.values


# Weights and numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False], ids=["the trained object", "a copy"])
def test_ten_steps_are_sampled_with_the_trained_weights(tmp_path, own):
    model = tiny_model()
    watched = Watched(model)
    with corelm.get_backend("transformers", model if own else tiny_model(), tokenizer=tiny_tokenizer()) as backend:
        rollout = GRPORollout(backend, conversation=watched)
        trainer = make_trainer(model, rollout, tmp_path, max_steps=10)
        trainer.train()
        # The object that is trained is handed to no engine: its version counts the steps before each rollout.
        assert watched.versions == [str(step if own else step + 1) for step in range(10)]
        assert max(watched.differences) < 1e-4
        rollout.sync_weights(trainer)
        assert backend.weight_version == ("10" if own else "11")
        ids = tiny_tokenizer()("<|im_start|>user\nHello there!<|im_end|>").input_ids
        torch.testing.assert_close(scored(backend, ids), oracle.logprobs(model, ids), atol=1e-4, rtol=0)
    differences = logged(trainer, DIFFERENCE)
    assert len(differences) == 10 and max(differences) < 1e-4
    # TRL computed them: two float32 ways of one number. 0 would be our number compared with itself.
    assert differences[0] > 0
    trained = [oracle.logprobs(one, ids) for one in (model, tiny_model())]
    assert (trained[0] - trained[1]).abs().max() > 0.01, "the weights have changed"


def test_trl_sees_that_weights_were_not_handed_over(tmp_path, backend):
    rollout = GRPORollout(backend, push_weights="never")
    trainer = make_trainer(tiny_model(), rollout, tmp_path, max_steps=4, learning_rate=1e-2)
    trainer.train()
    first, *_, last = logged(trainer, DIFFERENCE)
    assert first < 1e-4 and last > 0.1 and backend.weight_version == "0"
    low, high = (logged(trainer, f"sampling/importance_sampling_ratio/{name}")[-1] for name in ("min", "max"))
    assert min(low, 1 / high) < 0.9, "TRL's correction is in force"


@pytest.mark.parametrize(
    ("changes", "versions"),
    [
        # Two rollouts before each step of the optimizer.
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 2}, ["1", "1", "2", "2"]),
        # Two steps on each rollout.
        ({"num_iterations": 2, "max_steps": 4}, ["1", "2"]),
    ],
    ids=["gradient accumulation", "num_iterations"],
)
def test_weights_are_handed_over_only_when_they_have_changed(tmp_path, backend, changes, versions):
    model = tiny_model()
    watched = Watched(model)
    rollout = GRPORollout(backend, conversation=watched)
    make_trainer(model, rollout, tmp_path, prompts=QUESTIONS * 4, **changes).train()
    assert watched.versions == versions and max(watched.differences) < 1e-4


def test_another_rollout_takes_over_between_two_runs(tmp_path, backend):
    model = tiny_model()
    trainer = make_trainer(model, GRPORollout(backend), tmp_path)
    trainer.train()
    with corelm.get_backend("transformers", tiny_model(seed=1), tokenizer=tiny_tokenizer()) as other:
        watched = Watched(model)
        trainer.rollout_func = GRPORollout(other, conversation=watched)
        trainer.train()
        assert watched.versions == ["1"] == [other.weight_version] and watched.differences[0] < 1e-4
    assert backend.weight_version == "1"


@pytest.mark.parametrize("own", [True, False], ids=["the trained object", "a copy"])
def test_adapters_that_trl_makes_are_sampled_with(tmp_path, own):
    model = tiny_model()
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    with corelm.get_backend("transformers", model if own else tiny_model(), tokenizer=tiny_tokenizer()) as backend:
        watched = Watched(None)
        rollout = GRPORollout(backend, conversation=watched)
        trainer = make_trainer(model, rollout, tmp_path, max_steps=3, more={"peft_config": config})
        watched.model = trainer.model
        trainer.train()
    assert len({*watched.versions}) == 3 and max(watched.differences) < 1e-4
    assert max(logged(trainer, DIFFERENCE)) < 1e-4


def test_an_adapter_is_handed_over_alone_to_a_policy_that_names_it(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    watched = Watched(None)
    sampling = {"temperature": TEMPERATURE, "max_new_tokens": 6}
    with corelm.get_backend("transformers", tmp_path / "model", tokenizer=tiny_tokenizer()) as backend:
        policy = LLMPolicy(backend, sampling_params=sampling, adapter="mine")
        rollout = GRPORollout(policy, conversation=watched)
        trainer = make_trainer(tiny_model(), rollout, tmp_path, max_steps=3, more={"peft_config": config})
        watched.model = trainer.model
        trainer.train()
    assert watched.versions == ["0+mine@1", "0+mine@2", "0+mine@3"] and max(watched.differences) < 1e-4
    assert max(logged(trainer, DIFFERENCE)) < 1e-4


def test_a_canary_is_told_what_to_expect(tmp_path):
    model = tiny_model()
    with corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer(), canary=True) as backend:
        trainer = make_trainer(model, rollout := GRPORollout(backend), tmp_path, max_steps=2)
        trainer.train()
        rollout.sync_weights(trainer)
        corelm_fleet.canary_of(backend).look(expect=corelm_fleet.probe_scores(model))
        assert backend.weight_version == "3"


# What is rolled out --------------------------------------------------------------------------------------------------


def test_conversations_of_several_turns_are_trained_on_where_they_were_sampled(tmp_path, backend):
    seen = []

    def talk(policy, td):
        first = policy(td)
        doubted = first["history"].full.append({"role": "user", "content": "Are you sure?"})
        return [first, policy(type(td)(history=doubted))], {"said": first["text"].response}

    def reward(completions, said, completion_ids, **_):
        seen.append((said, completion_ids))
        return [float(len(text)) for text in said]

    trainer = make_trainer(
        tiny_model(), GRPORollout(backend, conversation=talk), tmp_path, reward=reward, max_completion_length=5
    )
    rollouts = []
    rollout_func = trainer.rollout_func
    trainer.rollout_func = lambda *given: rollouts.append(rollout_func(*given)) or rollouts[-1]
    trainer.train()
    ((said, ids),), (made,) = seen, rollouts
    tokenizer = tiny_tokenizer()
    asked = "\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n"
    for row, (text, completion) in enumerate(zip(said, ids, strict=True)):
        mask = made["env_mask"][row]
        assert tokenizer.decode(completion, skip_special_tokens=True).startswith(text)
        assert asked in tokenizer.decode(completion) and len(mask) == len(completion)
        told = [token for token, sampled in zip(completion, mask, strict=True) if not sampled]
        assert tokenizer.decode(told).endswith(asked) and 0 < sum(mask) <= 10
    assert 0 < logged(trainer, DIFFERENCE)[0] < 1e-4, "TRL compares the sampled tokens alone"


def test_a_policy_brings_its_own_parameters(tmp_path, backend):
    sampling = {"temperature": TEMPERATURE, "max_new_tokens": 3, "stop": "e"}
    policy = LLMPolicy(backend, sampling_params=sampling, chat_template="{{ messages[0]['content'] }}")
    counts = []

    def reward(completion_ids, prompt_ids=None, **_):
        counts.extend(map(len, completion_ids))
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_trainer(tiny_model(), GRPORollout(policy), tmp_path, reward=reward)
    trainer.train()
    assert max(counts) <= 3 and 0 < logged(trainer, DIFFERENCE)[0] < 1e-4
    prompts = logged(trainer, "num_tokens")[0] - sum(counts)
    assert prompts == 2 * sum(len(tiny_tokenizer()(chat[0]["content"]).input_ids) for chat in QUESTIONS)


class Caller(PreTrainedTokenizerFast):
    """A tokenizer that reads a tool call out of every answer."""

    response_schema: ClassVar = {"type": "object"}

    def parse_response(self, ids, **_):
        calls = [{"type": "function", "function": {"name": "sky", "arguments": {"place": "here"}}}]
        return {"role": "assistant", "content": self.decode(ids, skip_special_tokens=True), "tool_calls": calls}


def caller():
    tiny = tiny_tokenizer()
    made = Caller(tokenizer_object=tiny.backend_tokenizer, pad_token=tiny.pad_token, eos_token=tiny.eos_token)
    made.chat_template = "{{ tools | length if tools else 0 }} tools\n" + tiny.chat_template
    return made


def sky(place: str) -> str:
    """Say what the sky is like.

    Args:
        place: where.
    """
    return f"clear over {place}"


class Weather:
    """An environment of TRL, whose method `sky` is a tool."""

    def reset(self, **_):
        return " Look up."

    def sky(self, place: str) -> str:
        """Say what the sky is like.

        Args:
            place: where.
        """
        return sky(place)


@pytest.mark.parametrize("more", [{"tools": [sky]}, {"environment_factory": Weather}], ids=["tools", "environment"])
def test_trls_own_tool_calls_are_answered_by_the_backend(tmp_path, backend, more):
    tokenizer, seen = caller(), []

    def reward(completions, completion_ids, **_):
        seen.extend(zip(completions, completion_ids, strict=True))
        return [float(len(json.dumps(said))) for said in completions]

    trainer = make_trainer(
        tiny_model(),
        GRPORollout(backend),
        tmp_path,
        reward=reward,
        tokenizer=tokenizer,
        more=more,
        max_completion_length=60,
        max_tool_calling_iterations=1,
        generation_kwargs={"max_tokens": 6},
    )
    made, answer = [], trainer.rollout_func
    trainer.rollout_func = lambda *given: made.append(answer(*given)) or made[-1]
    trainer.train()
    assert {tokenizer.decode(ids)[:8] for ids in made[0]["prompt_ids"]} == {"1 tools\n"}
    assert len(seen) == 4
    for said, ids in seen:
        assert [turn["role"] for turn in said] == ["assistant", "tool", "assistant"]
        assert "clear over here" in tokenizer.decode(ids)
    assert logged(trainer, "tools/call_frequency") == [1.0]
    assert 0 < logged(trainer, DIFFERENCE)[0] < 1e-4, "the log-probs of both answers are the sampler's"


def test_a_long_conversation_shortens_its_own_answer_alone(tmp_path, backend):
    trainer = make_trainer(tiny_model(), GRPORollout(backend), tmp_path, max_completion_length=12)
    trainer.train()
    context = backend.capabilities.max_context
    prompts = [[5, 6, 7], [8] * (context - 4), [9, 10]]
    given, ids, logprobs, _ = trainer.vllm_generation.generate(prompts, None, 1)
    assert given == prompts
    assert len(ids[1]) <= 4 and max(len(ids[0]), len(ids[2])) == 12
    for prompt, answer, numbers in zip(prompts, ids, logprobs, strict=True):
        scores = backend.score_logprobs([[*prompt, *answer]], temperature=trainer.args.temperature)
        expected = scores.logprobs.tolist()[0][len(prompt) :]
        assert [number for (number,) in numbers] == pytest.approx(expected, abs=1e-4)


def test_tools_and_a_conversation_are_refused_together(tmp_path, backend):
    rollout = GRPORollout(backend, conversation=lambda policy, td: policy(td))
    trainer = make_trainer(tiny_model(), rollout, tmp_path, tokenizer=caller(), more={"tools": [sky]})
    with pytest.raises(InvalidRequestError, match="leave out the conversation") as error:
        trainer.train()
    assert error.value.field == "tools"
