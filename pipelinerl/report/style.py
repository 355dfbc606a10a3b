"""The page's style sheet: figures in a grid that folds to one column on a phone, light and dark by the reader's choice."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --card: #f6f7f9; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0; --grid: #e6e9ed; --lane: #eef0f3;
  --engine: #2467b3; --score: #1f8555; --train: #7d3fb2; --train-dark: #4b1d78; --warm: #b86e00; --swap: #cf2b2b; --wait: #c3cad3;
  --good: #1a7f47; --bad: #c62828;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --card: #1d2126; --ink: #e6e9ed; --soft: #9aa5b1; --line: #39414b; --grid: #2a3038; --lane: #20252b;
    --engine: #63a6ee; --score: #52c18c; --train: #bf8cf0; --train-dark: #8a4fce; --warm: #eaa23c; --swap: #ff6b63; --wait: #4a5460;
    --good: #5bd08f; --bad: #ff7b72;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1120px; padding: 28px 24px 64px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: break-word;
}
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .9rem; padding-top: .7rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.4rem 0 .5rem; }
p { margin: .5rem 0; max-width: 76ch; }
.full { max-width: none; }
.meta, .note, .missing { color: var(--soft); }
.failure { white-space: pre-line; }
.missing { font-style: italic; }
.warning { border-left: 4px solid var(--bad); padding: .3rem .8rem; background: var(--card); }
nav { margin-top: .9rem; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .9rem; }
a { color: var(--engine); text-decoration: none; }
a:hover { text-decoration: underline; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 12px; margin: 0; }
.cards > div { background: var(--card); border-radius: 10px; padding: 12px 14px; }
.cards dt { color: var(--soft); font-size: .82rem; }
.cards dd { margin: 0; }
.cards .value { font-size: 1.14rem; font-weight: 620; line-height: 1.4; letter-spacing: -.02em; }
.cards .note { font-size: .82rem; line-height: 1.35; }
.good { color: var(--good); } .bad { color: var(--bad); }
.verdict { font-size: 1.08rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 22px 28px; }
.small { grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); }
figure { margin: 0; min-width: 0; }
.stack > figure + figure { margin-top: 1.2rem; }
figcaption { display: flex; flex-wrap: wrap; gap: 0 .7rem; align-items: baseline; font-size: .92rem; }
figcaption .note { font-size: .84rem; }
.legend { display: flex; flex-wrap: wrap; gap: .05rem 1rem; font-size: .82rem; color: var(--soft); }
.keys { white-space: nowrap; }
.key {
  display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: .35rem; vertical-align: -1px;
  background: currentColor;
}
svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; }
.wide svg { min-width: 760px; }
.narrow { display: none; }
svg text { font-size: 12px; fill: var(--ink); }
svg .tick { font-size: 11.5px; fill: var(--soft); }
svg .label { font-size: 11.5px; fill: var(--soft); }
svg .tiny { font-size: 9.5px; fill: currentColor; }
svg text[class*="c-"] { fill: currentColor; }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
.grid { stroke: var(--grid); } .axis { stroke: var(--line); } .lane { fill: var(--lane); }
.line { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; }
.faint { opacity: .38; } .line.faint { stroke-width: 1.2; }
.dot { fill: currentColor; fill-opacity: .78; }
.rule { stroke: currentColor; stroke-width: 1.2; stroke-dasharray: 5 4; }
.area { fill: currentColor; }
.swap { stroke: currentColor; stroke-width: 1.6; }
.halo { stroke: var(--paper); stroke-width: 4; }
.mark { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
.frame { fill: none; stroke: var(--ink); stroke-width: 1.6; }
.c-engine { color: var(--engine); } .c-score { color: var(--score); } .c-train { color: var(--train); }
.c-train-dark { color: var(--train-dark); } .c-warm { color: var(--warm); } .c-swap { color: var(--swap); } .c-wait { color: var(--wait); }
.scroll { overflow-x: auto; margin-top: .9rem; }
table { border-collapse: collapse; font-size: .88rem; width: 100%; }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; padding-right: .4rem; }
td.bar { width: 30%; min-width: 90px; vertical-align: middle; }
meter { width: 100%; height: 11px; border: 0; border-radius: 3px; background: var(--lane); display: block; }
meter::-webkit-meter-bar { background: var(--lane); border: 0; border-radius: 3px; height: 11px; }
meter::-webkit-meter-optimum-value { background: var(--engine); border-radius: 3px; }
meter::-moz-meter-bar { background: var(--engine); border-radius: 3px; }
details { margin-top: .6rem; }
summary { cursor: pointer; color: var(--engine); }
code { font: .86em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media (max-width: 560px) {
  body { padding: 18px 14px 48px; }
  .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .cards .value { font-size: 1.15rem; }
  .plot text, .plot .tick, .plot .label { font-size: 14.5px; }
  .small .plot text, .small .plot .tick, .small .plot .label { font-size: 12px; }
  .narrow .plot text, .narrow .plot .tick, .narrow .plot .label { font-size: 12px; }
  .narrow .plot .tiny { font-size: 9.5px; }
  .wide { display: none; } .narrow { display: block; }
  table { font-size: .8rem; } th, td { padding-right: .45rem; }
  td.arithmetic { min-width: 6.5rem; overflow-wrap: anywhere; } td.name { min-width: 5.5rem; overflow-wrap: anywhere; }
}
@media print { nav { display: none; } figure, .cards > div { break-inside: avoid; } }
"""
