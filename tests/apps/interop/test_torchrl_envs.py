"""An `LLMPolicy` in TorchRL's environments and its collector, with a real model."""

import itertools

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

import corelm
from corelm import LLMPolicy, merge_turns
from corelm.errors import InvalidRequestError, MissingKeyError
from corelm.kl import KLRewardTransform, RetrieveKL
from helpers import oracle
from helpers.tiny_models import tiny_tokenizer
from helpers.torchrl import skip_without_torchrl

skip_without_torchrl()

from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.data.llm import History as TheirHistory
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import ExecuteToolsInOrder, ToolRegistry
from torchrl.envs.llm.transforms.tools import ToolCall, ToolTransformBase
from torchrl.envs.transforms import StepCounter
from torchrl.modules.llm.policies import ChatHistory
from torchrl.objectives.llm import GRPOLoss, MCAdvantage, SFTLoss

from corelm_interop.torchrl import EnvPolicy, LossActor, ModuleTransform, from_torchrl
from helpers.torchrl_envs import QUESTIONS, Ask, Reward, Unchanged, env, rollout

SAMPLING = {"max_new_tokens": 6}
FILTER = "ignore:The env passed to LLMCollector is missing transforms:FutureWarning"


class Shout(Unchanged):
    """Changes the last answer, as `AddThinkingPrompt` does."""

    def _step(self, tensordict, next_tensordict):
        chats = from_torchrl(next_tensordict["history"].prompt).to_chats()
        fields = [[{"role": turn["role"], "content": turn["content"].upper()} for turn in chat] for chat in chats]
        next_tensordict["history"].prompt = TheirHistory.from_chats(fields)
        return next_tensordict


def each(td, container, field):
    """Return the rows of a field, in C order of the batch."""
    return corelm.ragged(td, (container, field)).tolist()


@pytest.mark.parametrize("pad", [False, True], ids=["rows", "dense"])
def test_tokens_of_turn_one_survive_into_turn_two(backend, model, pad):
    td = rollout(env(Ask()), LLMPolicy(backend, sampling_params=SAMPLING, pad_output=pad))
    assert td.batch_size == (2, 2)
    tokenizer = tiny_tokenizer()
    for row in range(2):
        one, two = td[row, 0], td[row, 1]
        (said,), (full,), (prompt,), (response,) = (
            each(one, "tokens", "response"),
            each(one, "tokens", "full"),
            each(two, "tokens", "prompt"),
            each(two, "tokens", "response"),
        )
        assert prompt[: len(full)] == full, "id for id"
        closing = tokenizer("<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n").input_ids
        closing = closing[1:] if said[-1] == tokenizer.eos_token_id else closing
        assert prompt[len(full) :] == closing
        # The log-probs of both turns belong to one sequence.
        found = torch.zeros(len(prompt + response))
        found[len(full) - len(said) : len(full)] = corelm.ragged(one, ("log_probs", "response")).values
        found[len(prompt) :] = corelm.ragged(two, ("log_probs", "response")).values
        expected = oracle.logprobs(model, prompt + response)
        torch.testing.assert_close(found[found != 0], expected[found != 0], atol=1e-4, rtol=1e-4)
        assert (found != 0).sum() == len(said) + len(response)
        (mask,) = each(two, "masks", "all_assistant_mask")
        assert torch.equal(torch.tensor(mask), found != 0)
    # Retokenizing would have given another sequence.
    texts = [text for turns in td["text"].full for text in turns]
    assert [tokenizer(text).input_ids for text in texts] != each(td, "tokens", "full")


def test_the_environment_gets_torchrl_histories(backend):
    td = rollout(env(Ask()), LLMPolicy(backend, sampling_params=SAMPLING))
    full = td["history"].full
    assert isinstance(full, TheirHistory)
    assert full[0, 1].role == ["user", "assistant", "user", "assistant"]
    assert full[0, 1].content[1] == td["text"].response[0][0] and full[0, 1].content[2] == "And then?"
    ours = from_torchrl(full)
    assert ours.batch_size == (2, 2)
    assert ours.to_chats()[1][1][3]["token_ids"] == td[1, 1]["tokens"].response.tolist()


def test_a_changed_turn_is_tokenized_again(backend):
    td = rollout(env(Shout()), LLMPolicy(backend, sampling_params=SAMPLING))
    tokenizer = tiny_tokenizer()
    for row in range(2):
        chat = from_torchrl(td["next", "history"].prompt).to_chats()[row][0]
        assert all("token_ids" not in turn for turn in chat)
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert td[row, 1]["tokens"].prompt.tolist() == tokenizer(text).input_ids


def test_a_rollout_of_texts(backend):
    td = rollout(env(input_mode="text"), LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING))
    assert td["text"].prompt[0][0] == "<|im_start|>user\nHello there, who are you?<|im_end|>\n<|im_start|>assistant\n"
    assert [turns[1] for turns in td["text"].prompt] == [turns[0] for turns in td["text"].full]


def test_the_turns_of_a_rollout_are_merged_into_rows_that_the_losses_take(backend, model, trainer, trained):
    td = rollout(env(Ask()), LLMPolicy(backend, sampling_params=SAMPLING), turns=3)
    merged = merge_turns(td.unbind(1))
    assert merged.batch_size == (2,)
    merged["advantage"] = torch.tensor([1.0, -0.5]).reshape(2, 1, 1)
    terms = []
    for row, advantage in zip(range(2), (1.0, -0.5), strict=True):
        ids, counts = each(merged, "tokens", "full")[row], torch.tensor(each(merged, "log_probs", "scored_mask")[row])
        assert counts.sum() == sum(len(said) for said in each(td[row], "tokens", "response"))
        ratio = (oracle.logprobs(trained, ids) - oracle.logprobs(model, ids))[counts].exp()
        terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    out = GRPOLoss(LossActor(LLMPolicy(trainer), trained))(merged)
    torch.testing.assert_close(out.loss_objective.detach(), torch.cat(terms).mean(), atol=1e-4, rtol=1e-4)


# Tools ---------------------------------------------------------------------------------------------------------------


class Weather:
    """A tool for `ExecuteToolsInOrder`."""

    name, schema_in, schema_out = "weather", {}, {}

    def __call__(self, **_):
        return {"sky": "clear"}


class Results(ToolTransformBase):
    """TorchRL's base of its tool transforms; at turn t, row r gets ``plan[t][r]`` results."""

    def __init__(self, plan):
        super().__init__()
        self.plan = [list(turn) for turn in plan]

    def _process_batch_item(self, content, index):
        return ["sunny"] * self.plan[0][index] or None

    def _process_tensordict(self, next_tensordict):
        out = super()._process_tensordict(next_tensordict)
        self.plan.pop(0)
        return out


def every_second_answer_calls_a_tool():
    answers = itertools.count()

    def parse(response):
        calls = [] if next(answers) % 2 else [ToolCall("weather", {})]
        return {"text": response, "calls": calls, "meta": {}}

    return parse


TOOLS = {
    "in order": lambda: ExecuteToolsInOrder(ToolRegistry([Weather()]), every_second_answer_calls_a_tool()),
    "one row at a time": lambda: Results([(1, 0), (0, 2), (3, 1)]),
    "none, then all": lambda: Results([(0, 0), (1, 1), (0, 1)]),
}


@pytest.mark.parametrize("tools", TOOLS.values(), ids=TOOLS)
def test_torchrls_tools_work_if_only_some_rows_call_one(backend, tools):
    td = rollout(env(tools()), LLMPolicy(backend, sampling_params=SAMPLING), turns=3)
    assert td.batch_size == (2, 3)
    tokenizer = tiny_tokenizer()
    for row in range(2):
        for turn in range(3):
            one = td[row, turn]
            history = one["history"]
            (full,) = each(one, "tokens", "full")
            # What TorchRL itself would send to a model: it leaves its placeholders out.
            shown = history.prompt.apply_chat_template(tokenizer=tokenizer)
            assert one["text"].prompt == shown
            assert history.full.role[: len(history.prompt.role)] == history.prompt.role
            assert history.full[-1].role == "assistant" and history.full[-1].content == one["text"].response
            if turn < 2:
                (after,) = each(td[row, turn + 1], "tokens", "prompt")
                assert after[: len(full)] == full and len(after) > len(full), "id for id"
    roles = {role for turns in td["next", "history"].prompt.role for chat in turns for role in chat}
    assert roles == {"user", "assistant", "tool", "<none>"}


def test_tool_calls_of_a_response_parser_are_in_torchrls_history(backend):
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"place": "here"}}}]

    def parse(text):
        return {"role": "assistant", "content": text, "tool_calls": calls}

    policy = LLMPolicy(backend, sampling_params=SAMPLING, response_parser=parse)
    td = EnvPolicy(policy)(env().reset(TensorDict(query=QUESTIONS, batch_size=[2])))
    for row in range(2):
        answer = td["history"].full[row, -1]
        assert answer.role == "assistant" and answer.content == td["text"].response[row]
        assert [dict(call) for call in answer.tool_calls] == calls
    # They are shown to the model in the next turn, which begins with the ids that were sampled.
    again = rollout(env(Ask()), policy)
    for row in range(2):
        (full,), (prompt,) = each(again[row, 0], "tokens", "full"), each(again[row, 1], "tokens", "prompt")
        assert prompt[: len(full)] == full


def test_conversations_of_different_lengths_get_placeholders_before_the_answer(backend):
    asked = {"role": "user", "content": "Hi"}
    chats = [[{"role": "system", "content": "Be brief."}, asked], [asked]]
    td = TensorDict(history=ChatHistory(prompt=TheirHistory.from_chats(chats), batch_size=[2]), batch_size=[2])
    full = EnvPolicy(LLMPolicy(backend, sampling_params=SAMPLING))(td)["history"].full
    assert full.role == [["system", "user", "assistant"], ["user", "<none>", "assistant"]]
    question = TheirHistory(role=["user"] * 2, content=["And then?"] * 2, batch_size=[2])
    assert full.append(question, inplace=False)[..., -1].role == ["user", "user"]


# KL modules as transforms --------------------------------------------------------------------------------------------


def test_the_kl_to_a_reference_is_subtracted_from_the_reward_at_every_step(backend, trainer, model, trained):
    penalty = ModuleTransform(KLRewardTransform(LLMPolicy(trainer), 0.1))
    td = rollout(env(Reward(torch.ones(2, 1)), penalty, Ask()), LLMPolicy(backend, sampling_params=SAMPLING))
    for row in td.view(-1).unbind(0):
        prompt, response = row["tokens"].prompt.tolist(), row["tokens"].response.tolist()
        kl = oracle.answer_logprobs(model, prompt, response) - oracle.answer_logprobs(trained, prompt, response)
        torch.testing.assert_close(row["next", "reward"], 1 - 0.1 * kl.sum()[None], atol=1e-4, rtol=1e-4)
        found = row["next", "kl_penalty"].full
        torch.testing.assert_close(found, torch.cat([torch.zeros(len(prompt)), kl]), atol=1e-4, rtol=1e-4)
        assert row["next", "ref_log_probs"].provenance is not None


def test_a_transform_on_a_replay_buffer_is_applied_to_every_batch(backend, trainer):
    td = rollout(env(Ask()), LLMPolicy(backend, sampling_params=SAMPLING)).view(-1)
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4)
    buffer.append_transform(ModuleTransform(RetrieveKL(LLMPolicy(trainer), add_to_reward=False)))
    buffer.extend(td)
    seen = buffer.sample()
    assert any(bool(row.any()) for row in seen["next", "kl_penalty"].full)


# The collector -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(FILTER)
def test_training_on_one_batch_of_a_collector(backend, model):
    """Follow TorchRL's recipe: prompts in groups of two, two turns each, advantages within the group, GRPO and SFT."""
    queries = DataLoader([{"query": question} for question in QUESTIONS], batch_size=1)
    chat = ChatEnv.from_dataloader(queries, repeats=2, batch_size=(2,), tokenizer=tiny_tokenizer())
    for transform in (Reward(torch.tensor([0.0, 1.0]).reshape(2, 1, 1)), Ask(), StepCounter(max_steps=2)):
        chat = chat.append_transform(transform)
    policy = LLMPolicy(backend, sampling_params=SAMPLING)
    collector = LLMCollector(chat, policy=EnvPolicy(policy), dialog_turns_per_batch=4, total_dialog_turns=4)
    (batch,) = list(collector)
    collector.shutdown()
    assert batch.batch_size == (2, 2) and batch["next", "done"].flatten().tolist() == [False, True, False, True]
    for row in batch.unbind(0):
        (first, second), prompts = each(row, "tokens", "full"), each(row, "tokens", "prompt")
        assert prompts[1][: len(first)] == first and len(second) > len(prompts[1])

    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4, sampler=SamplerWithoutReplacement())
    buffer.append_transform(MCAdvantage(grpo_size=2, trajectory_return="sum"))
    buffer.extend(batch)
    td = buffer.sample()
    advantages = td["advantage"].flatten()
    assert advantages.abs().min() > 0.5 and advantages.sum() == 0
    counts = torch.tensor([len(row) for row in td["tokens"].response])
    actor = LossActor(policy, model)
    for strategy in ("sft", "rlhf", "generic"):
        # The weights are those of sampling, so every ratio is 1.
        out = GRPOLoss(actor, masking_strategy=strategy)(td)
        expected = -(advantages * counts).sum() / counts.sum()
        torch.testing.assert_close(out.loss_objective, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out.ESS, torch.tensor(1.0), atol=1e-3, rtol=1e-3)
    for loss in (out.loss_objective, SFTLoss(actor)(td).loss_sft):
        model.zero_grad()
        loss.backward()
        assert sum(parameter.grad.norm() for parameter in model.parameters()) > 0.1
    model.zero_grad()


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generate": False}, "generates from a history or from text"),
        ({"input_mode": "tokens"}, "generates from a history or from text"),
        ({"return_history": False}, "returns that container"),
        ({"num_samples": 2}, "repeat the prompts"),
        ({"continue_final_message": True}, "continue_final_message=True is not supported: .* leave"),
    ],
)
def test_policies_that_do_not_fit_an_environment_are_refused(backend, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        EnvPolicy(LLMPolicy(backend, **options))


def test_prompts_under_another_mode_are_named(backend):
    start = env(input_mode="text").reset(TensorDict(query=QUESTIONS, batch_size=[2]))
    with pytest.raises(MissingKeyError, match=r"no 'history\.prompt'; it has: .*text.*input_mode"):
        EnvPolicy(LLMPolicy(backend))(start)
