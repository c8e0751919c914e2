// A report: what is in it is in the element "data". Figures are drawn when they come into view.
"use strict";
(() => {
  const { el } = panels;
  const at = (id) => document.getElementById(id);
  const data = JSON.parse(at("data").textContent);
  const names = data.names, first = data.states[names[0]];
  const cards = new Map(); // figure's name -> {card, plot, drawn}
  let axis = "step";
  asyncrl.useTemplates(data.templates);

  const watch = new IntersectionObserver((entries) => {
    for (const e of entries) if (e.isIntersecting) draw(e.target.dataset.figure);
  }, { rootMargin: "400px" });

  function draw(name) {
    const c = cards.get(name), figure = data.figures[axis][name];
    c.drawn = true;
    if (figure) asyncrl.draw(c.plot, figure, axis);
  }

  function section(title, id) {
    const box = el("section"), grid = el("div", null, "grid"), link = el("a", title);
    box.id = id;
    box.append(el("h2", title), grid);
    at("main").append(box);
    link.href = `#${id}`;
    at("nav").append(link);
    return grid;
  }

  function panel(grid, title, body) {
    const card = el("article", null, "card wide");
    card.append(el("h3", title), body);
    grid.append(card);
  }

  function figures() {
    const grids = new Map();
    for (const f of data.catalogue) {
      if (!data.figures.step[f.name] && !data.figures.wall_s[f.name]) continue;
      if (!grids.has(f.section)) grids.set(f.section, section(f.section, f.section.toLowerCase().replace(/ /g, "-")));
      const card = el("article", null, "card"), plot = el("div", null, "plot");
      const title = !f.overlaid && names.length > 1 ? `${f.title} · ${names[0]}` : f.title;
      card.dataset.figure = f.name;
      card.append(el("h3", title), el("p", f.tells, "tells"), plot);
      grids.get(f.section).append(card);
      cards.set(f.name, { card, plot, drawn: false });
      watch.observe(card);
    }
  }

  function redraw() {
    for (const [name, c] of cards) {
      c.card.classList.toggle("absent", !data.figures[axis][name]);
      if (c.drawn) draw(name);
    }
  }

  at("of").textContent = names.join(" · ");
  at("run-name").textContent = names.join(" · ");
  at("run-state").textContent = names.map((n) => (names.length > 1 ? `${n}: ` : "") + data.states[n].state).join(" · ");
  if (names.length > 1) {
    const card = el("div", null, "card narrow");
    card.append(panels.table(["", ...names], data.finals, names.map((_, k) => k + 1)));
    at("tiles").append(card);
  } else {
    at("tiles").className = "tiles";
    at("tiles").append(...panels.tiles(first));
  }
  for (const n of names) {
    at("advice").append(...panels.advice(data.advice[n], names.length > 1 ? n : ""));
  }
  if (names.length > 1) {
    const body = data.difference.length ? panels.table(["", ...names], data.difference)
      : el("p", "Their settings are the same", "soft");
    panel(section("Settings in which they differ", "difference"), "config.yaml", body);
  }
  figures();
  for (const n of names) {
    const of = names.length > 1 ? ` · ${n}` : "";
    const grid = section(`Ledger and processes${of}`, `ledger-${n}`);
    panel(grid, "Ledger", panels.ledger(data.states[n]));
    panel(grid, "Processes", panels.roles(data.states[n]));
  }
  if (names.length === 1) {
    if (data.startup.length) {
      panel(section("Start", "start"), "Phases of the start, side by side",
        panels.table(["process", "phase", "seconds", "ended at"],
          data.startup.map((row) => row.map((v) => (typeof v === "number" ? v.toFixed(1) : v))), [2, 3]));
    }
    panel(section("Events", "events"), "The newest first", panels.events(first));
  }
  for (const n of names) {
    panel(section(names.length > 1 ? `Configuration · ${n}` : "Configuration", `config-${n}`), "config.yaml",
      el("pre", data.config[n]));
  }
  at("written").textContent = `Written ${data.written} by ${data.by}. Everything is in this file.`;
  at("axis").addEventListener("change", () => { axis = at("axis").value; redraw(); });
  asyncrl.onTheme(redraw);
  addEventListener("beforeprint", () => { for (const name of cards.keys()) draw(name); });
  redraw();
})();
