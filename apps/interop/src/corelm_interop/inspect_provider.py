"""`CoreLMAPI`: any backend as a model of inspect_ai. `corelm_interop.inspect_ai` registers it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprobs,
    ModelAPI,
    ModelCall,
    ModelOutput,
    ModelUsage,
    StopReason,
)
from inspect_ai.tool import ToolCall, ToolChoice, ToolInfo
from rich.markup import escape
from tensordict import TensorDict, TensorDictBase

from corelm import Backend, History, LLMPolicy, NamedParser, PolicyOptions, get_backend, parser_named, ragged
from corelm.application import AUTO, provenance_of_rows
from corelm.batching import Limits
from corelm.errors import CapabilityError, CoreLMError, EngineError, InvalidRequestError
from corelm.spec import Message, Mode
from corelm.spec.message import new_call_id
from corelm.validate import invalid
from corelm_interop.openai_answers import Top, top_of
from corelm_interop.openai_logprobs import chat_logprobs
from corelm_interop.token_texts import TokenTexts

#: Keys of a message under which chat templates read reasoning.
REASONING = ("reasoning_content", "thinking", "reasoning")
#: Settings by inspect's name, and what core calls them.
_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_seqs": "stop",
    "seed": "seed",
    "num_choices": "num_samples",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}
#: Settings that would change the answers, and that core cannot honour: what to do instead.
_REFUSED = {
    "best_of": "use num_choices, and choose among the answers in a scorer",
    "logit_bias": "pass what the engine understands as -M engine_kwargs={…}",
    "prompt_logprobs": "score the prompt with an LLMPolicy(generate=False)",
    "response_schema": "pass what the engine understands as -M engine_kwargs={…}",
    "modalities": "core samples text only",
    "extra_body": "pass what the engine understands as -M engine_kwargs={…}",
    "extra_headers": "pass -M headers={…} to a backend that has this option",
}
#: Settings that hosted services understand.
IGNORED = ("effort", "reasoning_tokens", "reasoning_mode", "reasoning_summary", "verbosity", "parallel_tool_calls")


def sampling_of(config: GenerateConfig) -> dict[str, Any]:
    """Return the sampling parameters that a config sets, as `SamplingParams` takes them.

    Raises:
        CapabilityError: it sets something that changes answers and that core cannot honour.
    """
    for name, instead in _REFUSED.items():
        if getattr(config, name) not in (None, [], {}):
            raise CapabilityError(f"inspect's {name} is not supported; {instead}", capability=name)
    return {ours: value for theirs, ours in _SAMPLING.items() if (value := getattr(config, theirs)) is not None}


def tools_of(tools: Sequence[ToolInfo], choice: ToolChoice) -> list[dict[str, Any]]:
    """Return the tools as chat templates read them.

    Raises:
        CapabilityError: a call of a tool is demanded, which a chat template cannot promise.
    """
    if not tools or choice == "none":
        return []
    if choice != "auto":
        raise CapabilityError(
            f"tool_choice={choice!r} cannot be enforced: the model decides what it writes; pass tool_choice='auto'",
            capability="tool_choice",
        )
    return [{"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"options"})} for tool in tools]


def message_of(said: ChatMessage, reasoning: str) -> Message:
    """Return a message as core's.

    Args:
        reasoning: the key under which the chat template reads reasoning.

    Raises:
        InvalidRequestError: it has an image, or anything else that is not text.
    """
    texts, thoughts = [], []
    for part in [ContentText(text=said.content)] if isinstance(said.content, str) else said.content:
        if isinstance(part, ContentText):
            texts.append(part.text)
        elif isinstance(part, ContentReasoning):
            thoughts.append(part.reasoning)
        else:
            raise invalid("input", f"a message of the {said.role} has a part of type {part.type!r}; only text is read")
    content, more = "\n".join(texts), {}
    if isinstance(said, ChatMessageTool):
        if said.error is not None:
            content = said.error.message
        more = {"tool_call_id": said.tool_call_id, "name": said.function}
    elif isinstance(said, ChatMessageAssistant) and said.tool_calls:
        calls = [(call.id, {"name": call.function, "arguments": call.arguments}) for call in said.tool_calls]
        more = {"tool_calls": tuple({"id": id, "type": "function", "function": call} for id, call in calls)}
    extra = {reasoning: "\n".join(thoughts)} if thoughts else {}
    return Message(said.role, content, **more, extra=extra)


def assistant_of(answer: Message, model: str) -> ChatMessageAssistant:
    """Return an answer as inspect's message."""
    thoughts = [ContentReasoning(reasoning=answer.extra[key]) for key in REASONING if answer.extra.get(key)]
    text = answer.content or ""
    calls = [
        ToolCall(
            id=call.get("id") or new_call_id(),
            function=call["function"]["name"],
            arguments=dict(call["function"]["arguments"]),
        )
        for call in answer.tool_calls or ()
    ]
    content: Any = [*thoughts, ContentText(text=text)] if thoughts else text
    return ChatMessageAssistant(content=content, tool_calls=calls or None, model=model, source="generate")


def log_probs_of(
    texts: TokenTexts, ids: Sequence[int], log_probs: Sequence[float], top: Sequence[Top] | None = None
) -> Logprobs:
    """Return the log-probs of an answer."""
    # Inspect has the shape of the OpenAI protocol.
    return Logprobs.model_validate({"content": chat_logprobs(texts, ids, log_probs, top)["content"]})


_log = logging.getLogger(__name__)

#: The longest answer if neither the task nor the user says: what inspect's own local providers take.
LONGEST_ANSWER = 2048
#: Samples that inspect works on at a time. An engine that batches by itself gains from more.
CONNECTIONS, CONNECTIONS_OF_A_BATCHING_ENGINE = 64, 256


@contextmanager
def _told_in_one_message() -> Iterator[None]:
    """Have the commands of inspect print the message of an error of ours, and no traceback.

    They do so for errors of one class of theirs, and this class is added to that of ours.
    """
    try:
        yield
    except CoreLMError as error:
        with suppress(ImportError, TypeError):
            from inspect_ai._util.error import PrerequisiteError

            kind = type(error)
            # Pickled, it is one of the class that it had.
            own = {"__module__": kind.__module__, "__reduce__": lambda self: (kind, (str(self),))}
            error.__class__ = type(kind.__name__, (kind, PrerequisiteError), own)
            vars(error)["message"] = escape(str(error))
        raise


class CoreLMAPI(ModelAPI):
    """A model of inspect_ai that is answered by a backend of core.

    Concurrent samples share the engine's calls.

    Args:
        model_name: the name of the backend and, after a slash, its model: ``vllm/PATH``.
        base_url: passed to the backend, if given.
        api_key: passed to the backend, if given.
        config: inspect's.
        response_parser: the format of tool calls and reasoning, see `corelm.parser_named`; None for the tokenizer's
            own, if it has one, else none: reasoning is then part of the text, and tools are refused.
        chat_template: as for `LLMPolicy`.
        template_kwargs: as for `LLMPolicy`.
        reasoning_key: the key under which the chat template reads the reasoning of earlier turns; None for
            that of the format.
        log_probs_mode: `raw` or `processed`, as for `LLMPolicy`.
        engine_kwargs: sampling parameters of the engine's own, as in `SamplingParams`.
        batching: how samples share calls: True, False or `Limits`.
        backend: an open backend instead of one to open. It is not closed here. Pass ``memoize=False`` to `get_model`
            with it: inspect takes two models for the same if their arguments look alike in JSON.
        options: those of the backend, as for `corelm.get_backend`.

    Raises:
        CoreLMError: the errors of `corelm.get_backend` and `LLMPolicy`.
    """

    @_told_in_one_message()
    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 (the signature is inspect's)
        *,
        response_parser: str | None = None,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning_key: str | None = None,
        log_probs_mode: Mode = "raw",
        engine_kwargs: Mapping[str, Any] | None = None,
        batching: bool | Limits = True,
        backend: Backend | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        if backend is not None and options:
            raise invalid("backend", f"it is open already, so {', '.join(options)} cannot be passed to it")
        self._owned = backend is None
        if backend is None:
            name, _, model = model_name.partition("/")
            where = {"base_url": base_url, "api_key": api_key}
            options |= {key: value for key, value in where.items() if value is not None}
            backend = get_backend(name, model or None, **options)
        try:
            tokenizer = backend.tokenizer
            if response_parser is None and getattr(tokenizer, "response_template", None) is not None:
                response_parser = AUTO
            self._policy = LLMPolicy(
                backend,
                PolicyOptions(
                    response_parser=response_parser,
                    chat_template=chat_template,
                    template_kwargs=template_kwargs or {},
                    log_probs_mode=log_probs_mode,
                    # A conversation may end with a turn of the assistant, for example in a debate.
                    continue_final_message=None,
                    return_masks=False,
                    inplace=False,
                ),
                batching=batching,
            )
            parser = None if response_parser is None else parser_named(response_parser, tokenizer)
        except BaseException:
            if self._owned:
                backend.close()
            raise
        self._reasoning = reasoning_key or _reasoning_key(parser)
        self._engine_kwargs = dict(engine_kwargs or {})
        self._texts = TokenTexts(tokenizer)
        self._ignored: set[str] = set()

    @property
    def backend(self) -> Backend:
        """The open backend."""
        return self._policy.backend

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> tuple[ModelOutput, ModelCall]:
        """Answer a conversation, `config.num_choices` times.

        Raises:
            CapabilityError: the config or the engine cannot do what was asked.
            InvalidRequestError: a message that is not text, or tools without a `response_parser`. A conversation that
                does not fit the context has the stop reason `model_length` instead.
            EngineError: the engine failed.
        """
        started = time.monotonic()
        policy = self._policy_for(tools_of(tools, tool_choice), config)
        chat = [message_of(each, self._reasoning) for each in input]
        try:
            asyncio.get_running_loop()
        except RuntimeError as error:
            raise invalid(
                "INSPECT_ASYNC_BACKEND", "core's calls run on asyncio; leave the setting out, or set it to asyncio"
            ) from error
        asked = TensorDict(history=History.from_chats([chat]))
        try:
            found = await policy.aforward(asked)
        except InvalidRequestError as error:
            if error.field != "prompts":
                raise
            # No other prompt is in the call, so the engine is not asked.
            found = await policy.replace(on_error="skip").aforward(asked)
            length, context = (
                len(ragged(found, ("tokens", "prompt")).tolist()[0]),
                self.backend.capabilities.max_context,
            )
            if context is None or length + (policy.options.sampling.max_new_tokens or 1) <= context:
                raise
            output = ModelOutput.from_content(self.model_name, str(error), stop_reason="model_length")
        else:
            output = self._output(found if policy.options.num_samples is None else found[0], config)
        if policy.options.num_samples is not None:
            found = found[0]
        output.time = time.monotonic() - started
        request = {
            "prompt": found["text"].prompt[0],
            "sampling_params": _set_fields(policy.options.sampling),
            "template_kwargs": policy.options.template_kwargs,
        }
        return output, ModelCall.create(request, _record(found), time=output.time)

    def _policy_for(self, tools: list[dict[str, Any]], config: GenerateConfig) -> LLMPolicy:
        base = self._policy.options
        if tools and base.response_parser is None:
            raise invalid(
                "response_parser",
                "the task has tools, and nothing says how this model writes calls: pass -M response_parser=hermes, or "
                "another format (see corelm.parser_named)",
            )
        for name in IGNORED:
            if getattr(config, name) is not None and name not in self._ignored:
                self._ignored.add(name)
                _log.warning("inspect's %s is meant for hosted services and changes nothing here", name)
        sampling = {"max_new_tokens": self.max_tokens(), **sampling_of(config)}
        if self._engine_kwargs:
            sampling["engine_kwargs"] = self._engine_kwargs
        # A variable of the chat template, if it knows it.
        more = {} if config.reasoning_effort is None else {"reasoning_effort": config.reasoning_effort}
        more |= {"tools": tools} if tools else {}
        asked = bool(config.logprobs or config.top_logprobs)
        return self._policy.replace(
            sampling_params=sampling,
            template_kwargs={**base.template_kwargs, **more},
            return_log_probs=asked,
            top_logprobs=config.top_logprobs or 0,
        )

    def _output(self, found: TensorDictBase, config: GenerateConfig) -> ModelOutput:
        answers = ragged(found, ("tokens", "response")).tolist()
        prompt = len(ragged(found, ("tokens", "prompt")).tolist()[0])
        reasons, problems = list(found["finish_reason"]), list(found["errors"])
        messages = [chat[-1] for chat in found["history"].response.chats]
        log_probs = self._log_probs(found, answers, config) if "log_probs" in found.keys() else [None] * len(answers)
        choices = []
        for row, message in enumerate(messages):
            if reasons[row] in ("error", "abort"):
                raise EngineError(f"the engine gave no answer: {problems[row] or reasons[row]}", usable=True)
            choices.append(
                ChatCompletionChoice(
                    message=assistant_of(message, self.model_name),
                    stop_reason=self._stop_reason(message, reasons[row], prompt + len(answers[row])),
                    logprobs=log_probs[row],
                )
            )
        sampled = sum(map(len, answers))
        unparsed = {str(row): problem for row, problem in enumerate(problems) if problem}
        return ModelOutput(
            model=self.model_name,
            choices=choices,
            usage=ModelUsage(input_tokens=prompt, output_tokens=sampled, total_tokens=prompt + sampled),
            input_context_tokens=prompt,
            metadata={"response_parser": unparsed} if unparsed else None,
        )

    def _log_probs(self, found: TensorDictBase, answers: list[list[int]], config: GenerateConfig) -> list[Any]:
        rows = ragged(found, ("log_probs", "response")).tolist()
        tops: list[Any] = [None] * len(rows)
        if config.top_logprobs:
            ids, values = (ragged(found, ("log_probs", name)).tolist() for name in ("top_ids", "top_log_probs"))
            # These are as long as prompt and answer.
            tops = [
                [top_of(*at) for at in zip(one[-len(answer) :], other[-len(answer) :], strict=True)] if answer else []
                for one, other, answer in zip(ids, values, answers, strict=True)
            ]
        return [log_probs_of(self._texts, ids, row, top) for ids, row, top in zip(answers, rows, tops, strict=True)]

    def _stop_reason(self, message: Message, reason: str, length: int) -> StopReason:
        if reason == "length":
            return "model_length" if length == self.backend.capabilities.max_context else "max_tokens"
        return "tool_calls" if message.tool_calls else "stop"

    # What inspect asks of a provider ---------------------------------------------------------------------------------

    async def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return list(self.backend.tokenize([text], add_special_tokens=False).ids.tolist()[0])

    async def count_text_tokens(self, text: str) -> int:
        """Return how many tokens a text has."""
        return len(await self.tokenize(text))

    def max_tokens(self) -> int:
        """Return the longest answer if the config does not say: at most half of the context."""
        context = self.backend.capabilities.max_context
        return LONGEST_ANSWER if context is None else min(LONGEST_ANSWER, max(context // 2, 1))

    def max_connections(self) -> int:
        """Return how many samples inspect works on at a time, unless the config says."""
        own = self.backend.capabilities.concurrent_calls
        return CONNECTIONS_OF_A_BATCHING_ENGINE if own else CONNECTIONS

    def connection_key(self) -> str:
        """Return what tells one engine's connections from another's."""
        return f"{self.model_name}@{id(self.backend.engine)}"

    def collapse_user_messages(self) -> bool:
        """Return True: many chat templates want user and assistant in turns."""
        return True

    def close(self) -> None:
        """Close the engine, if it was opened here. Threads of the batcher end in any case."""
        if self._owned:
            self._policy.close()
        else:
            self._policy.cleanup_batching()


def _reasoning_key(parser: NamedParser | None) -> str:
    keys = () if parser is None else parser.keys
    return next((key for key in REASONING if key in keys), REASONING[0])


def _set_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are not at their default."""
    plain = type(record)()
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {name: value for name, value in values.items() if value != getattr(plain, name)}


def _record(found: TensorDictBase) -> dict[str, Any]:
    ids = ragged(found, ("tokens", "response")).tolist()
    answers = [
        {"text": text, "token_ids": row, "finish_reason": reason}
        for text, row, reason in zip(found["text"].response, ids, found["finish_reason"], strict=True)
    ]
    recorded: dict[str, Any] = {"responses": answers}
    if "log_probs" in found.keys():
        labels = provenance_of_rows(found["log_probs"], len(ids))
        recorded["provenance"] = [None if label is None else dataclasses.asdict(label) for label in labels]
    return recorded
