// Small time series over the last minutes, in the page's own colours.

import uPlot from "/static/vendor/uPlot.js";

/** What a CSS variable comes to in the colours of now: a canvas does not understand `light-dark()`. */
function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

/** A chart in `holder`: `series` [{label, colour (a CSS variable), value(v) → text}]. Returns {set(data), destroy()}. */
export function chart(holder, series, format) {
  const axis = { stroke: colour("--faint"), font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: colour("--line"), width: 1 } };
  const options = {
    width: Math.max(160, holder.clientWidth),
    height: 110,
    padding: [8, 4, 0, 0],
    legend: { show: false },
    cursor: { drag: { setScale: false }, points: { size: 5 }, y: false },
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [
      { ...axis, space: 70, size: 22, values: "{HH}:{mm}:{ss}" },
      { ...axis, size: 52, values: (_, ticks) => ticks.map(format) },
    ],
    series: [
      {},
      ...series.map((one) => ({
        label: one.label,
        stroke: colour(one.colour),
        fill: one.fill ? colour(one.fill) : undefined,
        width: 1.5,
        points: { show: false },
        spanGaps: false,
      })),
    ],
  };
  const plot = new uPlot(options, [[], ...series.map(() => [])], holder);
  const observer = new ResizeObserver(() => plot.setSize({ width: Math.max(160, holder.clientWidth), height: 110 }));
  observer.observe(holder);
  return {
    set: (data) => plot.setData(data),
    destroy: () => {
      observer.disconnect();
      plot.destroy();
    },
  };
}
