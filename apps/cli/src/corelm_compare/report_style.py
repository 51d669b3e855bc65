"""The style of the report. Colours are those of Okabe and Ito, which people who see few colours tell apart as well."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fff; --text: #1c2024; --soft: #5b636b; --line: #d5dae0; --panel: #f5f7f9;
  --s0: #0072b2; --s1: #c04f00; --s2: #00795a; --s3: #a3457f; --s4: #7a5f00; --s5: #3f4b57;
  --own1: #4a525a; --own2: #8a5a00; --good: #00795a; --bad: #c04f00; --warn: #7a5f00;
  --up: 0, 114, 178; --down: 213, 94, 0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --text: #e4e7ea; --soft: #a0a8b0; --line: #363c43; --panel: #1d2125;
    --s0: #56b4e9; --s1: #f08c3a; --s2: #35c79b; --s3: #e39ac4; --s4: #e0c64a; --s5: #b5bec7;
    --own1: #c3cad1; --own2: #d9a648; --good: #35c79b; --bad: #f08c3a; --warn: #e0c64a;
    --up: 86, 180, 233; --down: 240, 120, 40;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .4rem 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; } h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
h4 { font-size: .9rem; margin: 0 0 .3rem; }
p { margin: .4rem 0; max-width: 52rem; } small, .soft { color: var(--soft); }
code { font: .92em ui-monospace, monospace; }
.verdict { display: inline-block; border-radius: .3rem; padding: .1rem .6rem; font-weight: 600; color: var(--page);
  background: var(--bad); }
.agree, .rounding { background: var(--good); } .unexplained { background: var(--warn); }
.cause { border-left: 4px solid var(--bad); background: var(--panel); padding: .6rem .9rem; margin: .6rem 0;
  border-radius: 0 .3rem .3rem 0; }
.calm { border-left-color: var(--good); } .calm .advice::before { color: var(--good); }
.cause h3 { margin: 0 0 .2rem; } .cause p { margin: .3rem 0; }
.advice::before { content: "→ "; color: var(--bad); font-weight: 700; }
.wide { overflow-x: auto; margin: .4rem 0; overflow-wrap: normal; }
table { border-collapse: collapse; } caption { text-align: left; color: var(--soft); padding-bottom: .2rem; }
th, td { text-align: left; vertical-align: top; padding: .22rem .6rem .22rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; }
.numbers td:not(.words, .token), .numbers th:not(.words) { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.numbers td.words { min-width: 11rem; } .numbers .over { color: var(--bad); font-weight: 600; }
.self td { color: var(--soft); }
.token, .scored { font-family: ui-monospace, monospace; white-space: pre-wrap; }
td.token { white-space: pre; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1.2rem; }
figure { margin: 0; background: var(--panel); border-radius: .4rem; padding: .8rem; break-inside: avoid; }
figcaption { color: var(--soft); font-size: .85rem; line-height: 1.4; margin-top: .4rem; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); } svg .title { fill: var(--text); }
svg text { paint-order: stroke; stroke: var(--panel); stroke-width: 3px; stroke-linejoin: round; }
.axis, .tick { stroke: var(--soft); fill: none; } .grid { stroke: var(--line); fill: none; }
.rule { stroke: var(--soft); stroke-dasharray: 2 3; fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.s0 { stroke-width: 3; }
.line.s0 { stroke: var(--s0); } .line.s1 { stroke: var(--s1); stroke-dasharray: 9 3; }
.line.s2 { stroke: var(--s2); stroke-dasharray: 12 3 3 3; } .line.s3 { stroke: var(--s3); stroke-dasharray: 5 2; }
.line.s4 { stroke: var(--s4); stroke-dasharray: 14 4; } .line.s5 { stroke: var(--s5); stroke-dasharray: 3 2; }
.line.own1 { stroke: var(--own1); stroke-dasharray: 2 2; } .line.own2 { stroke: var(--own2); stroke-dasharray: 6 3; }
.line.own3 { stroke: var(--s2); stroke-dasharray: 1 3; } .line.own4 { stroke: var(--s3); stroke-dasharray: 4 4; }
.line.own5 { stroke: var(--s4); stroke-dasharray: 2 4; } .line.own6 { stroke: var(--s5); stroke-dasharray: 5 5; }
.area { fill: var(--s0); fill-opacity: .35; stroke: var(--s0); stroke-width: 1; }
.band { fill: var(--s0); fill-opacity: .16; } .line.band0 { stroke: var(--s0); stroke-opacity: .3; stroke-width: 9; }
.cloud { fill: var(--s0); } .crowd0 { fill-opacity: .45; } .crowd1 { fill-opacity: .65; }
.crowd2 { fill-opacity: .85; } .crowd3 { fill-opacity: 1; }
rect.row { fill: var(--line); } rect.prompt { fill: var(--soft); fill-opacity: .6; } rect.mark { fill: var(--bad); }
.line.row0 { stroke: var(--line); stroke-width: 9; } .line.mark0 { stroke: var(--bad); stroke-width: 9; }
.line.prompt0 { stroke: var(--soft); stroke-opacity: .6; stroke-width: 9; }
.key { list-style: none; margin: .3rem 0 0; padding: 0; font-size: .85rem; line-height: 1.35; }
.key li { display: flex; gap: .5rem; align-items: center; } .swatch { width: 24px; height: 10px; flex: none; }
.scored { line-height: 1.75; max-width: none; margin: .5rem 0 1rem; }
.scored span, .shades span, td.token { unicode-bidi: isolate; }
.scored span, .shades span { border-radius: .15rem; padding: 0 1px; } .scored .prompt { color: var(--soft); }
.shades { max-width: none; font-size: .88rem; color: var(--soft); }
.shades span { padding: .05rem .35rem; color: var(--text); white-space: nowrap; }
.up1 { background: rgba(var(--up), .14); } .up2 { background: rgba(var(--up), .3); }
.up3 { background: rgba(var(--up), .48); } .up4 { background: rgba(var(--up), .68); }
.down1 { background: rgba(var(--down), .14); } .down2 { background: rgba(var(--down), .3); }
.down3 { background: rgba(var(--down), .48); } .down4 { background: rgba(var(--down), .68); }
.scored .up3, .scored .up4, .scored .down3, .scored .down4 { color: var(--text); }
.down1, .down2, .down3, .down4 { text-decoration: underline dotted; text-underline-offset: .2em; }
summary { cursor: pointer; font-weight: 500; margin: .3rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem .9rem; margin: .4rem 0; }
dt { color: var(--soft); } dd { margin: 0; }
.ids code { background: var(--panel); border-radius: .25rem; padding: .05rem .35rem; margin-right: .3rem; }
@media (max-width: 30rem) {
  body { padding: .7rem; } dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .4rem; }
}
@media print {
  :root { --page: #fff; --text: #000; --soft: #444; --line: #bbb; --panel: #fff; --s0: #0072b2; --s1: #c04f00;
    --bad: #c04f00; --good: #00795a; --up: 0, 114, 178; --down: 213, 94, 0; --own1: #4a525a; --own2: #8a5a00; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { max-width: none; font-size: 11px; } .figures { grid-template-columns: 1fr 1fr; } .wide { overflow: visible; }
  .cause, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
}
"""
