"""The directive ``public-names``: the public names of a module, from their docstrings::

        ```{public-names} corelm.spec
        hookspecs capabilities
        ```

The names are those of the module's ``__all__``, so a name that is added there is on its page. They are grouped by the
module that defines them, below the first paragraph of that module's docstring: the groups that the directive names come
first. A name that another public module also has is described there, and once.

In docstrings, single backticks mark code. They become links where they hold a public name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.addnodes import desc, desc_signature, pending_xref
from sphinx.ext.autodoc.mock import mock
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import signature, stringify_signature

#: The public modules. A name of several is described on the page of the first.
PUBLIC = (
    *("corelm.errors", "corelm.containers", "corelm.spec", "corelm.kl", "corelm.batching", "corelm_serve"),
    *("corelm_compare", "corelm_interop", "corelm_testing", "corelm_testing.cassette", "corelm_engine_kit"),
    *("corelm", "corelm_fleet"),
)
#: Libraries that an adapter needs and that are not installed where the site is built.
MOCKED = ["inspect_ai", "lm_eval"]
DIRECTIVE = re.compile(r"^```\{public-names\} ([\w.]+)\n(.*?)```$", re.MULTILINE | re.DOTALL)
#: A literal block, code, or a dtype with a shape, which is code without being marked as such.
SHAPE = re.compile(
    r"(::\n\n(?:[ ]+.*\n|\n)+|``.+?``|`[^`]+`)|(\b(?:b?float|u?int|bool)\d*\[[^\]`]*\])", re.MULTILINE | re.DOTALL
)
OPTIONS = {"class": "   :members:", "exception": "   :show-inheritance:"}
SPELLED = {"kl": "KL", "http": "HTTP", "json": "JSON", "eos": "EOS", "ids": "ids"}


def public_names(module: ModuleType) -> list[str]:
    """Return the names of ``__all__``; without it, the classes and functions that the module defines."""
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    ]
    names = list(dict.fromkeys(name for name in names if not name.startswith("_")))
    # Without __all__ the order is that of the module, which is meant to be read.
    return sorted(names, key=str.casefold) if hasattr(module, "__all__") else names


@cache
def homes(name: str) -> dict[str, str]:
    """Return the module that each name of a package comes from, read from its stub or from its imports."""
    file = Path(importlib.import_module(name).__file__)
    stub = file.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else file).read_text())
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            source = f"{name}.{node.module}" if node.level else node.module
            found.update({each.asname or each.name: source for each in node.names})
    return found


@cache
def described_at() -> dict[str, str]:
    """Return the full name under which each public name is described."""
    found: dict[str, str] = {}
    for module in PUBLIC:
        for name in public_names(importlib.import_module(module)):
            found.setdefault(name, f"{module}.{name}")
    return found


def first_paragraph(module: str) -> str:
    return inspect.cleandoc(importlib.import_module(module).__doc__ or "").partition("\n\n")[0]


def group_of(module: str, name: str) -> str:
    """Return the module below `module` that a name is from, or `module` itself."""
    source = homes(module).get(name, module)
    if not source.startswith(module + "."):
        return module
    return ".".join(source.split(".")[: module.count(".") + 2])


def heading(group: str, module: str) -> str:
    if group == module:
        return "From other modules"
    words = group.rpartition(".")[2].split("_")
    text = " ".join(SPELLED.get(word, word) for word in words)
    return text[0].upper() + text[1:]


def kind_of(value: object) -> str:
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isroutine(value) else "data"


def described(module: str, name: str) -> Iterator[str]:
    """Yield reStructuredText that describes a name, or says where it is described."""
    with mock(MOCKED):
        value = getattr(importlib.import_module(module), name)
    kind = kind_of(value)
    elsewhere = described_at().get(name, f"{module}.{name}")
    if elsewhere != f"{module}.{name}":
        yield from (f".. py:{kind}:: {name}", "", f"   The same as :py:obj:`{elsewhere}`.", "")
    elif kind == "data":
        # autodoc looks for the comment in the package, and not in the module that the name comes from.
        text = comment(homes(module).get(name, module), name)
        yield from (f".. py:data:: {name}", f"   :value: {value!r}", "", *(f"   {line}" for line in text), "")
    else:
        yield from (f".. auto{kind}:: {module}.{name}", OPTIONS.get(kind, ""), "")


def comment(module: str, name: str) -> list[str]:
    """Return the lines of the ``#:`` comment above a constant."""
    return ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name), [])


def expanded(module: str, first: list[str]) -> str:
    """Return the Markdown that stands for a directive."""
    groups = defaultdict(list)
    for name in public_names(importlib.import_module(module)):
        groups[group_of(module, name)].append(name)
    wanted = [f"{module}.{each}" for each in first]
    order = sorted(groups, key=lambda group: (wanted.index(group) if group in wanted else len(wanted), group))
    lines = [f"```{{eval-rst}}\n.. automodule:: {module}\n```", ""]
    for group in order if len(order) > 1 else ():
        links = ", ".join(f"{{py:obj}}`{name} <{module}.{name}>`" for name in groups[group])
        title = heading(group, module)
        lines.append(f"- [{title}](#{title.lower().replace(' ', '-')}): {links}")
    lines.append("")
    for group in order:
        if len(order) > 1:
            lines += [f"## {heading(group, module)}", "", "" if group == module else first_paragraph(group), ""]
        lines += ["```{eval-rst}", *(line for name in groups[group] for line in described(module, name)), "```", ""]
    return "\n".join(lines)


def expand(app: Any, page: str, source: list[str]) -> None:
    source[0] = DIRECTIVE.sub(lambda found: expanded(found[1], found[2].split()), source[0])


def resolve(app: Any, env: Any, node: pending_xref, text: nodes.Element) -> nodes.Element | None:
    """Link a public name that is written without its module."""
    if node.get("refdomain") != "py" or node.get("reftype") != "obj":
        return None
    name, _, rest = node["reftarget"].removeprefix("corelm.").partition(".")
    if name not in described_at():
        return None
    target = described_at()[name] + (f".{rest}" if rest else "")
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, text)


def plain_defaults(app: Any, what: str, name: str, value: object, options: Any, given: str, returned: str) -> Any:
    """Write what Sphinx can parse for fields with a factory, and what ``__init__`` takes where a metaclass hides it."""
    if what == "class" and given == "(*args, **kwargs)":
        given = stringify_signature(signature(value.__init__, bound_method=True), unqualified_typehints=True)
        return given.removesuffix(" -> None"), returned
    return (given.replace("=<factory>", "=..."), returned) if given else None


def skip(app: Any, what: str, name: str, value: object, skipped: bool, options: Any) -> bool | None:
    """Leave out what a class has from a library: tensordict adds hundreds of methods to a TensorClass."""
    module = getattr(inspect.unwrap(value) if callable(value) else value, "__module__", None) or "corelm"
    return None if module.startswith("corelm") else True


def mark_shapes(app: Any, what: str, name: str, value: object, options: Any, lines: list[str]) -> None:
    """Make code of ``float32[*batch, time]``, in which reStructuredText would find emphasis."""
    lines[:] = SHAPE.sub(lambda found: found[1] or f"``{found[2]}``", "\n".join(lines)).split("\n")


@cache
def other_homes() -> set[str]:
    """Return the full names under which a public name is not described."""
    every = {f"{module}.{name}" for module in PUBLIC for name in public_names(importlib.import_module(module))}
    return every - set(described_at().values())


def without_source(app: Any, document: nodes.document) -> None:
    """Keep viewcode from such names, as it links back from a file to one module only; and from constants."""
    for described in document.findall(desc):
        for line in described.findall(desc_signature):
            full = f"{line.get('module')}.{line.get('fullname')}"
            if described["objtype"] == "data" or full in other_homes():
                line.attributes.pop("module", None)


def hide_aliases(app: Any, env: Any) -> None:
    """Let Sphinx take the full description of a name where it looks for the name without its module."""
    objects = env.get_domain("py").objects
    for name in other_homes() & set(objects):
        objects[name] = objects[name]._replace(aliased=True)


def setup(app: Any) -> dict[str, bool]:
    app.config.autodoc_mock_imports = MOCKED
    app.connect("source-read", expand)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-signature", plain_defaults)
    app.connect("autodoc-process-docstring", mark_shapes)
    app.connect("doctree-read", without_source, priority=400)
    app.connect("env-updated", hide_aliases)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
