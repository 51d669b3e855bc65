"""Code that several plugins need, written once. All of it is public.

- `LogitsEngine`: a backend for whoever can say which logits follow some ids.
- `TemplateTokenizer`: the tokenizer of an engine that has only a vocabulary.
- `checked_answer`, and `row_outcome`, `answer_end`, `checked_ids`, `checked_logprobs`, `checked_argmax`,
  `checked_top_ids`, `checked_finish_reason`: is this the answer that a row asked for, and where does it end?
- `RowError`: what an engine returned for a row cannot be the answer to it.
- `RowStreams`, `ReplyStreams`, `SoFar`: stream the rows of an engine that reports each answer so far, or of a server.
- `eos_token_ids`: EOS ids from generation config, model configuration and tokenizer.
- `weights_folder`, `tensor_shapes`, `shape_problems`, `refuse_weights`: whether new weights fit the model (needs
  safetensors).
- `buckets`: tensors in lists of so many bytes, to be sent together. `say_why_files`: why they go through files.
- `configured_shapes`: the names that a model's weights have in its checkpoint.
- `ServerAdapters`, `unknown_adapter`: the LoRA adapters of a server, each version under a name of its own.
- `adapter_folder`, `checked_adapter`: a LoRA adapter for an engine that reads a folder, if it fits (needs safetensors).
- `did_you_mean`, `why_unreadable`: parts of error messages about an unknown name, and about a file of a model.
- `refuse_missing_path`, `refuse_unknown_arguments`, `torch_device`, `torch_dtype`: checks of a path and of options,
  before anything is opened. `refuse_settled`: of the names in engine_kwargs.
- `answer_limits`, `prompts_and_limits`: how long each answer may get.
- `HttpEngine`, `HttpOptions`, `takes_http_options`: a server behind a URL: rows, health, abort, and the options of
  ``open`` (needs the extra ``http``).
- `ModelHints`, `model_config`, `generation_config`: what is known about a server's model (needs transformers).
- `HttpClient`: requests to a server behind a URL (needs the extra ``http``).
- `decoded`: what a body in JSON says (needs the extra ``http``).
- `probe_generation`, `probe_scoring`, `wrong_kept_ids`: requests by which a plugin tries out its own engine.
- `ProgressProbe`: what a server that takes long is asked, to tell whether it makes progress.
- `InFlight`: the ids by which an engine knows the requests in flight.
- `Secrets`: masks keys in messages.
- `WeightGroup`: where a server on another machine is sent the tensors of new weights.
- `EventLoopThread`: an asyncio event loop on a thread.

What core itself uses, too, is in `corelm.spec`:

- ``generate_result``, ``score_result``, ``RowAnswer``, ``RowScores``, ``RowFailure``: the result of a call, built from
  the outcome of each row.
- ``StopStrings``, ``text_before_stop``, ``skipped_texts``, ``stops_without_specials``: which token completes a stop
  string, the text before it, what the text of an answer leaves out, and which stop strings an engine that does not may
  look for.
- ``AnswerTexts``: the text of answers whose tokens arrive little by little.
- ``Deadline``, ``opening_within``: how much time a call, or opening an engine, has left.
- ``as_in_checkpoint``, ``saved_shapes``: the names and shapes that a model's weights have in its checkpoint.

`corelm.waiting` has ``next_item`` and ``done_within``: waits for another thread that Ctrl-C ends.

The names are listed in ``__init__.pyi`` and imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
