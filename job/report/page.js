
(function () {
  "use strict";
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const tip = document.getElementById("tip");
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const left = Math.min(x + 12, document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = Math.max(4, left) + window.scrollX + "px";
    tip.style.top = y + 14 + window.scrollY + "px";
  };
  const hide = () => { tip.hidden = true; };
  const over = e => {
    const of = e.target.closest && e.target.closest("[data-tip]");
    if (!of) return;
    const box = of.getBoundingClientRect();
    show(of.dataset.tip, e.clientX || box.left, e.clientY || box.bottom);
  };
  for (const kind of ["mousemove", "focusin", "touchstart"]) document.addEventListener(kind, over, { passive: true });
  document.addEventListener("mouseout", e => { if (e.target.closest && e.target.closest("[data-tip]")) hide(); });
  document.addEventListener("focusout", hide);

  // Four significant digits; a unit prefix where a number is large.
  const number = v => {
    if (v == null) return "–";
    const a = Math.abs(v);
    if (a >= 1e9) return (v / 1e9).toPrecision(4) + "G";
    if (a >= 1e6) return (v / 1e6).toPrecision(4) + "M";
    if (a >= 1e4) return (v / 1e3).toPrecision(4) + "k";
    if (a !== 0 && a < 1e-3) return v.toExponential(2);
    return String(+v.toPrecision(4));
  };
  const place = document.getElementById("charts");
  if (!place || !charts.length) return;
  const plots = [];
  const sync = uPlot.sync("steps");
  const colours = ["--c0", "--c2"];
  for (const c of charts) {
    const card = place.appendChild(document.createElement("div"));
    card.className = "chart";
    const head = card.appendChild(document.createElement("h3"));
    head.append(c.title + " ");
    head.appendChild(document.createElement("small")).textContent = c.unit;
    if (c.series.length > 1) c.series.forEach((s, i) => {
      const mark = head.appendChild(document.createElement("u"));
      mark.className = "c" + colours[i].slice(3);
      head.appendChild(document.createElement("small")).textContent = s.name;
    });
    const one = c.series.every(s => s.x.length < 2);
    const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { stroke: () => css("--grid"), width: 1 } };
    const plot = new uPlot({
      width: card.clientWidth - 14, height: 230, legend: { show: false }, padding: [8, 14, 0, 0],
      cursor: { sync: { key: "steps", setSeries: false }, points: { size: 7 } },
      scales: { x: { time: false, range: one ? (u, a, b) => [a - 1, b + 1] : undefined }, y: { distr: c.log ? 3 : 1 } },
      axes: [Object.assign({ space: 60, size: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7] }, axis),
        Object.assign({ size: 62, values: (u, all) => all.map(v => v == null ? "" : number(v)) }, axis)],
      series: [{}].concat(c.series.map((s, i) => ({
        label: s.name, width: 1.6, stroke: () => css(colours[i]),
        points: { show: s.dots || s.x.length < 40 || one ? true : undefined, size: s.dots ? 8 : 5, fill: () => css(colours[i]) },
        dash: s.dots ? [4, 4] : undefined, spanGaps: s.dots,
      }))),
      hooks: { setCursor: [u => {
        const i = u.cursor.idx;
        if (u.cursor.event == null || i == null || u.cursor.left < 0) return;
        const lines = ["step " + u.data[0][i]];
        c.series.forEach((s, k) => { const v = u.data[k + 1][i]; if (v !== undefined) lines.push(s.name + ": " + (v === null ? "no number" : number(v))); });
        const box = u.over.getBoundingClientRect();
        show(lines.join("\n"), box.left + u.cursor.left, box.top + u.cursor.top);
      }] },
    }, uPlot.join(c.series.map(s => [s.x, s.y])), card);
    sync.sub(plot);
    plot.over.addEventListener("mouseleave", hide);
    plots.push([plot, card]);
  }
  const fit = () => { for (const [p, card] of plots) p.setSize({ width: card.clientWidth - 14, height: 230 }); };
  new ResizeObserver(fit).observe(place);
  const redraw = () => { for (const [p] of plots) p.redraw(false, true); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Paper is light.
  addEventListener("beforeprint", () => { document.documentElement.classList.add("print"); redraw(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("print"); redraw(); });
})();
