"""A page for every backend: what it says about capabilities and options is what the plugin declares and takes."""

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import corelm
from corelm_testing import THEMES
from helpers import capability_tables
from helpers.tiny_models import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "backends"
PLUGINS = {"transformers": "Transformers", "vllm": "VLLM", "sglang": "SGLang", "openai": "OpenAI", "ray": "Ray"}
#: Options that a README explains, and that belong to the engine.
OF_THE_ENGINE = {"vllm": {"max_logprobs"}}


def page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text()


def test_every_backend_of_this_repository_has_a_page():
    plugins = {path.name.removesuffix("_backend") for path in (ROOT / "plugins").iterdir() if path.is_dir()}
    assert plugins == set(PLUGINS) == {path.stem for path in FOLDER.glob("*.md")} - {"index", "toy"}
    for name in (*PLUGINS, "toy"):
        assert f"]({name}.md)" in page("index")


@pytest.fixture
def tables(monkeypatch):
    """Return the module that makes the tables of the site."""
    pytest.importorskip("sphinx", reason="what builds the site is not installed: the group docs")
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    return import_module("engine_reports")


def test_every_page_shows_the_report_of_its_engine():
    for name in (*PLUGINS, "toy"):
        assert page(name).count(f"```{{capabilities}} {name}\n```\n") == 1
        assert (capability_tables.REPORTS / f"{name}.json").exists()


def test_the_toy_declares_what_its_report_says():
    with corelm.get_backend("toy") as backend:
        capability_tables.assert_page_says("toy", backend)


def test_transformers_declares_what_its_report_says(tmp_path):
    tiny_model(hidden_size=128).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with corelm.get_backend("transformers", tmp_path, dtype="float32") as backend:
        capability_tables.assert_page_says("transformers", backend)


def test_every_capability_has_a_meaning(tables):
    assert tables.meanings().keys() == corelm.Capabilities.__dataclass_fields__.keys()


def test_a_table_shows_what_is_declared(tables):
    declared = tables.read_report("vllm")["declares"]
    (first, *rest) = list(tables.capability_table(declared))[2:]
    assert "`presence_penalty` (-2 to 2), `repetition_penalty`, `stop`" in first
    shown = {row.split("`")[1]: row.split(" | ")[1] for row in rest}
    assert shown.keys() == declared.keys() - {*tables.OF_THE_MODEL, "sampling"}
    assert (shown["score"], shown["gradients"], shown["sleep_levels"]) == ("yes", "no", "no")
    assert (shown["generation_modes"], shown["score_top_k"]) == ("raw", "512, all ids of the model")


def test_the_comparison_shows_every_engine_and_every_outcome(tables):
    reports = {name: tables.read_report(name) for name in PLUGINS}
    assert tuple(reports) == tables.ENGINES
    for name, report in reports.items():
        assert report["themes"].keys() <= {*THEMES, "kit"}
        found = [report["themes"][theme] for theme in report["themes"]]
        assert {each: sum(counts.get(each, 0) for counts in found) for each in report["counts"]} == report["counts"]
        (row,) = [line for line in tables.summary(reports) if line.startswith(f"| {name} |")]
        assert report["software"] in row and f"{report['counts']['passed']} passed" in row
    told = reports["ray"] | {"broken": ["a promise: failed, why"]}
    assert list(tables.broken({"vllm": reports["vllm"], "ray": told})) == ["- ray, a promise: failed, why"]


def options_in(text: str) -> dict[str, str]:
    """Return the options in the tables of a section "Options of `open`", each with its default as the table says."""
    section = text.partition("## Options of `open`\n")[2].partition("\n## ")[0]
    found = {}
    for names, default in re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", section, re.MULTILINE):
        options, defaults = re.findall(r"`(\w+)`", names), default.split(", ")
        found |= dict(
            zip(options, defaults if len(defaults) == len(options) else [default] * len(options), strict=True)
        )
    return found


def named(module: str, path: str) -> Callable[..., Any]:
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def options_of(name: str) -> tuple[dict[str, Any], bool]:
    """Return the options that a plugin's `open` lists, each with its default, and whether it takes others."""
    opened = (
        named("corelm_testing.toy", "ToyBackend")
        if name == "toy"
        else named(f"{name}_backend", f"{PLUGINS[name]}Backend")
    )
    parameters = inspect.signature(opened.open).parameters
    found = {each.name: each.default for each in parameters.values() if each.kind is each.KEYWORD_ONLY}
    return found, any(each.kind is each.VAR_KEYWORD for each in parameters.values())


@pytest.mark.parametrize("name", [*PLUGINS, "toy"])
def test_the_options_are_those_of_open_with_their_defaults(name):
    text = page("toy") if name == "toy" else (ROOT / "plugins" / f"{name}_backend" / "README.md").read_text()
    told, (taken, others) = options_in(text), options_of(name)
    shown_elsewhere = {"model", "base_url", *OF_THE_ENGINE.get(name, ())}
    assert told.keys() - shown_elsewhere == taken.keys() - shown_elsewhere
    assert others == bool(name in ("vllm", "sglang", "ray"))
    for option, default in taken.items():
        if isinstance(default, (bool, int, float, str)):
            shown = f"{default:g}" if type(default) in (int, float) else str(default)
            words = re.findall(r"[\w.]+", told[option].replace(",", ""))
            assert shown in words, f"{option}: {shown} is not in {told[option]!r}"


@pytest.mark.parametrize("name", PLUGINS)
def test_a_page_shows_the_readme_from_a_heading_that_it_has(name):
    (target, options) = re.findall(r"^```\{include\} (\S+)\n(.*?)^```", page(name), re.DOTALL | re.MULTILINE)[0]
    readme = (FOLDER / target).read_text()
    for heading in re.findall(r'^:(?:start-after|end-before): "(.*)"$', options, re.MULTILINE):
        assert readme.count(f"\n{heading}\n") == 1
