// What is no figure: tiles, roles, ledger, samples, events, log. Text only ever as text.
"use strict";
const panels = (() => {
  function el(tag, text, cls) {
    const node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = text;
    if (cls) node.className = cls;
    return node;
  }

  const clock = (s) => {
    if (s === null || s === undefined) return "-";
    const whole = Math.round(s), h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60;
    const two = (n) => String(n).padStart(2, "0");
    return h ? `${h}:${two(m)}:${two(whole % 60)}` : `${m}:${two(whole % 60)}`;
  };
  const count = (n) => Number(n).toLocaleString("en");

  function table(head, rows, numbers = []) {
    const t = el("table"), top = t.createTHead().insertRow(), body = t.createTBody();
    head.forEach((name, k) => top.append(el("th", name, numbers.includes(k) ? "number" : "")));
    for (const row of rows) {
      const tr = body.insertRow();
      row.forEach((cell, k) => {
        const td = tr.insertCell();
        td.className = numbers.includes(k) ? "number" : "";
        td.append(cell instanceof Node ? cell : document.createTextNode(cell ?? "-"));
      });
    }
    const scroll = el("div", null, "scroll");
    scroll.append(t);
    return scroll;
  }

  function tile(label, value, of) {
    const box = el("div", null, "tile"), number = el("b", value);
    if (of) number.append(el("small", ` ${of}`));
    box.append(el("span", label), number);
    return box;
  }

  function tiles(state) {
    const found = new Map(state.finals), boxes = [];
    const has = (label) => found.has(label) && found.get(label) !== "-";
    boxes.push(tile("step", state.step ?? "-", state.steps ? `of ${state.steps}` : ""));
    boxes.push(tile("version", state.version ?? "-"));
    for (const [label, value] of state.finals) {
      if (["step", "version", "staleness limit", "head staleness, max", "held out, first",
           "seconds in all"].includes(label) || !has(label)) continue;
      if (label === "actor restarts" && value === "0") continue;
      if (label === "head staleness, mean") {
        boxes.push(tile("head staleness", value,
          `max ${found.get("head staleness, max")}, limit ${found.get("staleness limit")}`));
      } else if (label === "held out, last") {
        boxes.push(tile("held out", value, `from ${found.get("held out, first")}`));
      } else boxes.push(tile(label, value));
    }
    boxes.push(tile(state.over ? "time" : "time gone", clock(state.elapsed_s),
      state.left_s === null || state.left_s === undefined ? "" : `${clock(state.left_s)} left`));
    return boxes;
  }

  function compared(states) {
    const names = Object.keys(states);
    const labels = states[names[0]].finals.map(([label]) => label);
    const rows = labels.map((label, k) => [label, ...names.map((n) => states[n].finals[k][1])])
      .filter((row) => row.slice(1).some((v) => v !== "-"));
    return table(["", ...names], rows, names.map((_, k) => k + 1));
  }

  function roles(state) {
    const rows = state.roles.map((r) => {
      const waits = el("div");
      (r.waits.length ? r.waits : ["-"]).forEach((w) => waits.append(el("div", w)));
      const kind = { alive: "good", dead: "bad", restarting: "warn", starting: "warn", unknown: "bad" }[r.state];
      const heard = r.heard_s === null ? "-"
        : `${r.heard_s < 120 ? `${r.heard_s.toFixed(1)} s` : clock(r.heard_s)} ago`;
      return [r.name, el("span", r.state, kind), r.version, r.restarts, r.pid, heard, waits];
    });
    const old = state.unknown_s !== null && state.unknown_s !== undefined;
    const shown = table(["process", "state", "version", "restarts", "pid", "heard",
      old ? "waited then for" : "waits for"], rows);
    if (old) {
      shown.prepend(el("p", `as it was ${clock(state.unknown_s)} ago, when the launcher was last heard of`, "bad"));
    }
    return shown;
  }

  function ledger(state) {
    const box = el("div"), l = state.ledger;
    if (!l) return el("p", "not told yet", "soft");
    const law = el("div", null, "law");
    law.append(el("span", `${count(l.dispatched)} dispatched`), document.createTextNode("="));
    l.terms.forEach(([term, n], k) => {
      if (k) law.append(document.createTextNode("+"));
      law.append(el("span", `${count(n)} ${term.replace("_", " ")}`, n ? "" : "none"));
    });
    box.append(law, el("p", l.conserved ? "the law holds" : "THE LAW DOES NOT HOLD",
      l.conserved ? "good" : "bad"));
    if (l.waiting_for) box.append(el("p", `the next batch still lacks ${l.waiting_for}`, "soft"));
    return box;
  }

  function events(state) {
    const box = table(["at", "role", "event", ""],
      state.events.slice().reverse().map((e) => [
        e.at, e.role, e.count > 1 ? `${e.event} x ${e.count}` : e.event, el("span", e.more, "soft"),
      ]));
    box.className += " rolls";
    return box;
  }

  function log(box, lines) {
    const below = box.scrollTop + box.clientHeight > box.scrollHeight - 30;
    for (const line of lines) {
      const kind = { WARNING: "warn", ERROR: "bad", CRITICAL: "bad" }[line.level] || "";
      const row = el("div", null, kind);
      row.append(el("small", `${line.at} `), el("i", line.role), ` ${line.logger}: ${line.text}`);
      box.append(row);
    }
    while (box.childElementCount > 400) box.firstChild.remove();
    if (below) box.scrollTop = box.scrollHeight;
  }

  function samples(answer) {
    if (!answer.samples.length) return el("p", "none recorded yet", "soft");
    const box = el("div", null, "samples");
    for (const s of answer.samples) {
      const one = el("div", null, "sample");
      one.append(el("div", s.head, "soft"), el("p", s.prompt, "soft"), el("p", s.response));
      box.append(one);
    }
    return box;
  }

  // `run`: whose it is, where there are several.
  const advice = (lines, run) => lines.map((a) => {
    const p = el("p", run ? `${run}: ${a.text} ` : `${a.text} `);
    p.append(el("code", a.setting));
    if (a.gain) p.append(el("span", `, up to ${a.gain.toFixed(1)} times as fast`, "soft"));
    return p;
  });

  return { el, table, tiles, compared, roles, ledger, events, log, samples, advice };
})();
