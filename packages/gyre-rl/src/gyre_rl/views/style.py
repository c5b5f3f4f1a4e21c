"""The report's looks: one style sheet for light and dark.

Invariant: the roles' colours are the same in every chart, blue for ROLLOUT and orange for TRAIN, which the common
colour-vision deficiencies keep apart.
"""

CSS = """
:root{color-scheme:light dark;--bg:#fafaf8;--card:#fff;--ink:#1c1e21;--soft:#686e78;--rule:#e4e4df;--grid:#ecece7;
--c1:#2870c2;--c2:#d9732b;--c3:#3a9264;--c4:#8a5bb8;--c5:#b8bcc4;--bad:#c93c37;--good:#2f8a57;
--rollout:#3b82c9;--train:#e08a3c;--moving:#9aa0aa;--joining:#d5d8dd;--lost:#c93c37}
@media (prefers-color-scheme:dark){:root{--bg:#141518;--card:#1c1e22;--ink:#e7e8ea;--soft:#979da7;--rule:#2d3036;
--grid:#26292e;--c1:#6aa7ea;--c2:#ee9a57;--c3:#6cc394;--c4:#b594dc;--c5:#5a5f69;--bad:#ec6f69;--good:#6cc394;
--rollout:#5b9bdc;--train:#e3944c;--moving:#70757e;--joining:#3a3e45;--lost:#e2615b}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:940px;margin:0 auto;padding:40px 20px 64px}
h1{font-size:27px;line-height:1.2;margin:0;letter-spacing:-.01em}
h2{font-size:16px;margin:0 0 2px}
p{margin:0}
.sub{color:var(--soft);margin-top:4px}
.badge{font-size:12px;font-weight:600;border-radius:20px;padding:2px 10px;vertical-align:4px;margin-left:8px;
border:1px solid currentColor}
.badge.finished{color:var(--good)}.badge.stopped,.badge.cut{color:var(--c2)}.badge.failed{color:var(--bad)}
section{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:18px 20px 14px;margin-top:16px}
section>p{color:var(--soft);font-size:13px;margin-bottom:8px;max-width:75ch}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:1px;background:var(--rule);
border:1px solid var(--rule);border-radius:12px;overflow:hidden;margin-top:22px}
.tile{background:var(--card);padding:13px 14px}
.tile b{display:block;font-size:20px;white-space:nowrap;font-weight:620;letter-spacing:-.01em}
.tile span{color:var(--soft);font-size:12.5px}
.tile small{color:var(--soft);font-size:12px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:16px}.pair section{min-width:0}
@media (max-width:760px){.pair{grid-template-columns:1fr;gap:0}}
svg.chart{display:block;width:100%;height:auto}
svg text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft)}
svg .end{text-anchor:end}svg .mid{text-anchor:middle}svg .lane{fill:var(--ink);font-size:11.5px}
.grid{stroke:var(--grid)}.base{stroke:var(--rule)}.mark{stroke:var(--c5);stroke-width:1;stroke-dasharray:1 3}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.area{opacity:.13;stroke:none}
.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}.line.c4{stroke:var(--c4)}
.line.c5{stroke:var(--c5);stroke-width:1.5}
.area.c1,.fill.c1,.dot.c1,.bg-c1{fill:var(--c1);background:var(--c1)}
.area.c2,.fill.c2,.dot.c2,.bg-c2{fill:var(--c2);background:var(--c2)}
.area.c3,.fill.c3,.dot.c3,.bg-c3{fill:var(--c3);background:var(--c3)}
.area.c4,.fill.c4,.dot.c4,.bg-c4{fill:var(--c4);background:var(--c4)}
.area.c5,.fill.c5,.dot.c5,.bg-c5{fill:var(--c5);background:var(--c5)}
.rollout,.bg-rollout{fill:var(--rollout);background:var(--rollout)}.train,.bg-train{fill:var(--train);background:var(--train)}
.moving,.bg-moving{fill:var(--moving);background:var(--moving)}
.joining,.bg-joining{fill:var(--joining);background:var(--joining)}.lost,.bg-lost{fill:var(--lost);background:var(--lost)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:2px 0 4px;color:var(--soft);font-size:12.5px}
.key i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.key i.dash{height:3px;border-radius:2px;vertical-align:3px}
table{border-collapse:collapse;width:100%;font-size:13px}
.wide{overflow-x:auto;max-height:420px;overflow-y:auto}
th{color:var(--soft);font-weight:500;text-align:left;position:sticky;top:0;background:var(--card)}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--grid);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}td.w{white-space:nowrap}
.bar{background:var(--grid);border-radius:4px;height:9px;min-width:120px;overflow:hidden}
.bar i{display:block;height:100%;background:var(--c1)}
pre{overflow:auto;font-size:12.5px;line-height:1.45;max-height:480px}
summary{cursor:pointer;color:var(--soft)}
footer{color:var(--soft);font-size:12.5px;margin-top:22px}
"""
