"""`as_html`: a comparison as one page that needs no network and no script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from corelm._version import __version__
from corelm.errors import printable
from corelm_compare.causes import CAUSES
from corelm_compare.records import Cause, Comparison, Experiment, Gap, Side
from corelm_compare.report_plots import against, by_position, divergences, histogram, tails
from corelm_compare.report_style import STYLE
from corelm_compare.report_tokens import scored_rows, worst_tokens
from corelm_compare.report_words import (
    VERDICTS,
    between,
    log_prob,
    number,
    own_gaps,
    pair,
    share,
    summary,
    tolerance,
    worst_own,
    worst_sampled,
)

#: The browser is told to run nothing and to load nothing, whatever a prompt says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
#: Pairs of sides that get their own pictures, and divergences that are listed.
_PAIRS, _LISTED = 6, 12
#: Characters of the text before a divergence.
_AFTER = 60


def write_report(comparison: Comparison, path: str | PathLike[str]) -> None:
    """Write the page to a file.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(as_html(comparison), encoding="utf-8")


def as_html(comparison: Comparison) -> str:
    """Return the page: verdict, causes, gaps, pictures, scored rows, what was tried, and the sides.

    All texts of prompts, tokens, engines and files are escaped.
    """
    title = _text(comparison.headline)
    body = "".join(
        part
        for section in (_top, _causes, _gaps, _pictures, _divergences, _tried, _sides, _words)
        for part in section(comparison)
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body>{body}</body></html>\n"
    )


def _top(comparison: Comparison) -> Iterator[str]:
    yield f'<header><span class="verdict {comparison.verdict}">{VERDICTS[comparison.verdict]}</span>'
    yield f"<h1>{_text(comparison.headline)}</h1>"
    if line := summary(comparison):
        yield f"<p>{_text(line)}.</p>"
    oracle = "no plain forward" if comparison.oracle is None else f"plain float32 forward of {comparison.oracle}"
    facts = (
        " against ".join(f"{side.name} ({side.model})" for side in comparison.sides),
        oracle,
        f"seed {comparison.seed}",
        f"{comparison.calls} calls in {comparison.seconds:.3g} s",
        f"corelm {__version__}",
    )
    yield f"<p class=soft>{_text(' · '.join(facts))}</p></header>\n"


def _causes(comparison: Comparison) -> Iterator[str]:
    if comparison.causes:
        yield f"<h2>Cause{'s' * (len(comparison.causes) > 1)}, and what to do</h2>\n"
    for cause in comparison.causes:
        calm = " calm" if comparison.verdict == "rounding" else ""
        yield _cause(cause, calm, [each for each in comparison.experiments if each.id == cause.id and each.explains])
    if comparison.verdict == "unexplained":
        yield "<h2>No cause was found for all of the difference</h2>\n"
        yield "<p>Everything that was tried is below, with numbers.</p>"
    for note in comparison.notes:
        yield f"<p class=soft>Note: {_text(note)}.</p>"


def _cause(cause: Cause, look: str, experiments: list[Experiment]) -> str:
    side = "" if cause.side is None else f" in {_text(cause.side)}"
    meaning = CAUSES.get(cause.id)
    meant = "" if meaning is None else f"<p><b>{meaning[:1].upper()}{_text(meaning[1:])}.</b></p>"
    shown = "".join(
        f"<p class=soft>{_text(each.changed)}: mean |Δ| {number(each.before)} → {number(each.after)} nats, "
        f"over {each.tokens:,} tokens{_text(f'; {each.note}' if each.note else '')}</p>"
        for each in experiments
        if each.side == cause.side
    )
    return (
        f'<section class="cause{look}">'
        f"<h3><code>{_text(cause.id)}</code>{side} <small>{cause.confidence}</small></h3>"
        f"{meant}<p>{_text(cause.evidence)}.</p><p class=advice>{_text(cause.advice)}</p>{shown}</section>\n"
    )


def _gaps(comparison: Comparison) -> Iterator[str]:
    heads = ("mean |Δ|", "outside", "largest", "p99", "mean Δ", "median", "p90", "p99.9", "k3", "tokens")
    head = "<div class=wide><table class=numbers><tr><th class=words>Δ in nats</th>"
    head += "".join(f"<th>{name}</th>" for name in heads) + "</tr>\n"
    yield f"<h2>How far apart</h2>\n{head}"
    for gap in comparison.gaps:
        yield _gap(gap, pair(gap), "over" if gap.mean_abs > tolerance(comparison, gap) else "")
    for side in comparison.sides:
        for found in (worst_own(comparison, side.name), worst_sampled(comparison, side.name)):
            if found is not None:
                yield _gap(found, found.other, _over_itself(comparison, found, side.name), own=True)
    yield "</table></div>\n"
    noise = ", ".join(f"{name} {number(value)}" for name, value in comparison.tolerances.items())
    yield (
        f"<p class=soft>A mean |Δ| counts as noise up to: {_text(noise)} nats. Larger ones are coloured. Pale lines "
        "are each side's largest distances to itself. Outside: the share of ratios exp(Δ) outside [0.9, 1.1].</p>\n"
    )
    if comparison.own:
        yield f"<details><summary>All distances of sides to themselves</summary>{head}"
        for side in comparison.sides:
            for gap in own_gaps(comparison, side.name):
                yield _gap(gap, gap.other, _over_itself(comparison, gap, side.name), own=True)
        yield "</table></div></details>\n"


def _over_itself(comparison: Comparison, gap: Gap, side: str) -> str:
    return "over" if gap.mean_abs > comparison.tolerances.get(side, float("inf")) else ""


def _gap(gap: Gap, name: str, look: str, *, own: bool = False) -> str:
    skipped = f"<br><small>{gap.skipped:,} only on one side</small>" if gap.skipped and not own else ""
    cells = [f'<span class="{look}">{number(gap.mean_abs)}</span>', share(gap.outside), number(gap.max_abs)]
    cells += [number(gap.p99), number(gap.mean, sign=True)]
    cells += [*map(number, (gap.median_abs, gap.p90, gap.p999, gap.k3)), f"{gap.count:,}{skipped}"]
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr{' class=self' if own else ''}><td class=words>{_text(name)}</td>{row}</tr>\n"


def _pictures(comparison: Comparison) -> Iterator[str]:
    pairs = between(comparison.gaps)
    if any(gap.count and not len(gap.delta) for gap in pairs):
        yield "<p>This comparison was saved without the numbers of every token: pictures need to_json(arrays=True).</p>"
        return
    plain = [gap for gap in comparison.gaps if gap.kind == "oracle"]
    # Of more than two sides there are too many pairs for one picture; the plain forward says which side is wrong.
    together = tails(comparison, [*(pairs[:1] if plain else pairs), *plain])
    for place, gap in enumerate(pairs[:_PAIRS]):
        drawn = (histogram(comparison, gap), together, by_position(gap), against(gap))
        figures = "".join([*drawn, divergences(comparison, gap)])
        together = ""  # once, next to the largest gap
        rows = scored_rows(comparison, gap)
        part = f"<div class=figures>{figures}</div>\n<h3>Scored rows</h3>\n{rows}{worst_tokens(gap)}\n"
        title = f"{_text(pair(gap))}, token by token"
        if place == 0:
            yield f"<h2>{title}</h2>\n{part}"
        else:
            yield f"<details><summary>{title}: mean |Δ| {number(gap.mean_abs)} nats</summary>{part}</details>\n"


def _divergences(comparison: Comparison) -> Iterator[str]:
    if not comparison.divergences:
        return
    yield "<h2>First differences</h2>\n<div class=wide><table><tr><th>what</th><th>row</th><th>position</th>"
    yield "<th>sides</th><th>there</th><th>after</th></tr>\n"
    words = {"ids": "ids of the prompt", "answer": "greedy answer", "numbers": "log-prob"}
    # Those of ids and answers first: they are few, and explain the others.
    ranked = sorted(comparison.divergences, key=lambda each: each.what == "numbers")
    for each in ranked[:_LISTED]:
        there = " / ".join(_there(value) for value in (each.first, each.second))
        yield (
            f"<tr><td>{words[each.what]}</td><td>{each.row}</td><td>{each.position}</td>"
            f"<td>{_text(each.one)} / {_text(each.other)}</td><td>{there}</td>"
            f"<td class=token>{_text(each.text[-_AFTER:])}</td></tr>\n"
        )
    yield "</table></div>\n"
    if len(ranked) > _LISTED:
        yield f"<p class=soft>… and {len(ranked) - _LISTED} more.</p>\n"


def _there(value: float | int | None) -> str:
    if value is None:
        return "ended"
    return str(value) if isinstance(value, int) else log_prob(value)


def _tried(comparison: Comparison) -> Iterator[str]:
    yield "<h2>What was tried</h2>\n"
    if comparison.ruled_out:
        yield f"<p>Ruled out: {_ids(comparison.ruled_out)}</p>"
    for name, reason in comparison.not_tried.items():
        yield f"<p class=soft>Not tried: <code>{_text(name)}</code>, {_text(reason)}.</p>"
    if not comparison.experiments:
        return
    yield f"<details><summary>All {len(comparison.experiments)} experiments</summary><div class=wide>"
    yield "<table class=numbers><tr><th class=words>changed</th><th class=words>side</th><th>before</th><th>after</th>"
    yield "<th>tokens</th><th class=words>explains it</th></tr>\n"
    for each in comparison.experiments:
        note = f"<br><small>{_text(each.note)}</small>" if each.note else ""
        yield (
            f"<tr><td class=words><code>{_text(each.id)}</code> {_text(each.changed)}{note}</td>"
            f"<td class=words>{_text(each.side)}</td><td>{number(each.before)}</td><td>{number(each.after)}</td>"
            f"<td>{each.tokens:,}</td><td class=words>{'yes' if each.explains else 'no'}</td></tr>\n"
        )
    yield "</table></div></details>\n"


def _sides(comparison: Comparison) -> Iterator[str]:
    yield "<h2>Sides</h2>\n"
    for side in comparison.sides:
        yield f"<h3>{_text(side.name)}</h3><dl>{_side(side)}</dl>\n"


def _side(side: Side) -> str:
    facts: Mapping[str, Any] = {
        "backend": side.backend,
        "model": side.model,
        "options": ", ".join(f"{name}={value}" for name, value in side.options.items()) or "none",
        "software": side.software or "not known",
        "dtype of logits": side.dtype or "not known",
        "can": ", ".join(side.abilities),
        "scores": ", ".join(f"{name} {value}" for name, value in side.provenance.items()),
        "asked": f"{side.calls} calls with {side.tokens:,} tokens in {side.seconds:.3g} s",
    }
    return "".join(f"<dt>{name}</dt><dd>{_text(str(value))}</dd>" for name, value in facts.items())


def _words(comparison: Comparison) -> Iterator[str]:
    yield (
        "<details><summary>What the words mean</summary><dl>"
        "<dt>Δ</dt><dd>the log-prob that the second side gives a token less that of the first, in nats; the ratio is "
        "exp(Δ)</dd>"
        "<dt>outside</dt><dd>the share of tokens whose ratio is outside [0.9, 1.1], where PPO and GRPO begin to clip"
        "</dd>"
        "<dt>k3</dt><dd>the mean of exp(Δ) − 1 − Δ: an estimate of the KL divergence if the first side sampled the "
        "tokens</dd>"
        "<dt>itself</dt><dd>the same engine asked twice, alone and in company, in another order, from the answer "
        "on, and what it said when it sampled: differences between sides mean something only beyond these</dd>"
        "<dt>plain forward</dt><dd>the model in float32 in transformers, one row at a time, without an engine</dd>"
        "</dl></details>\n"
    )


def _ids(names: tuple[str, ...]) -> str:
    shown = (f'<code title="{_text(CAUSES.get(name, name))}">{_text(name)}</code>' for name in names)
    return f"<span class=ids>{' '.join(shown)}</span>"


def _text(text: str) -> str:
    """Return a text as HTML, with escape sequences for what is not printable."""
    return escape(printable(text))
