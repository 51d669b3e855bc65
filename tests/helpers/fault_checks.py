"""Check fleets of real processes under load: what one engine says is checked with the oracle, then expected of all."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import corelm
from corelm import Backend
from helpers import oracle
from helpers.fleet_faults import Answers, FaultTest, answers_of, seconds
from helpers.fleet_processes import LIMITS, Hosts, Server, Servers
from helpers.processes import all_end, wait_until
from helpers.tiny_models import random_rows, tiny_model, tiny_tokenizer

PROMPTS = random_rows(*range(2, 22))
SAMPLING: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0}


class Known(NamedTuple):
    """A saved model, and the oracle's own copy of it."""

    folder: Path
    model: nn.Module


def check_processes(open_fleet: Callable[[Path, int], Backend], folder: Path) -> None:
    """Kill and stop the processes of a fleet of transformers engines, and change their weights.

    Args:
        open_fleet: opens a fleet with the model in a folder, and this many processes.
        folder: where the models are saved.
    """
    long = seconds(5.0)
    models = {}
    for name, seed in (("first", 0), ("second", 1)):
        models[name] = Known(folder / name, tiny_model(seed=seed))
        models[name].model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    expected = {}
    for name, known in models.items():
        with corelm.get_backend("transformers", known.folder, dtype="float32") as one:
            expected[name] = _answers(one, known.model, PROMPTS, SAMPLING)
    weights = {name: known.folder for name, known in models.items()}
    with open_fleet(weights["first"], 2 if long < 60 else 3) as backend:
        processes = Hosts(backend)
        load = FaultTest(backend, processes, PROMPTS, SAMPLING, expected, weights, pause=1.0 if long < 60 else 2.0)
        counts = load.run(long)
        left = processes.victims()
    assert counts.sampled and counts.scored and counts.kills >= 2 and counts.stops and counts.updates
    assert all_end(left)


def check_servers(
    plugin: str,
    servers: Sequence[Server],
    models: Mapping[str, Known],
    prompts: Sequence[list[int]],
    sampling: Mapping[str, Any],
    **options: Any,
) -> None:
    """Kill and stop servers, and change their weights. In the end they run with the first weights.

    Args:
        plugin: the name of the backend.
        servers: the servers, which run.
        models: two models by name; the servers have the first.
        prompts: what is asked for.
        sampling: the sampling parameters.
        options: options of the backend.
    """
    expected = {}
    with corelm.get_backend(plugin, base_url=servers[0].url, **options) as one:
        for name, known in reversed(models.items()):
            one.update_weights(known.folder, version="default" if name == next(iter(models)) else name)
            expected[name] = _answers(one, known.model, prompts, sampling)
    expected = {name: expected[name] for name in models}
    weights = {name: known.folder for name, known in models.items()}
    urls = [server.url for server in servers]
    with corelm.get_backend(plugin, base_url=urls, fleet_limits=LIMITS, **options) as backend:
        load = FaultTest(backend, Servers(servers), prompts, sampling, expected, weights, pause=3.0, last=0.1)
        counts = load.run(seconds(12.0))
        assert counts.sampled and counts.scored and counts.kills and counts.stops and counts.updates
        fleet = backend.engine.plugin
        assert wait_until(lambda: {each.state for each in fleet.status()} == {"healthy"}, 300), fleet.status()
        backend.update_weights(weights[next(iter(models))], version="default")


def _answers(one: Backend, model: nn.Module, prompts: Sequence[list[int]], sampling: Mapping[str, Any]) -> Answers:
    """Return what one engine says, if the oracle agrees."""
    found = answers_of(one, prompts, sampling)
    for (number, _), answer in found.items():
        plain = oracle.answer_logprobs(model, prompts[number], answer.ids)
        torch.testing.assert_close(torch.tensor(answer.logprobs), plain, rtol=0, atol=1e-4)
    return found
