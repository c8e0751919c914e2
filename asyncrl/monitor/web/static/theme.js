// Light or dark, and drawing a figure in it. Used by the page and by reports.
"use strict";
const asyncrl = (() => {
  const KEY = "asyncrl-theme", ORDER = ["auto", "light", "dark"];
  const system = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  const CONFIG = {
    displaylogo: false, responsive: true, displayModeBar: "hover",
    modeBarButtons: [["toImage", "resetScale2d"]],
  };
  const listeners = [];
  let chosen = "auto", templates = {};
  try { chosen = localStorage.getItem(KEY) || "auto"; } catch { /* a file, or storage is off */ }
  if (!ORDER.includes(chosen)) chosen = "auto";

  const theme = () => (chosen === "auto" ? (system.matches ? "dark" : "light") : chosen);

  function apply() {
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    const button = document.getElementById("theme");
    if (button) button.textContent = { auto: "auto", light: "light", dark: "dark" }[chosen];
    listeners.forEach((f) => f());
  }

  function next() {
    chosen = ORDER[(ORDER.indexOf(chosen) + 1) % ORDER.length];
    try { localStorage.setItem(KEY, chosen); } catch { /* not remembered, then */ }
    apply();
  }

  const ENTRY = 44, LETTER = 6.2, LINE = 19, LINES = 2;

  // Pixels that a legend takes beyond the lines that a plot has room for. Plotly puts its entries
  // in columns as wide as the widest.
  function legendOf(figure, width) {
    const names = figure.data.filter((t) => t.name && t.showlegend !== false).map((t) => t.name.length);
    const columns = Math.max(1, Math.floor(width / (ENTRY + LETTER * Math.max(0, ...names))));
    return LINE * Math.max(0, Math.ceil(names.length / columns) - LINES);
  }

  function draw(element, figure, zoom) {
    element.style.setProperty("--legend", `${legendOf(figure, element.clientWidth)}px`);
    const layout = {
      ...figure.layout, template: templates[theme()], uirevision: zoom,
      dragmode: coarse.matches ? false : "zoom",
    };
    // Plotly writes into what it is given.
    return Plotly.react(element, figure.data.map((t) => ({ ...t })), layout, CONFIG);
  }

  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme")?.addEventListener("click", next);
    apply();
  });
  apply();
  return { draw, theme, onTheme: (f) => listeners.push(f), useTemplates: (t) => { templates = t; } };
})();
