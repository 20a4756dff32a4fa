"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const tip = $("tip");
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

  function say(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = clamp(x + 14, 4, innerWidth - box.width - 4) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
  }
  const hush = () => { tip.hidden = true; };

  function ms(value) {
    if (value <= 0) return "0";
    const digits = (v) => (v >= 99.95 ? v.toFixed(0) : v >= 9.995 ? v.toFixed(1) : v.toFixed(2));
    if (value >= 1000) return digits(value / 1000) + " s";
    return value >= 1 ? digits(value) + " ms" : (value * 1000).toFixed(value >= 0.01 ? 0 : 1) + " µs";
  }
  const seconds = (s) => ms(s * 1000);
  const host = (rank) => (data.hosts[rank] ? " (" + data.hosts[rank] + ")" : "");

  // Pictures' opacity is the value, by its square root.
  function pixelsOf(image, width, height) {
    const canvas = document.createElement("canvas");
    canvas.width = width; canvas.height = height;
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(image, 0, 0);
    return context.getImageData(0, 0, width, height).data;
  }
  function bytes(count) {
    const units = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    let unit = 0;
    while (count >= 999.5 && unit < units.length - 1) { count /= 1000; unit += 1; }
    return count.toPrecision(count >= 100 ? 3 : 2) + " " + units[unit];
  }

  // Whatever has words of its own.
  document.addEventListener("pointerover", (event) => {
    const target = event.target.closest && event.target.closest("[data-tip]");
    if (target) say(target.dataset.tip, event.clientX, event.clientY);
  });
  document.addEventListener("pointerout", (event) => {
    if (event.target.closest && event.target.closest("[data-tip]")) hush();
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hush(); });

  // Columns: one a rank.
  if (data.columns) {
    const chart = $("columns"), svg = chart.querySelector("svg"), cursor = chart.querySelector(".cursor");
    const { left, wide, rows, unit } = data.columns;
    let at = 0;
    const show = (index, x, y) => {
      at = clamp(index, 0, rows.length - 1);
      const [rank, compute, waiting, transfer] = rows[at];
      cursor.setAttribute("x", left + at * wide);
      cursor.setAttribute("width", wide);
      cursor.removeAttribute("hidden");
      say("rank " + rank + host(rank) + ", " + unit + "\ncompute " + ms(compute) +
        "\nwaiting " + ms(waiting) + "\ntransfer " + ms(transfer), x, y);
    };
    const hide = () => { cursor.setAttribute("hidden", ""); hush(); };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * 960 / box.width - left;
      if (x < 0 || x >= wide * rows.length) return hide();
      show(Math.floor(x / wide), event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 }[event.key];
      if (!step) return;
      event.preventDefault();
      const box = svg.getBoundingClientRect();
      const still = cursor.hasAttribute("hidden") && Math.abs(step) === 1; // the first key shows where it is
      const next = clamp(still ? at : at + step, 0, rows.length - 1);
      show(next, box.left + (left + (next + 0.5) * wide) * box.width / 960, box.top + 40);
    });
  }

  // What each rank did when: the picture says what, and the pointer who and when.
  if (data.timeline) {
    const { rows, bins, fold, bin_s: binS } = data.timeline, pane = $("timeline").querySelector(".window");
    pane.addEventListener("pointermove", (event) => {
      const box = pane.getBoundingClientRect();
      const rank = rows[Math.floor(clamp((event.clientY - box.top) / box.height, 0, 0.9999) * rows.length)];
      const bin = Math.floor(clamp((event.clientX - box.left) / box.width, 0, 0.9999) * bins);
      say("rank " + rank + host(rank) + (fold > 1 ? ", of " + fold + " ranks" : "") + "\n" +
        seconds(bin * binS) + " to " + seconds((bin + 1) * binS), event.clientX, event.clientY);
    });
    pane.addEventListener("pointerleave", hush);
  }

  // The map: the pictures' opacity is the value; grey is absent.
  if (data.map) {
    const { maps, bins, bin_s: binS, highest_ms: highest } = data.map;
    const map = $("map"), pane = map.querySelector(".window"), images = [...pane.querySelectorAll("img")];
    const cross = pane.querySelector(".cross"), brush = pane.querySelector(".brush");
    const times = map.querySelector(".times"), reset = $("map-reset");
    const names = [...map.querySelectorAll(".hosts")], pixels = new Map();
    let { rows, fold } = maps[0];
    let shown = 0, from = 0, to = bins, row = 0, bin = 0, pressed = null;
    reset.parentElement.hidden = false;

    function levels(index) {
      if (!pixels.has(index)) pixels.set(index, pixelsOf(images[index], bins, rows));
      return pixels.get(index);
    }
    function words() {
      const rgba = levels(shown), at = 4 * (row * bins + bin);
      const absent = rgba[at + 3] > 0 && Math.abs(rgba[at] - rgba[at + 2]) < 24;
      const first = row * fold, last = first + fold - 1;
      const late = highest * (rgba[at + 3] / 255) ** 2;
      const named = maps[shown].names[row];
      const who = named ? named + ", the mean" : fold > 1 ? "ranks " + first + "–" + last + ", the latest" : "rank " + first + host(first);
      const value = absent ? "took part in nothing then" :
        rgba[at + 3] === 255 ? ms(late) + " late or more, on average" :
        rgba[at + 3] ? ms(late) + " late, on average" : "on time";
      return who + "\n" + value + "\n" + seconds(bin * binS) + " to " + seconds((bin + 1) * binS);
    }
    function mark(x, y) {
      const box = pane.getBoundingClientRect(), wide = box.width / (to - from), tall = box.height / rows;
      cross.style.left = (bin - from) * wide + "px"; cross.style.width = wide + "px";
      cross.style.top = row * tall + "px"; cross.style.height = tall + "px";
      cross.hidden = false;
      say(words(), x ?? box.left + (bin - from + 0.5) * wide, y ?? box.top + (row + 0.5) * tall);
    }
    function zoom(begin, end) {
      const width = clamp(Math.round(end - begin), 4, bins);
      from = clamp(Math.round(begin), 0, bins - width); to = from + width;
      for (const image of images) {
        image.style.width = 100 * bins / width + "%";
        image.style.left = -100 * from / width + "%";
      }
      reset.disabled = width === bins;
      const span = width * binS, rough = span / 6, power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
      times.replaceChildren();
      for (let t = Math.ceil(from * binS / step) * step; t <= to * binS * 1.0001; t += step) {
        const label = document.createElement("span");
        label.textContent = seconds(t) === "0" ? "0" : seconds(t);
        label.style.left = 100 * (t - from * binS) / span + "%";
        times.append(label);
      }
    }
    const binAt = (event) => {
      const box = pane.getBoundingClientRect();
      return from + clamp((event.clientX - box.left) / box.width, 0, 0.99999) * (to - from);
    };
    pane.addEventListener("pointerdown", (event) => {
      if (event.button || event.pointerType === "touch") return;
      event.preventDefault(); pressed = binAt(event); pane.setPointerCapture(event.pointerId); map.focus();
    });
    pane.addEventListener("pointermove", (event) => {
      const box = pane.getBoundingClientRect();
      bin = Math.floor(binAt(event));
      row = Math.floor(clamp((event.clientY - box.top) / box.height, 0, 0.99999) * rows);
      mark(event.clientX, event.clientY);
      if (pressed === null) return;
      const [low, high] = [Math.min(pressed, binAt(event)), Math.max(pressed, binAt(event))];
      brush.style.left = 100 * (low - from) / (to - from) + "%";
      brush.style.width = 100 * (high - low) / (to - from) + "%";
      brush.hidden = false;
    });
    pane.addEventListener("pointerup", (event) => {
      if (pressed === null) return;
      const end = binAt(event), begin = pressed;
      pressed = null; brush.hidden = true;
      if (Math.abs(end - begin) > (to - from) / 60) zoom(Math.min(begin, end), Math.max(begin, end));
    });
    pane.addEventListener("dblclick", () => zoom(0, bins));
    const leave = () => { cross.hidden = true; hush(); };
    pane.addEventListener("pointerleave", () => { if (pressed === null) leave(); });
    map.addEventListener("blur", leave);
    reset.addEventListener("click", () => zoom(0, bins));
    map.addEventListener("keydown", (event) => {
      const width = to - from, middle = bin + 0.5;
      const act = {
        ArrowLeft: () => { bin -= 1; }, ArrowRight: () => { bin += 1; },
        ArrowUp: () => { row -= 1; }, ArrowDown: () => { row += 1; },
        "+": () => zoom(middle - width / 4, middle + width / 4), "=": () => zoom(middle - width / 4, middle + width / 4),
        "-": () => zoom(middle - width, middle + width), Escape: () => zoom(0, bins),
      }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
      bin = clamp(bin, 0, bins - 1); row = clamp(row, 0, rows - 1);
      if (bin < from || bin >= to) zoom(bin - width / 2, bin + width / 2);
      if (event.key !== "Escape") mark();
    });
    if ($("map-group")) $("map-group").addEventListener("change", (event) => {
      shown = Number(event.target.value);
      images.forEach((image, index) => { image.hidden = index !== shown; });
      // The maps of ranks share the names of rows; each of the others has its own.
      const ranked = maps.filter((each) => !each.names.length).length;
      names.forEach((each, index) => { each.hidden = index !== Math.max(0, shown - ranked + 1); });
      ({ rows, fold } = maps[shown]);
      row = Math.min(row, rows - 1);
      map.style.setProperty("--tall", maps[shown].height + "px");
      leave();
    });
  }

  // Traffic between many hosts.
  if (data.traffic) {
    const { hosts, highest } = data.traffic, image = $("picture").querySelector("img");
    let rgba = null;
    image.addEventListener("pointermove", (event) => {
      rgba = rgba || pixelsOf(image, hosts.length, hosts.length);
      const box = image.getBoundingClientRect();
      const to = Math.floor(clamp((event.clientX - box.left) / box.width, 0, 0.9999) * hosts.length);
      const from = Math.floor(clamp((event.clientY - box.top) / box.height, 0, 0.9999) * hosts.length);
      const at = 4 * (from * hosts.length + to), grey = Math.abs(rgba[at] - rgba[at + 2]) < 24;
      const amount = from === to ? "within the host" : grey || !rgba[at + 3] ? "nothing" :
        "about " + bytes(highest * (rgba[at + 3] / 255) ** 2);
      say(hosts[from] + " → " + hosts[to] + "\n" + amount, event.clientX, event.clientY);
    });
    image.addEventListener("pointerleave", hush);
  }

  // On paper, what was chosen stands as text.
  for (const select of document.querySelectorAll(".controls select"))
    select.addEventListener("change", () => {
      select.closest(".controls").querySelector(".printed").textContent = select.selectedOptions[0].textContent;
    });

  // Curves: one is chosen, its op's others stand behind it.
  const chosen = $("curve");
  if (chosen) {
    const chart = $("curves"), curves = [...chart.querySelectorAll(".curve")];
    let dot = -1;
    const dots = () => [...chart.querySelectorAll(".curve.on .own circle")];
    chosen.addEventListener("change", () => {
      const own = curves.find((curve) => curve.dataset.id === chosen.value);
      for (const curve of curves) {
        curve.classList.toggle("on", curve === own);
        curve.classList.toggle("same", curve.dataset.op === own.dataset.op);
      }
      own.parentNode.append(own);
      $("peers-are").textContent = own.dataset.peers;
      dot = -1;
    });
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], all = dots();
      if (!step) return;
      event.preventDefault();
      dot = clamp(dot + step, 0, all.length - 1);
      all.forEach((each, index) => each.classList.toggle("at", index === dot));
      const box = all[dot].getBoundingClientRect();
      say(all[dot].dataset.tip, box.right, box.top);
    });
    chart.addEventListener("blur", () => { dots().forEach((each) => each.classList.remove("at")); hush(); });
    const first = curves.find((curve) => curve.classList.contains("on"));
    if (first) first.parentNode.append(first);
  }

  // Tables: sort by a column, filter by words or by group.
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent) return;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const text = head.classList.contains("t");
        const down = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : !text;
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const value = (row) => {
          const cell = row.cells[column];
          return text ? cell.textContent : Number(cell.dataset.v ?? parseFloat(cell.textContent));
        };
        const sorted = [...body.rows].sort((a, b) => {
          const [x, y] = [value(a), value(b)];
          return (text ? x.localeCompare(y, "en", { numeric: true }) : x - y) * (down ? -1 : 1);
        });
        body.append(...sorted);
        if (table.dataset.folded) table.dispatchEvent(new Event("refold"));
      });
    });
  }
  // Long tables show their beginning; filtering looks at all of it.
  for (const table of document.querySelectorAll("table.long")) {
    const rows = [...table.tBodies[0].rows], first = 20;
    if (rows.length <= first + 5) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "fold";
    const fold = (on) => {
      [...table.tBodies[0].rows].forEach((row, index) => { row.hidden = on && index >= first; });
      button.textContent = on ? "show all " + rows.length + " rows" : "show the first " + first;
      table.dataset.folded = on ? "1" : "";
    };
    button.addEventListener("click", () => fold(!table.dataset.folded));
    table.closest(".scroll").after(button);
    table.addEventListener("refold", () => { button.hidden = false; fold(true); });
    table.addEventListener("unfold", () => { button.hidden = true; });
    fold(true);
  }
  for (const filter of document.querySelectorAll("[data-filters]")) {
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase(), table = $(filter.dataset.filters);
      table.dispatchEvent(new Event(words ? "unfold" : "refold"));
      if (!words && table.classList.contains("long") && table.dataset.folded) return;
      for (const row of table.tBodies[0].rows) {
        row.hidden = filter.tagName === "SELECT" ? words !== "" && row.dataset.group.toLowerCase() !== words :
          !row.textContent.toLowerCase().includes(words);
      }
    });
  }
})();
