
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

  // Digits in groups of three, as in the tables.
  const grouped = text => text.replace(/^-?\d+/, whole => whole.replace(/\B(?=(\d{3})+$)/g, "\u202f"));
  // Four significant digits.
  const number = v => {
    if (v == null) return "–";
    const a = Math.abs(v);
    if (a >= 1e7 || (a !== 0 && a < 1e-4)) return v.toExponential(2);
    return grouped(String(+v.toPrecision(a >= 1000 ? 6 : 4)));
  };
  // One format for all ticks of an axis, with as many decimals as the distance of two ticks has.
  const ticks = (values, step) => {
    let decimals = 0;
    while (decimals < 8 && Math.abs(+step.toFixed(decimals) - step) > 1e-6 * step) decimals++;
    return values.map(v => v == null ? "" : grouped(v.toFixed(decimals)));
  };
  // Ticks of a logarithmic axis: plain numbers from 0.001 to 100000, otherwise powers of ten.
  const logTicks = values => {
    const some = values.filter(v => v != null && v > 0);
    const plain = some.every(v => v >= 1e-3 && v < 1e5);
    return values.map(v => v == null ? "" : plain ? grouped(String(+v.toPrecision(3))) : v.toExponential(0).replace("e+", "e"));
  };
  const container = document.getElementById("charts");
  if (!container || !charts.length) return;
  const plots = [];
  const sync = uPlot.sync("steps");
  const styles = { line: { colour: "--train", alpha: 1, width: 1.8 }, faint: { colour: "--train", alpha: .4, width: 1 }, dots: { colour: "--held", alpha: 1, width: 1.4 } };
  // Curves of eval.set. They differ from the colours of the styles in both themes, and repeat after the last one.
  const sets = ["--c3", "--c4", "--c1", "--c13", "--c14", "--c8", "--c6", "--c15"];
  const colour = s => s.set ? sets[(s.set - 1) % sets.length] : styles[s.style].colour;
  for (const c of charts) {
    const card = container.appendChild(document.createElement("div"));
    card.className = "chart";
    const head = card.appendChild(document.createElement("h3"));
    head.append(c.title);
    if (c.series.length > 1) c.series.forEach(s => {
      const name = head.appendChild(document.createElement("small"));
      const mark = name.appendChild(document.createElement("u"));
      mark.className = s.style;
      mark.style.background = "var(" + colour(s) + ")";
      name.append(s.name);
      head.append(" ");
    });
    const single = c.series.every(s => s.x.length < 2);
    const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { stroke: () => css("--grid"), width: 1 },
      font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 18, labelGap: 2 };
    // A margin keeps the dots of the first and the last step off the frame.
    const margin = (u, a, b) => { const m = single ? 1 : Math.max(.02 * (b - a), .2); return [a - m, b + m]; };
    const plot = new uPlot({
      width: card.clientWidth - 14, height: 240, legend: { show: false }, padding: [10, 14, 0, 0],
      cursor: { sync: { key: "steps", setSeries: false }, points: { size: 7 } },
      scales: { x: { time: false, range: margin }, y: { distr: c.log ? 3 : 1 } },
      axes: [Object.assign({ label: "step", space: 60, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7],
        values: (u, all, i, space, step) => ticks(all, step) }, axis),
        Object.assign({ label: c.axis, size: 58, values: (u, all, i, space, step) => c.log ? logTicks(all) : ticks(all.map(v => v == null ? v : v / c.scale), step / c.scale) }, axis)],
      series: [{}].concat(c.series.map(s => ({
        label: s.name, width: styles[s.style].width, alpha: styles[s.style].alpha, stroke: () => css(colour(s)),
        points: { show: s.style === "dots" || s.x.length < 40 || single ? true : undefined, size: s.style === "dots" ? 8 : 5, fill: () => css(colour(s)) },
        dash: s.style === "dots" ? [4, 4] : undefined, spanGaps: s.style === "dots",
      }))),
      hooks: { setCursor: [u => {
        const i = u.cursor.idx;
        if (u.cursor.event == null || i == null || u.cursor.left < 0) return;
        const lines = ["step " + u.data[0][i]];
        c.series.forEach((s, k) => { const v = u.data[k + 1][i]; if (v !== undefined) lines.push(s.name + ": " + (v === null ? "NaN or Inf" : number(v / c.scale))); });
        lines.push(c.axis);
        const box = u.over.getBoundingClientRect();
        show(lines.join("\n"), box.left + u.cursor.left, box.top + u.cursor.top);
      }] },
    }, uPlot.join(c.series.map(s => [s.x, s.y])), card);
    sync.sub(plot);
    plot.over.addEventListener("mouseleave", hide);
    plots.push([plot, card]);
  }
  const fit = () => { for (const [p, card] of plots) p.setSize({ width: card.clientWidth - 14, height: 240 }); };
  new ResizeObserver(fit).observe(container);
  const redraw = () => { for (const [p] of plots) p.redraw(false, true); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Print in the light style.
  addEventListener("beforeprint", () => { document.documentElement.classList.add("print"); redraw(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("print"); redraw(); });
})();
