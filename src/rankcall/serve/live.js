"use strict";
(() => {
  const $ = (id) => document.getElementById(id);

  // The link that the command prints has the token after #, where no server and no log sees it.
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) history.replaceState(null, "", location.pathname + location.search);
  const login = $("login");
  if (login) {
    if (given) {
      $("token").value = given;
      login.submit();
    }
    return;
  }

  // --- tips ---
  const tip = $("tip");
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  function show(cell) {
    const places = JSON.parse($("places").textContent);
    const place = places[Number(cell.dataset.p)] || "";
    const host = cell.closest(".host").querySelector("b");
    const rank = /^\d+$/.test(cell.dataset.r) ? "rank " + cell.dataset.r : cell.dataset.r;
    tip.textContent = rank + (host ? " (" + host.title + ")" : "") + (place ? "\n" + place : "");
    tip.hidden = false;
    const at = cell.getBoundingClientRect(), box = tip.getBoundingClientRect();
    tip.style.left = clamp(at.left + 8, 4, innerWidth - box.width - 4) + "px";
    tip.style.top = (at.bottom + 8 + box.height > innerHeight ? at.top - box.height - 8 : at.bottom + 8) + "px";
  }
  const hide = () => { tip.hidden = true; };
  document.addEventListener("pointerover", (event) => {
    const cell = event.target.closest && event.target.closest(".squares .cell");
    if (cell) show(cell);
  });
  document.addEventListener("pointerout", (event) => {
    if (event.target.closest && event.target.closest(".squares .cell")) hide();
  });
  document.addEventListener("click", (event) => {
    const cell = event.target.closest && event.target.closest(".squares .cell");
    if (cell) show(cell); else hide();
  });

  let chosen = 0;
  const cells = () => Array.from(document.querySelectorAll("#grid .cell"));
  function choose(index) {
    const all = cells();
    if (!all.length) return;
    chosen = clamp(index, 0, all.length - 1);
    for (const cell of document.querySelectorAll("#grid .at")) cell.classList.remove("at");
    all[chosen].classList.add("at");
    all[chosen].scrollIntoView({ block: "nearest" });
    show(all[chosen]);
  }
  function below(step) { // the nearest cell in the row above or under the chosen one
    const all = cells(), from = all[chosen].getBoundingClientRect();
    let best = chosen, least = Infinity;
    all.forEach((cell, index) => {
      const box = cell.getBoundingClientRect();
      const down = (box.top - from.top) * step;
      if (down <= 2) return;
      const far = down * 4 + Math.abs(box.left - from.left);
      if (far < least) { least = far; best = index; }
    });
    return best;
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    if (!document.activeElement || document.activeElement.id !== "grid" || !cells().length) return;
    const first = !document.querySelector("#grid .at");
    const last = cells().length - 1;
    const next = {
      ArrowRight: () => chosen + (first ? 0 : 1), ArrowLeft: () => chosen - (first ? 0 : 1),
      ArrowDown: () => (first ? chosen : below(1)), ArrowUp: () => (first ? chosen : below(-1)),
      Home: () => 0, End: () => last,
    }[event.key];
    if (next) { event.preventDefault(); choose(next()); }
  });
  document.addEventListener("focusout", (event) => { if (event.target.id === "grid") hide(); });

  // --- updates ---
  function replace(name, html) {
    const section = $(name);
    if (!section) return;
    const open = new Map();
    for (const each of section.querySelectorAll("details[data-keep]")) open.set(each.dataset.keep, each.open);
    const focus = document.activeElement && section.contains(document.activeElement)
      ? document.activeElement.id : "";
    const marked = Boolean(document.querySelector("#grid .at"));
    section.innerHTML = html;
    for (const each of section.querySelectorAll("details[data-keep]")) {
      if (open.has(each.dataset.keep)) each.open = open.get(each.dataset.keep);
    }
    if (focus && $(focus)) $(focus).focus({ preventScroll: true });
    if (name === "ranks" && marked && focus === "grid") choose(chosen);
    else if (name === "ranks") hide();
    if (name === "verdict") document.title = section.querySelector("h1").textContent;
  }
  // A press is a click only if its element is still there when it ends, so changes wait meanwhile.
  const PRESS_MS = 2000; // the end of a press can be missed, for example outside of the window
  let pressedUntil = 0;
  const changes = new Map();
  function showChanges() {
    if (Date.now() < pressedUntil) return;
    for (const [name, html] of changes) replace(name, html);
    changes.clear();
  }
  document.addEventListener("pointerdown", () => {
    pressedUntil = Date.now() + PRESS_MS;
    setTimeout(showChanges, PRESS_MS + 10);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    document.addEventListener(end, () => { pressedUntil = 0; setTimeout(showChanges, 0); });
  }
  const link = $("link");
  let events = null;
  function listen() {
    events = new EventSource("events" + location.search); // the rows that the viewer chose
    events.onmessage = (event) => {
      link.textContent = "";
      for (const [name, html] of Object.entries(JSON.parse(event.data))) changes.set(name, html);
      showChanges();
    };
    events.onerror = () => {
      link.textContent = "connection lost, trying again; the page shows the last state";
      if (events.readyState === EventSource.CLOSED) {
        askForToken();
        setTimeout(listen, 5000);
      }
    };
  }
  async function askForToken() { // a page that was started again has another one
    const answer = await fetch("api/stacks").catch(() => null);
    if (answer && answer.status === 401) location.reload();
  }
  listen();
  // A page that nobody sees asks for nothing.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { if (events) events.close(); } else { if (events) events.close(); listen(); }
  });

  document.addEventListener("submit", async (event) => { // of a form that asks the ranks for something
    const form = event.target;
    if (!form.classList.contains("ask")) return;
    event.preventDefault();
    const button = form.querySelector("button"), status = form.querySelector("[role=status]");
    button.disabled = true;
    status.textContent = form.dataset.busy;
    try {
      const body = new URLSearchParams(new FormData(form));
      const answer = await fetch("api/" + form.getAttribute("action"), { method: "POST", body });
      if (!answer.ok) throw new Error(await answer.text() || answer.status); // a line of plain text
      status.textContent = "";
    } catch (error) {
      status.textContent = "that did not work: " + error.message;
    }
    button.disabled = false;
  });
})();
