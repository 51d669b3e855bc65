"""Defects that were planted after the detectors were written, and that no detector was changed for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from corelm import Backend, Ragged, hookimpl
from corelm.spec import GenerateRequest, GenerateResult
from helpers.faulty_weights import StalePrefixes
from helpers.planted_defects import LONG_PROMPTS, loaded, older, opened
from transformers_backend import TransformersBackend


class DecodesWithoutPositions(TransformersBackend):
    """Pads the prompts of a batch on the left and, where it decodes, neither masks the pads nor counts without them."""

    @hookimpl
    @torch.no_grad()
    def generate(self, request: GenerateRequest) -> GenerateResult:
        made = TransformersBackend.generate(self, request)
        if made.logprobs is None or request.sampling.temperature != 1.0:
            return made
        prompts, answers = request.prompts.tolist(), made.ids.tolist()
        width = max(map(len, prompts))
        out = []
        for prompt, answer in zip(prompts, answers, strict=True):
            row = [0] * (width - len(prompt)) + prompt + answer
            logits = self.engine.module(input_ids=torch.tensor([row[:-1]])).logits[0].float().log_softmax(-1)
            out.append(logits.gather(-1, torch.tensor(row[1:])[:, None])[width - 1 :, 0])
        return replace(made, logprobs=Ragged(torch.cat(out), made.logprobs.lengths))


class TopTwenty(TransformersBackend):
    """Gives log-probs of sampled tokens over the twenty most probable ids, and -30 to all others."""

    @hookimpl
    @torch.no_grad()
    def generate(self, request: GenerateRequest) -> GenerateResult:
        made = TransformersBackend.generate(self, request)
        if made.logprobs is None:
            return made
        out = []
        for prompt, answer in zip(request.prompts.tolist(), made.ids.tolist(), strict=True):
            row = prompt + answer
            logits = self.engine.module(input_ids=torch.tensor([row[:-1]])).logits[0].float()
            least = logits.topk(20, -1).values[:, -1:]
            table = logits.masked_fill(logits < least, -torch.inf).log_softmax(-1).clamp_min(-30.0)
            out.append(table.gather(-1, torch.tensor(row[1:])[:, None])[len(prompt) - 1 :, 0])
        return replace(made, logprobs=Ragged(torch.cat(out), made.logprobs.lengths))


def _stale_prefixes(folder: Path) -> Backend:
    model = loaded(folder)
    new = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(older(name, parameter))
    backend = opened(StalePrefixes, model, AutoTokenizer.from_pretrained(folder))
    # As evaluations of answers do: only the second half of each row is scored, so that its prefix is kept.
    backend.score_logprobs(LONG_PROMPTS, score_from=[len(row) // 2 for row in LONG_PROMPTS])
    backend.update_weights(new)
    return backend


def _rope_of_50k(folder: Path) -> Backend:
    rope = {**AutoConfig.from_pretrained(folder).rope_parameters, "rope_theta": 50_000.0}
    return opened(TransformersBackend, loaded(folder, rope_parameters=rope), AutoTokenizer.from_pretrained(folder))


def _fp8_by_rows(folder: Path) -> Backend:
    def rounded(weight: Tensor) -> Tensor:
        scale = weight.abs().amax(-1, keepdim=True) / 448.0
        return (weight / scale).to(torch.float8_e4m3fn).float() * scale

    model = loaded(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name and "head" not in name:
                parameter.copy_(rounded(parameter))
    return opened(TransformersBackend, model, AutoTokenizer.from_pretrained(folder))


def _attention_scale(folder: Path) -> Backend:
    model = loaded(folder)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.5
    return opened(TransformersBackend, model, AutoTokenizer.from_pretrained(folder))


def _plugin(plugin: type[TransformersBackend]) -> Callable[[Path], Backend]:
    return lambda folder: opened(plugin, loaded(folder), AutoTokenizer.from_pretrained(folder))


#: name → what should be named (None: no detector is for it, so that "cause not found" is right), how it is opened, and
#: the families that it is planted into.
HELD_OUT: dict[str, tuple[str | None, Callable[[Path], Backend], list[str]]] = {
    "pads of a batch take part in decoding": ("company", _plugin(DecodesWithoutPositions), ["qwen2", "gpt2"]),
    "sampled numbers over the top 20": ("top-only", _plugin(TopTwenty), ["qwen2", "opt"]),
    "prefixes kept over an update, in late scores": ("prefix-cache", _stale_prefixes, ["qwen2", "llama"]),
    "rope_theta of 50,000": ("rope", _rope_of_50k, ["qwen2", "llama"]),
    "fp8 with a scale for each row": ("quantized", _fp8_by_rows, ["qwen2", "llama"]),
    "attention scaled by 1.5": (None, _attention_scale, ["qwen2", "llama"]),
}
