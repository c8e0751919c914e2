// The page: asks for what is new of what is in view, every two seconds, and draws it.
"use strict";
(() => {
  const EVERY_MS = 2000, OVER_MS = 10000;
  const SMOOTH = "asyncrl-smooth";
  // Counts and totals, which have no noise: they are drawn as they are.
  const RAW = new Set(["version", "ends", "lag", "depth", "bytes", "memory", "device_memory"]);
  const { el } = panels;
  const at = (id) => document.getElementById(id);
  const cards = new Map(); // figure's name -> {card, plot, note, rev, figure, overlaid}
  const seen = new Set();  // ids of sections and names of figures in view
  let logged = 0, chosen = [], axis = "step", ticks = 0, timer = 0, asking = false, again = false;
  let knownRuns = [];

  async function get(path, query = []) {
    const text = new URLSearchParams(query).toString();
    const answer = await fetch(text ? `${path}?${text}` : path, { credentials: "same-origin" });
    if (answer.status === 401) throw new Error("the token is not valid any more: open the URL that it printed");
    if (!answer.ok) throw new Error(`${path}: ${answer.status} ${await answer.text()}`);
    return path.endsWith("/config") ? answer.text() : answer.json();
  }
  const of = (run, what) => `/api/runs/${encodeURIComponent(run)}/${what}`;

  // --- what is there -----------------------------------------------------------------------

  function section(title, id) {
    const box = el("section"), grid = el("div", null, "grid");
    box.id = id;
    box.append(el("h2", title), grid, el("p", "", "absentees"));
    at("main").append(box);
    const link = el("a", title);
    link.href = `#${id}`;
    at("nav").append(link);
    watch.observe(box);
    return grid;
  }

  function panel(grid, title, tells, id, first) {
    const card = el("article", null, "card wide"), body = el("div");
    body.id = id;
    card.append(el("h3", title), el("p", tells, "tells"), body);
    if (first) grid.prepend(card); else grid.append(card);
  }

  const watch = new IntersectionObserver((entries) => {
    let more = false;
    for (const e of entries) {
      const key = e.target.dataset.figure || `#${e.target.id}`;
      if (e.isIntersecting) { more ||= !seen.has(key); seen.add(key); } else seen.delete(key);
    }
    if (more) soon();
  }, { rootMargin: "300px" });

  function build(catalogue) {
    asyncrl.useTemplates(catalogue.templates);
    const grids = new Map(), link = el("a", "Overview");
    link.href = "#overview";
    at("nav").append(link);
    watch.observe(at("overview"));
    for (const f of catalogue.figures) {
      if (!grids.has(f.section)) {
        grids.set(f.section, section(f.section, f.section.toLowerCase().replace(/ /g, "-")));
      }
      const card = el("article", null, "card"), plot = el("div", null, "plot");
      card.dataset.figure = f.name;
      card.append(el("h3", f.title), el("p", f.tells, "tells"), plot);
      grids.get(f.section).append(card);
      cards.set(f.name, { card, plot, title: f.title, overlaid: f.overlaid, rev: null, figure: null });
      watch.observe(card);
    }
    panel(grids.get("Buffer"), "Ledger", "Each dispatch of a sample ends in exactly one term", "ledger", true);
    panel(grids.get("Actors"), "Processes", "Who is there, and whom each waits for now", "roles", true);
    picker();
    panel(section("Samples", "samples-section"), "Last samples", "Of the recording, the newest first", "samples");
    panel(section("Events", "events-section"), "Events", "The newest first", "events");
    panel(section("Log", "log-section"), "Log", "Of all roles, the newest last", "log");
    at("log").className = "log";
    panel(section("Configuration", "config-section"), "config.yaml", "As it was resolved at the launch", "config");
  }

  // One figure of whatever metric is named.
  function picker() {
    const grid = section("Any metric", "any-section"), card = el("article", null, "card wide");
    const plot = el("div", null, "plot"), input = el("input"), list = el("datalist");
    list.id = "any-names";
    input.id = "any";
    input.placeholder = "e.g. learner-0/loss/grad_norm";
    input.setAttribute("list", list.id);
    plot.hidden = true;
    card.append(el("h3", "A metric of metrics.jsonl"), input, list, plot);
    grid.append(card);
    input.addEventListener("change", () => {
      cards.delete(card.dataset.figure);
      seen.delete(card.dataset.figure);
      watch.unobserve(card);
      card.dataset.figure = `any=${input.value}`;
      cards.set(card.dataset.figure,
        { card, plot, title: input.value, overlaid: true, stays: true, rev: null, figure: null });
      watch.observe(card);
    });
  }

  // --- runs --------------------------------------------------------------------------------

  function listRuns() {
    at("run-list").replaceChildren(...knownRuns.map((run) => {
      const label = el("label"), box = el("input");
      box.type = "checkbox";
      box.checked = chosen.includes(run.name);
      box.addEventListener("change", () => {
        chosen = box.checked ? [...chosen, run.name] : chosen.filter((n) => n !== run.name);
        if (!chosen.length) chosen = [run.name];
        reset();
      });
      label.append(box, el("span", run.name), el("small", run.step === null ? run.state
        : `${run.step}/${run.steps}, ${run.state}`));
      return label;
    }));
    document.querySelector("#runs summary").textContent = chosen.length === 1 ? chosen[0]
      : `${chosen.length} runs: ${chosen.join(", ")}`;
    document.title = `${chosen.join(", ")} · asyncrl`;
  }

  function reset() {
    for (const c of cards.values()) { c.rev = null; c.figure = null; }
    for (const id of ["config", "log", "samples", "advice"]) at(id).replaceChildren();
    logged = 0;
    const address = new URLSearchParams(chosen.map((n) => ["run", n]));
    if (axis !== "step") address.set("axis", axis);
    history.replaceState(null, "", `?${address}${location.hash}`);
    listRuns();
    soon();
  }

  // --- figures -----------------------------------------------------------------------------

  function grown(figure, news) {
    if ("figure" in news) return news.figure;
    const data = news.data.map((change, k) => {
      if ("set" in change) return change.set;
      const trace = { ...figure.data[k] };
      for (const [key, [keep, add]] of Object.entries(change.grow || {})) {
        trace[key] = trace[key].slice(0, keep).concat(add);
      }
      return trace;
    });
    return { data, layout: news.layout || figure.layout };
  }

  async function figures() {
    const everything = ticks % 5 === 0;
    const wanted = [...cards].filter(([name, c]) => seen.has(name)
      || (everything && c.card.classList.contains("absent")));
    if (!wanted.length) return;
    const asked = JSON.stringify([chosen, axis]);
    const answer = await get("/api/figures", [
      ...chosen.map((n) => ["run", n]), ["axis", axis],
      ...wanted.map(([name, c]) => ["figure", c.rev === null ? name : `${name}:${c.rev}`]),
    ]);
    if (asked !== JSON.stringify([chosen, axis])) return; // something else was chosen meanwhile
    for (const [name, news] of Object.entries(answer)) {
      const c = cards.get(name);
      if (!("figure" in news) && !c.figure) continue; // it was dropped meanwhile: ask for it whole
      c.figure = grown(c.figure, news);
      c.rev = news.rev;
      c.card.classList.toggle("absent", !c.figure && !c.stays);
      c.plot.hidden = !c.figure;
      if (c.figure) draw(c);
    }
    for (const box of document.querySelectorAll("main > section")) {
      const note = box.querySelector(".absentees");
      if (!note) continue;
      const absent = [...cards.values()].filter((c) => box.contains(c.card) && c.card.classList.contains("absent"));
      note.textContent = absent.length ? `Not recorded, or not yet: ${absent.map((c) => c.title).join(", ")}` : "";
    }
  }

  // Lines as their exponential moving average; what was measured stays in the hover text.
  function smoothed(figure) {
    const kept = Number(at("smooth").value);
    if (!kept) return figure;
    const data = figure.data.map((t) => {
      if (t.type !== "scatter" || t.stackgroup || t.fill || t.y.length < 3) return t;
      let mean = 0, weight = 0;
      const y = t.y.map((v) => {
        if (v === null || !Number.isFinite(v)) return v;
        mean = kept * mean + (1 - kept) * v;
        weight = kept * weight + 1 - kept; // so that the first values do not begin at 0
        return mean / weight;
      });
      return { ...t, y, customdata: t.y, hovertemplate: "%{customdata:.4~g} (smoothed %{y:.4~g})" };
    });
    return { ...figure, data };
  }

  function smooth() {
    const kept = Number(at("smooth").value);
    at("smoothed").textContent = kept ? kept.toFixed(2) : "off";
    for (const c of cards.values()) if (c.figure) draw(c);
  }

  function draw(c) {
    const alone = !c.overlaid && chosen.length > 1 ? `${c.title} · ${chosen[0]}` : c.title;
    c.card.querySelector("h3").textContent = alone;
    asyncrl.draw(c.plot, RAW.has(c.plot.parentNode.dataset.figure) ? c.figure : smoothed(c.figure),
      axis + chosen.join("/"));
  }

  // --- panels ------------------------------------------------------------------------------

  async function overview() {
    const states = {};
    for (const name of chosen) states[name] = await get(of(name, "state"));
    const state = states[chosen[0]];
    if (!state) return OVER_MS;
    at("run-name").textContent = chosen.join(" · ");
    at("run-state").textContent = chosen.map((n) => (chosen.length > 1 ? `${n}: ` : "") + states[n].state
      + (states[n].stalled ? `; stalled: ${states[n].stalled.why}` : "")
      + (states[n].go_on ? `; it goes on with: ${states[n].go_on}` : "")).join(" · ");
    if (chosen.length > 1) {
      const card = el("div", null, "card narrow");
      card.append(panels.compared(states));
      at("tiles").className = "";
      at("tiles").replaceChildren(card);
    } else {
      at("tiles").className = "tiles";
      at("tiles").replaceChildren(...panels.tiles(state));
    }
    at("ledger").replaceChildren(panels.ledger(state));
    at("roles").replaceChildren(panels.roles(state));
    if (seen.has("#events-section")) at("events").replaceChildren(panels.events(state));
    const late = Object.values(states).find((s) => !s.over && s.age_s > 10);
    const over = Object.values(states).every((s) => s.over);
    if (late) live("warn", `no news for ${late.age_s.toFixed(0)} s`);
    else live(over ? "" : "good", over ? "ended" : "live");
    return over ? OVER_MS : EVERY_MS;
  }

  async function rest() {
    const run = chosen[0];
    if (seen.has("#overview") && ticks % 3 === 0) {
      const runs = [...chosen], found = [];
      for (const n of runs) {
        found.push(...panels.advice((await get(of(n, "advice"))).advice, runs.length > 1 ? n : ""));
      }
      if (runs.join("/") === chosen.join("/")) at("advice").replaceChildren(...found);
    }
    if (seen.has("#any-section") && (ticks % 5 === 0 || !at("any-names").firstChild)) {
      const found = (await get(of(run, "names"))).names;
      at("any-names").replaceChildren(...found.map((name) => Object.assign(el("option"), { value: name })));
    }
    if (seen.has("#log-section")) {
      const answer = await get(of(run, "log"), [["after", logged]]);
      if (run === chosen[0]) { logged = answer.next; panels.log(at("log"), answer.lines); }
    }
    if (seen.has("#samples-section") && (ticks % 3 === 0 || !at("samples").firstChild)) {
      at("samples").replaceChildren(panels.samples(await get(of(run, "samples"))));
    }
    if (seen.has("#config-section") && !at("config").firstChild) {
      at("config").replaceChildren(el("pre", await get(of(run, "config"))));
    }
  }

  // --- the loop ----------------------------------------------------------------------------

  function live(cls, text) {
    at("live").className = cls;
    at("live").textContent = text;
  }

  function soon() {
    if (asking) { again = true; return; }
    clearTimeout(timer);
    timer = setTimeout(tick, 30);
  }

  async function tick() {
    let pause = EVERY_MS;
    if (!document.hidden) {
      asking = true;
      again = false;
      try {
        if (ticks % 5 === 0) {
          knownRuns = (await get("/api/runs")).runs;
          listRuns();
        }
        pause = (await overview()) || EVERY_MS;
        await figures();
        await rest();
        ticks += 1;
        document.documentElement.dataset.ticks = ticks;
      } catch (error) {
        live("bad", error instanceof TypeError ? "no answer from asyncrl monitor" : error.message);
      }
      asking = false;
    }
    clearTimeout(timer);
    timer = setTimeout(tick, again ? 30 : pause);
  }

  async function start() {
    const address = new URLSearchParams(location.search);
    axis = ["step", "version", "wall_s"].includes(address.get("axis")) ? address.get("axis") : "step";
    at("axis").value = axis;
    at("axis").addEventListener("change", () => { axis = at("axis").value; reset(); });
    try { at("smooth").value = localStorage.getItem(SMOOTH) || 0; } catch { /* storage is off */ }
    at("smooth").addEventListener("input", () => {
      try { localStorage.setItem(SMOOTH, at("smooth").value); } catch { /* not remembered, then */ }
      smooth();
    });
    smooth();
    document.addEventListener("visibilitychange", soon);
    document.addEventListener("click", (e) => { if (!at("runs").contains(e.target)) at("runs").open = false; });
    asyncrl.onTheme(() => { for (const c of cards.values()) if (c.figure) draw(c); });
    try {
      build(await get("/api/catalogue"));
      const answer = await get("/api/runs");
      knownRuns = answer.runs;
      const names = knownRuns.map((r) => r.name);
      chosen = address.getAll("run").filter((n) => names.includes(n));
      if (!chosen.length) chosen = answer.first.filter((n) => names.includes(n));
      if (!chosen.length) chosen = names.slice(0, 1);
      listRuns();
      tick();
    } catch (error) {
      live("bad", error.message);
    }
  }
  start();
})();
