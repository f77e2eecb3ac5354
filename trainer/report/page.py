"""The HTML page of a report: skeleton, style sheet and script.

The page loads nothing. The script only adds the read-out of values and the config
filter; everything else works without it.
"""

from html import escape

STYLE = """
:root{color-scheme:light dark;--paper:#fbfaf7;--card:#fff;--ink:#1f2328;--soft:#69707a;
--rule:#e4e1d9;--grid:#efece5;--main:#1c6e6a;--raw:#9cc5c1;--eval:#b4531f;
--mark:#fdf3dc;--bad:#b42318}
@media (prefers-color-scheme:dark){:root{--paper:#14171a;--card:#1b1f23;--ink:#e5e3de;
--soft:#9aa1a9;--rule:#2c3237;--grid:#252a2f;--main:#62c4b8;--raw:#2f6661;
--eval:#f0a26b;--mark:#302a1b;--bad:#ff8a7a}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.55 system-ui,
-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:70rem;margin:0 auto;padding:3rem 1.5rem 4rem}
h1,h2{font-family:"Iowan Old Style","Palatino Linotype",Palatino,Georgia,serif;
font-weight:600;letter-spacing:-.01em;line-height:1.2}
h1{font-size:2.3rem;margin:.1rem 0 .4rem;overflow-wrap:anywhere}
h2{font-size:1.4rem;margin:3.2rem 0 1rem;padding-top:1.1rem;
border-top:1px solid var(--rule)}
h3{font-size:.95rem;font-weight:600;margin:0}
h3.table{margin:1.6rem 0 .5rem}
p{margin:.3rem 0}
.kicker{color:var(--soft);font-size:.75rem;letter-spacing:.09em;
text-transform:uppercase;margin:0}
.state{color:var(--soft)}
.state b{color:var(--main);font-weight:600}
.warning{color:var(--bad)}
.absent{color:var(--soft);font-style:italic}
.figures{display:flex;flex-wrap:wrap;gap:1px;margin:2rem 0 0;
background:var(--rule);border:1px solid var(--rule);
border-radius:10px;overflow:hidden}
.figures div{flex:1 1 9.5rem;background:var(--card);padding:1rem 1.2rem}
.figures dt{color:var(--soft);font-size:.8rem}
.figures dd{margin:0;font-size:1.65rem;font-weight:600;letter-spacing:-.02em;
line-height:1.3}
.figures dd small{display:block;font-size:.78rem;font-weight:400;color:var(--soft);
letter-spacing:0}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:1.2rem}
.chart{margin:0;padding:1rem 1.2rem .8rem;background:var(--card);
border:1px solid var(--rule);border-radius:10px;break-inside:avoid;min-width:0}
.chart.wide{grid-column:1/-1}
figcaption{display:flex;justify-content:space-between;align-items:baseline;gap:1rem}
.switch{color:var(--soft);font-size:.8rem;white-space:nowrap;cursor:pointer}
.switch input{accent-color:var(--main);vertical-align:-2px;margin:0 .25rem 0 0}
.legend{list-style:none;margin:.25rem 0 .8rem;padding:0;display:flex;flex-wrap:wrap;
gap:.1rem 1.2rem;color:var(--soft);font-size:.8rem}
.legend b{color:var(--ink);font-weight:600}
.legend .at{margin-left:auto}
.swatch{display:inline-block;width:14px;height:3px;border-radius:2px;
margin-right:.4rem;vertical-align:middle;background:var(--main)}
.swatch.raw{background:var(--raw)}
.swatch.dots{background:var(--eval)}
.pane{display:grid;grid-template-columns:3.1rem minmax(0,1fr);
grid-template-rows:11rem 1.5rem}
.wide .pane{grid-template-rows:19rem 1.5rem}
.pane.log{display:none}
.chart:has(.log-switch:checked) .pane.linear{display:none}
.chart:has(.log-switch:checked) .pane.log{display:grid}
.y,.x,.plot{position:relative}
.y span,.x span{position:absolute;color:var(--soft);font-size:.72rem;line-height:1;
white-space:nowrap}
.y span{right:.6rem;transform:translateY(-50%)}
.x{grid-column:2}
.x span{top:.5rem;transform:translateX(-50%)}
.plot{cursor:crosshair;touch-action:pan-y;border-bottom:1px solid var(--rule);
outline-offset:3px}
.plot svg{display:block;width:100%;height:100%;overflow:visible;pointer-events:none}
svg path,svg line{fill:none;vector-effect:non-scaling-stroke;stroke-linecap:round;
stroke-linejoin:round}
svg .grid{stroke:var(--grid);stroke-width:1}
svg .curve{stroke:var(--main);stroke-width:1.8}
svg .curve.raw{stroke:var(--raw);stroke-width:1}
svg .curve.dots{stroke:var(--eval);stroke-width:1.6}
svg .points{stroke:var(--eval);stroke-width:6}
svg .gap{stroke:var(--bad);stroke-width:1;stroke-dasharray:3 4}
.guide{position:absolute;top:0;bottom:0;width:0;border-left:1px solid var(--soft);
opacity:.7;display:none;pointer-events:none}
.frame{border:1px solid var(--rule);border-radius:10px;background:var(--card);
overflow:hidden}
table{border-collapse:collapse;width:100%;font-size:.83rem}
th,td{text-align:left;padding:.38rem .9rem;border-bottom:1px solid var(--grid);
vertical-align:top}
tr:last-child>*{border-bottom:0}
thead th{color:var(--soft);font-weight:500;border-bottom:1px solid var(--rule)}
tbody th{font-weight:400;overflow-wrap:anywhere}
td.number,th.number{text-align:right;white-space:nowrap}
code,pre{font:.92em/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
td code{overflow-wrap:anywhere}
tr.changed>*{background:var(--mark)}
tr.changed th code{font-weight:600}
.config:has(.changed-switch:checked) tr.changed>*{background:none}
.config:has(.changed-switch:checked) tr.changed th code{font-weight:400}
.note+.frame{margin-top:.8rem}
.tools{display:flex;flex-wrap:wrap;gap:.6rem 1.2rem;align-items:center;
margin-bottom:.7rem}
.tools input[type=search]{font:inherit;font-size:.85rem;color:inherit;
background:var(--card);border:1px solid var(--rule);border-radius:7px;
padding:.35rem .7rem;width:min(20rem,100%)}
.config:has(.changed-switch:checked) tbody tr:not(.changed){display:none}
tr[hidden]{display:none!important}
.confusion{width:auto}
.confusion caption{text-align:left;padding:.5rem .9rem;color:var(--soft)}
.confusion th,.confusion td{text-align:right;padding:.3rem .6rem;overflow-wrap:normal}
.confusion td{--hue:var(--main);background:color-mix(in srgb,var(--hue)
calc(var(--share)*45%),transparent)}
.confusion td.wrong{--hue:var(--bad);background:color-mix(in srgb,var(--hue)
min(calc(var(--share)*400%),60%),transparent)}
.frame:has(.confusion){overflow-x:auto}
.mistakes{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fill,minmax(7rem,1fr))}
.mistakes figure{margin:0}
.mistakes img{width:100%;image-rendering:pixelated;border-radius:6px}
.mistakes figcaption{color:var(--soft);font-size:.78rem}
.schedule{overflow-x:auto;margin:1.2rem 0}
.schedule svg{display:block;max-width:max(100%,46rem);height:auto}
.schedule pre{white-space:pre}
.timeline svg{width:100%}
.timeline text{font-size:12px;fill:var(--soft)}
.timeline .up{fill:var(--main)}
.timeline .down{fill:var(--grid)}
.timeline .commit{stroke:var(--main)}
.timeline .back{stroke:var(--bad);stroke-dasharray:2 2}
.timeline .death,.timeline .stall{stroke:var(--bad);stroke-width:2}
.timeline .resize{fill:var(--eval)}
.bars{list-style:none;margin:.5rem 0 0;padding:.6rem 1.2rem;background:var(--card);
border:1px solid var(--rule);border-radius:10px;font-size:.83rem;break-inside:avoid}
.bars li{display:grid;grid-template-columns:minmax(0,22rem) 8.5rem minmax(0,1fr);
gap:.2rem 1rem;align-items:center;padding:.22rem 0}
.bars small{color:var(--soft)}
.bars b{font-weight:500;text-align:right;white-space:nowrap}
.bars i{display:block;height:.7rem;background:var(--grid);border-radius:3px;
overflow:hidden}
.bars u{display:block;height:100%;min-width:1px;background:var(--main)}
.bars .over u{background:var(--bad)}
.note{margin:.8rem 0 0;color:var(--soft);font-size:.85rem}
details{margin-top:.8rem}
details>.frame{margin-top:1rem}
summary{cursor:pointer;color:var(--soft);font-size:.9rem}
pre{margin:.6rem 0 0;padding:1.1rem 1.3rem;background:var(--card);
border:1px solid var(--rule);border-radius:10px;overflow:auto;max-height:30rem;
white-space:pre-wrap;overflow-wrap:anywhere;font-size:.83rem}
footer{margin-top:3rem;color:var(--soft);font-size:.8rem}
@media (max-width:46rem){main{padding:1.8rem 1rem 3rem}h1{font-size:1.8rem}
.charts{grid-template-columns:minmax(0,1fr)}.wide .pane{grid-template-rows:14rem 1.5rem}
.chart{padding:.9rem .9rem .7rem}
.figures div{padding:.8rem .9rem}.figures dd{font-size:1.35rem}
th,td{padding:.38rem .6rem}
.stacked,.stacked tbody,.stacked tr,.stacked tbody>tr>*{display:block}
.stacked thead{display:none}
.stacked tr{padding:.4rem .3rem;border-bottom:1px solid var(--rule)}
.stacked tr:last-child{border-bottom:0}
.stacked tbody>tr>*{border:0;padding:.1rem .6rem;text-align:left;white-space:normal}
.stacked tbody th:empty,.stacked td:empty{display:none}
.stacked tbody th{font-weight:600}
.stacked td::before{content:attr(data-name) ": ";color:var(--soft)}
.bars li{grid-template-columns:minmax(0,1fr) auto}.bars i{grid-column:1/-1}}
@media print{:root{--paper:#fff;--card:#fff;--ink:#1f2328;--soft:#555;--rule:#ddd;
--grid:#eee;--main:#1c6e6a;--raw:#9cc5c1;--eval:#b4531f;--mark:#fdf3dc}
main{max-width:none;padding:0}.switch,.tools{display:none}
.swatch,tr.changed>*,.bars i,.bars u{print-color-adjust:exact}
pre{max-height:none;overflow:visible}}
"""

SCRIPT = """
"use strict";
(() => {
  const format = (v) => {
    if (v === null) return "not finite";
    const size = Math.abs(v);
    if (size === 0) return "0";
    const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    for (const [scale, unit] of units)
      if (size >= scale) return Number((v / scale).toPrecision(4)) + " " + unit;
    if (size < 1e-3) return v.toExponential(3).replace(/\\.?0*e/, "e");
    return String(Number(v.toPrecision(4)));
  };
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle; else high = middle;
    }
    return step - steps[low] < steps[high] - step ? low : high;
  };
  for (const chart of document.querySelectorAll(".chart")) {
    const data = JSON.parse(chart.querySelector("script").textContent);
    const steps = data.curves[0].steps;
    const values = chart.querySelectorAll(".value");
    const at = chart.querySelector(".step");
    const guides = chart.querySelectorAll(".guide");
    const before = [...values, at].map((e) => e.textContent);
    let index = steps.length - 1;
    const show = () => {
      at.textContent = steps[index];
      data.curves.forEach((curve, i) => {
        const point = nearest(curve.steps, steps[index]);
        values[i].textContent = format(curve.values[point]);
      });
      for (const guide of guides) {
        guide.style.display = "block";
        guide.style.left = (100 * steps[index]) / Math.max(data.last, 1) + "%";
      }
    };
    const hide = () => {
      [...values, at].forEach((e, i) => { e.textContent = before[i]; });
      for (const guide of guides) guide.style.display = "none";
    };
    for (const plot of chart.querySelectorAll(".plot")) {
      plot.addEventListener("pointermove", (event) => {
        const box = plot.getBoundingClientRect();
        index = nearest(steps, ((event.clientX - box.left) / box.width) * data.last);
        show();
      });
      plot.addEventListener("pointerleave", hide);
      plot.addEventListener("blur", hide);
      plot.addEventListener("keydown", (event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!move) return;
        const far = event.shiftKey ? 25 : 1;
        index = Math.min(Math.max(index + move * far, 0), steps.length - 1);
        event.preventDefault();
        show();
      });
    }
  }
  const filter = document.querySelector("#config-filter");
  if (filter) {
    const rows = document.querySelectorAll(".config tbody tr");
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\\s+/);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
  }
})();
"""

# Forbids the page to load anything, whatever text of the run it contains.
_POLICY = (
    "default-src 'none'; img-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)


def page(title: str, body: str) -> str:
    """Returns the complete HTML file; `body` is HTML, `title` is text."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""
