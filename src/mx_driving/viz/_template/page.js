// Draw the plane and the pictures, and follow mouse, touch and keys.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const queries = readQueries(data.queries);
  const looks = data.looks.map(readLook);
  const at = (id) => document.getElementById(id);
  const state = {look: 0, index: 0, held: false, colour: "weight", apart: false, heads: new Set(), levels: new Set()};
  let images = [];
  let planeImage = null;
  let panels = [];
  let samples = [];

  const look = () => looks[state.look];
  const words = () => (look().grouped ? {head: "group", level: "scale"} : {head: "head", level: "level"});
  const plural = (n, word) => `${n.toLocaleString("en")} ${word === "query" && n !== 1 ? "queries" : n === 1 ? word : word + "s"}`;
  const aspect = () => {
    if (data.plane.width) return data.plane.width / data.plane.height;
    if (!queries.grid) return 1;
    const last = (axis) => queries.grid.reduce((most, n, i) => (i % 2 === axis ? Math.max(most, n) : most), 0) + 1;
    return last(1) / last(0);
  };
  const planeAspect = Math.min(Math.max(aspect(), 0.5), 2.5);

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  function load(uri) {
    return new Promise((done, failed) => {
      const image = new Image();
      image.onload = () => done(image);
      image.onerror = failed;
      image.src = uri;
    });
  }

  /** Give a canvas as many pixels as the screen has for it. Return its cleared context, which draws in CSS pixels. */
  function contextOf(canvas, ratio) {
    const [width, scale] = [canvas.clientWidth, window.devicePixelRatio || 1];
    const height = width / ratio;
    const sizes = [Math.round(width * scale), Math.round(height * scale)];
    if (canvas.width !== sizes[0] || canvas.height !== sizes[1]) [canvas.width, canvas.height] = sizes;
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    return {context, width, height};
  }

  // The plane

  function drawPlane() {
    const canvas = at("plane");
    const {context, width, height} = contextOf(canvas, planeAspect);
    if (!width) return;
    context.imageSmoothingEnabled = Boolean(planeImage) && planeImage.width > 256;
    if (planeImage) context.drawImage(planeImage, 0, 0, width, height);
    const spacing = Math.sqrt((width * height) / queries.numbers.length);
    if (!planeImage || spacing > 9) drawDots(context, width, height, spacing);
    const [x, y] = placeOf(state.index, width, height);
    drawCross(context, x, y, width, height, queries.width === 4 ? boxOf(state.index, width, height) : null);
  }

  function themed(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name);
  }

  function placeOf(index, width, height) {
    const inside = (share) => Math.min(Math.max(share, 0), 1);
    return [inside(queries.places[index * queries.width]) * width, inside(queries.places[index * queries.width + 1]) * height];
  }

  function boxOf(index, width, height) {
    const [x, y, w, h] = queries.places.subarray(index * 4, index * 4 + 4);
    return [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height];
  }

  function drawDots(context, width, height, spacing) {
    const radius = Math.min(2.2, Math.max(0.6, 0.22 * spacing));
    context.fillStyle = planeImage ? "#ffffffb0" : themed("--dot");
    context.beginPath();
    for (let i = 0; i < queries.numbers.length; i++) {
      const [x, y] = placeOf(i, width, height);
      context.moveTo(x + radius, y);
      context.arc(x, y, radius, 0, 7);
    }
    context.fill();
  }

  function drawCross(context, x, y, width, height, box) {
    const colours = planeImage ? ["#000000a0", "#ffffff"] : [themed("--empty"), themed("--accent")];
    for (const [colour, line] of [[colours[0], 3.4], [colours[1], 1.6]]) {
      context.strokeStyle = colour;
      context.lineWidth = line;
      context.beginPath();
      if (box) context.rect(...box);
      for (const [dx, dy] of [[1, 0], [-1, 0], [0, 1], [0, -1]]) {
        context.moveTo(x + 9 * dx, y + 9 * dy);
        context.lineTo(x + 18 * dx, y + 18 * dy);
      }
      context.moveTo(x + 7, y);
      context.arc(x, y, 7, 0, 7);
      context.stroke();
    }
    context.fillStyle = state.held ? "#ff9f1c" : colours[1];
    context.beginPath();
    context.arc(x, y, 2.6, 0, 7);
    context.fill();
  }

  // The pictures

  function buildPanels() {
    const apart = state.apart || data.cameras.some((camera) => camera.apart);
    panels = data.cameras.flatMap((camera, number) => {
      const levels = apart ? [...Array(look().levels).keys()] : [null];
      return levels.map((level) => buildPanel(camera, number, level));
    });
    at("panels").replaceChildren(...panels.map((panel) => panel.figure));
    at("panels").classList.toggle("one", panels.length === 1);
    at("panels").classList.toggle("rows", apart && look().levels > 1 && look().levels <= 5);
    at("panels").style.setProperty("--levels", look().levels);
    arrangePanels();
  }

  /** Set the fewest columns with which all pictures fit the window; if none fit, the most columns of at least 270 pixels. */
  function arrangePanels() {
    const [gap, caption, least] = [14, 32, 270];
    const width = at("panels").clientWidth;
    const room = window.innerHeight - at("panels").getBoundingClientRect().top - window.scrollY;
    const ratio = panels.reduce((least, {camera}) => Math.min(least, camera.width / camera.height), Infinity);
    const most = Math.max(1, Math.min(panels.length, Math.floor((width + gap) / (least + gap))));
    let columns = 1;
    const height = () => Math.ceil(panels.length / columns) * ((width - gap * (columns - 1)) / columns / ratio + caption + gap);
    while (columns < most && height() > room) columns++;
    at("panels").style.setProperty("--columns", columns);
    for (const {canvas, camera} of panels) {
      canvas.style.maxWidth = `${Math.max(least, (0.9 * window.innerHeight * camera.width) / camera.height)}px`;
    }
  }

  /** Let a picture take the whole width; if it does already, put it back into its column. */
  function enlarge(panel) {
    const large = panel.figure.classList.toggle("large");
    panel.button.setAttribute("aria-pressed", String(large));
    panel.button.textContent = large ? "smaller" : "larger";
    drawPanels();
    panel.figure.scrollIntoView({block: "nearest"});
  }

  function buildPanel(camera, number, level) {
    const canvas = make("canvas");
    canvas.setAttribute("role", "img");
    const name = make("span", {className: "name"});
    const share = make("span", {className: "share"}, make("span"), make("span"));
    const button = make("button", {type: "button", textContent: "larger"});
    button.setAttribute("aria-pressed", "false");
    const figure = make("figure", {}, canvas, make("figcaption", {}, name, share, button));
    const source = images[number][camera.apart ? level : 0];
    const shape = level === null ? null : look().shapes[number][level];
    const resolution = shape && `${words().level} ${level} (${shape[0]} × ${shape[1]})`;
    const title = [data.cameras.length > 1 || level === null ? camera.name : "", resolution].filter(Boolean).join(", ");
    name.textContent = title;
    button.setAttribute("aria-label", `Enlarge ${title}`);
    const panel = {camera, number, level, figure, canvas, share, button, title, marks: []};
    panel.source = shape && !camera.apart ? coarse(source, shape) : source;
    panel.smooth = panel.source === source && source.width >= 64;
    canvas.addEventListener("pointermove", (event) => showTip(panel, event));
    canvas.addEventListener("pointerdown", (event) => showTip(panel, event));
    canvas.addEventListener("pointerleave", () => (at("tip").hidden = true));
    canvas.addEventListener("click", (event) => event.pointerType === "mouse" && panels.length > 1 && enlarge(panel));
    button.addEventListener("click", () => enlarge(panel));
    return panel;
  }

  /** Return the picture reduced to the pixels of a level; unchanged if it has fewer pixels. */
  function coarse(source, [height, width]) {
    if (width * height > source.width * source.height) return source;
    const canvas = make("canvas", {width, height});
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(source, 0, 0, width, height);
    return canvas;
  }

  function drawPanels() {
    const shown = shownOf(samples, state.heads, state.levels, leastWeight());
    const sums = sumsOf(samples, look().heads, look().levels, data.cameras.length);
    const largest = Math.max(...samples.map((s) => Math.abs(s.weight)), 1e-30);
    for (const panel of panels) {
      const here = shown.filter((s) => s.camera === panel.number && (panel.level === null || s.level === panel.level));
      here.sort((a, b) => Math.abs(a.weight) - Math.abs(b.weight));
      drawPanel(panel, here, largest);
      describePanel(panel, here, sums);
    }
    at("largest").textContent = brief(samples.length ? largest : 0);
  }

  function describePanel(panel, here, sums) {
    const weight = here.reduce((sum, s) => sum + Math.abs(s.weight), 0);
    const share = sums.read ? `${Math.round((100 * weight) / sums.read)} %` : "0 %";
    panel.figure.classList.toggle("unread", !here.length);
    panel.share.firstChild.textContent = here.length ? `${plural(here.length, "sample")}, ` : "";
    panel.share.lastChild.textContent = here.length ? share : "not read";
    panel.canvas.setAttribute("aria-label", `${panel.title}: ${panel.share.textContent}`);
  }

  function drawPanel(panel, here, largest) {
    const ratio = panel.camera.width / panel.camera.height;
    const {context, width, height} = contextOf(panel.canvas, ratio);
    panel.marks = [];
    if (!width) return;
    context.imageSmoothingEnabled = panel.smooth;
    context.imageSmoothingQuality = "high";
    context.drawImage(panel.source, 0, 0, width, height);
    const close = at("loupe").checked ? closeUp(here, panel.camera.width, panel.camera.height) : null;
    const full = Math.min(Math.max(0.021 * width, 4.5), 10);
    const mark = (sample, x, y, most) => {
      drawMark(context, sample, x, y, Math.max(most * Math.sqrt(Math.abs(sample.weight) / largest), 1.6), largest);
      panel.marks.push({sample, x, y});
    };
    const edge = (place, most) => Math.min(Math.max(place, 0), most);
    for (const s of here) mark(s, edge(s.x * width, width), edge(s.y * height, height), close ? 0.6 * full : full);
    if (close) drawLoupe(panel, context, close, here, width, height, (s, x, y) => mark(s, x, y, full));
  }

  function drawLoupe(panel, context, close, here, width, height, mark) {
    const side = Math.min(0.56 * height, 0.36 * width, 240);
    const [x0, y0] = [close.x * width, close.y * width];
    const left = x0 + (close.side * width) / 2 > width / 2 ? 6 : width - side - 6;
    const top = y0 + (close.side * width) / 2 > height / 2 ? 6 : height - side - 6;
    const zoom = side / (close.side * width);
    for (const [colour, line] of [["#000000a0", 3], ["#ffffff", 1.5]]) {
      context.strokeStyle = colour;
      context.lineWidth = line;
      context.strokeRect(x0, y0, close.side * width, close.side * width);
      context.strokeRect(left, top, side, side);
    }
    context.save();
    context.beginPath();
    context.rect(left, top, side, side);
    context.clip();
    context.setTransform(context.getTransform().translate(left - x0 * zoom, top - y0 * zoom).scale(zoom));
    context.drawImage(panel.source, 0, 0, width, height);
    context.restore();
    context.save();
    context.beginPath();
    context.rect(left, top, side, side);
    context.clip();
    for (const s of here) mark(s, left + (s.x * width - x0) * zoom, top + (s.y * height - y0) * zoom);
    context.restore();
  }

  /** Draw the mark of a sample, filled if the weight is positive and hollow if it is negative. */
  function drawMark(context, sample, x, y, radius, largest) {
    const outline = new Path2D();
    const corners = shapeOf(sample.level);
    if (corners.length) corners.forEach(([dx, dy], i) => outline[i ? "lineTo" : "moveTo"](x + dx * radius, y + dy * radius));
    else outline.arc(x, y, radius, 0, 7);
    outline.closePath();
    context.lineJoin = "round";
    context.strokeStyle = "#000000b0";
    context.lineWidth = 2.6;
    context.stroke(outline);
    const colour = colourOf(sample, state.colour, largest);
    context.strokeStyle = sample.weight > 0 ? "#ffffff" : colour;
    context.lineWidth = 1.1;
    context.fillStyle = colour;
    if (sample.weight > 0) context.fill(outline);
    context.stroke(outline);
  }

  function showTip(panel, event) {
    const box = panel.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const near = panel.marks.map((m) => ({...m, distance: Math.hypot(m.x - x, m.y - y)})).filter((m) => m.distance < 14);
    const tip = at("tip");
    tip.hidden = !near.length;
    if (!near.length) return;
    const {sample} = near.reduce((a, b) => (b.distance < a.distance ? b : a));
    const {head, level} = words();
    const named = [look().heads > 1 && `${head} ${sample.head}`, look().levels > 1 && `${level} ${sample.level}`];
    const [px, py] = pixelOf(sample);
    tip.textContent = [...named, `pixel (${px}, ${py})`, `weight ${brief(sample.weight)}`].filter(Boolean).join(" · ");
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 6)}px`;
    tip.style.top = `${Math.max(event.clientY - tip.offsetHeight - 10, 4)}px`;
  }

  /** Return the position of a sample on its level, in pixels whose centres are whole numbers. */
  function pixelOf(sample) {
    const [height, width] = look().shapes[sample.camera][sample.level];
    return [(sample.x * width - 0.5).toFixed(1), (sample.y * height - 0.5).toFixed(1)];
  }

  // The readout and the filters

  function buildRows(axis) {
    const count = axis === "head" ? look().heads : look().levels;
    const group = at(axis + "s");
    const word = words()[axis];
    group.hidden = count < 2;
    state[axis + "s"] = new Set(Array(count).keys());
    const all = make("button", {type: "button", textContent: "all"});
    all.setAttribute("aria-label", `Show all ${word}s`);
    all.addEventListener("click", () => choose(axis, [...Array(count).keys()]));
    const title = make("h2", {textContent: `Weight by ${word}`});
    group.setAttribute("aria-label", `Weight by ${word}`);
    group.replaceChildren(make("div", {className: "rows-head"}, title, all));
    for (let i = 0; i < count; i++) group.append(buildRow(axis, word, i));
  }

  function buildRow(axis, word, number) {
    const bar = make("span", {className: "bar"}, make("i"));
    const row = make(
      "button", {type: "button", className: "row"}, swatch(axis, number),
      make("span", {className: "name", textContent: `${word} ${number}`}), bar, make("span", {className: "sum"}),
    );
    row.dataset.number = number;
    row.setAttribute("aria-pressed", "true");
    row.addEventListener("click", (event) => {
      const on = state[axis + "s"];
      if (event.detail === 2 || event.shiftKey) return choose(axis, [number]);
      choose(axis, on.has(number) ? [...on].filter((n) => n !== number) : [...on, number]);
    });
    return row;
  }

  function swatch(axis, number) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", "-1.6 -1.6 3.2 3.2");
    svg.setAttribute("aria-hidden", "true");
    const corners = axis === "level" ? shapeOf(number) : [];
    const mark = document.createElementNS(space, corners.length ? "polygon" : "circle");
    if (corners.length) mark.setAttribute("points", corners.map((corner) => corner.join(",")).join(" "));
    else mark.setAttribute("r", "1");
    svg.append(mark);
    return svg;
  }

  function choose(axis, numbers) {
    state[axis + "s"] = new Set(numbers);
    update();
  }

  function updateRows(axis, sums) {
    const largest = Math.max(...sums, 1e-30);
    for (const row of at(axis + "s").querySelectorAll(".row")) {
      const number = Number(row.dataset.number);
      const coloured = state.colour === axis ? COLOURS[number % COLOURS.length] : "";
      row.setAttribute("aria-pressed", String(state[axis + "s"].has(number)));
      row.querySelector(".bar i").style.width = `${(100 * sums[number]) / largest}%`;
      row.querySelector(".bar i").style.background = coloured;
      row.querySelector("svg").firstChild.style.fill = coloured || (axis === "level" ? "var(--faint)" : "none");
      row.querySelector(".sum").textContent = brief(sums[number]);
    }
  }

  function leastWeight() {
    return look().largest * (at("least").value / 100) ** 2;
  }

  function updateReadout() {
    const sums = sumsOf(samples, look().heads, look().levels, data.cameras.length);
    at("where").textContent = whereabouts();
    if (document.activeElement !== at("number")) at("number").value = queries.numbers[state.index];
    at("label").textContent = queries.labels ? queries.labels[state.index] : "";
    at("label").hidden = !queries.labels;
    at("summary").textContent = summary(sums);
    updateRows("head", sums.head);
    updateRows("level", sums.level);
    at("least-value").textContent = at("least").value === "0" ? "all" : brief(leastWeight());
    at("scale").hidden = state.colour !== "weight";
    updateTable();
  }

  function whereabouts() {
    const [x, y] = queries.places.subarray(state.index * queries.width, state.index * queries.width + 2);
    if (data.plane.extent) {
      const [x0, x1, y0, y1] = data.plane.extent;
      const [ahead, left] = [x1 - y * (x1 - x0), y1 - x * (y1 - y0)];
      const metres = (n, plus, minus) => `${Math.abs(n).toFixed(1)} m ${n < 0 ? minus : plus}`;
      return `${metres(ahead, "ahead", "behind")}, ${metres(left, "left", "right")}`;
    }
    if (queries.grid) return `row ${queries.grid[2 * state.index]}, column ${queries.grid[2 * state.index + 1]}`;
    return `x ${x.toFixed(3)}, y ${y.toFixed(3)}`;
  }

  function summary(sums) {
    const seeing = sums.camera.filter((n) => n > 0).length;
    const of = data.cameras.length > 1 ? ` in ${seeing} of ${plural(data.cameras.length, "camera")}` : "";
    if (!sums.reading && !sums.losing) return "This query reads nothing.";
    const read = `${plural(sums.reading, "sample")}${of}, weight ${brief(sums.read)}.`;
    if (!sums.losing) return read;
    const share = Math.round((100 * sums.lost) / (sums.read + sums.lost));
    return `${read} ${plural(sums.losing, "more sample")} off the map ${sums.losing === 1 ? "holds" : "hold"} ${share} % of the weight.`;
  }

  function updateTable() {
    if (!at("table").open) return;
    const shown = shownOf(samples, state.heads, state.levels, leastWeight());
    shown.sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));
    const cells = (s) => [data.cameras[s.camera].name, s.head, s.level, ...pixelOf(s), brief(s.weight)];
    const rows = shown.slice(0, 12).map((s) => make("tr", {}, ...cells(s).map((text) => make("td", {textContent: text}))));
    at("rows").replaceChildren(...rows);
  }

  // Updates

  let waiting = false;
  function update() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      samples = samplesOf(look(), state.index);
      drawPlane();
      drawPanels();
      updateReadout();
    });
  }

  function go(index) {
    if (index === state.index) return;
    state.index = index;
    remember();
    update();
  }

  let later = 0;
  function remember() {
    clearTimeout(later); // browsers limit how often a page may change its address
    later = setTimeout(() => {
      const call = looks.length > 1 ? `&call=${state.look + 1}` : "";
      history.replaceState(null, "", `#query=${queries.numbers[state.index]}${call}`);
    }, 250);
  }

  function followAddress() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const call = Number(wanted.get("call")) - 1;
    if (looks[call]) state.look = call;
    const number = Number(wanted.get("query"));
    state.index = wanted.has("query") && Number.isFinite(number) ? indexOf(queries, number) : firstOf(look(), queries);
  }

  function setLook(number) {
    state.look = number;
    at("call").value = number;
    const {head, level} = words();
    at("colour-head").hidden = look().heads < 2;
    at("colour-level").hidden = look().levels < 2;
    at("colours").hidden = look().heads < 2 && look().levels < 2;
    at("apart").hidden = look().levels < 2 || data.cameras.some((camera) => camera.apart);
    at("colour-head").lastChild.textContent = at("th-head").textContent = head;
    at("colour-level").lastChild.textContent = at("th-level").textContent = level;
    at("levels-name").textContent = level === "scale" ? "Scales" : "Levels";
    at("facts").textContent = facts();
    buildRows("head");
    buildRows("level");
    buildPanels();
  }

  function facts() {
    const {operator, heads, levels, points, unknown} = look();
    const {head, level} = words();
    const counts = [plural(heads, head), plural(levels, level), plural(points, "point"), plural(queries.total, "query")];
    if (data.cameras.length > 1) counts.unshift(plural(data.cameras.length, "camera"));
    const lost = unknown ? [`${plural(unknown, "weight")} that are NaN or infinite are left out`] : [];
    return [operator, ...counts, ...lost].join("\u00a0· ");
  }

  function setHeld(held) {
    state.held = held;
    at("hold").setAttribute("aria-pressed", String(held));
    update();
  }

  function pointed(event) {
    const box = at("plane").getBoundingClientRect();
    return nearestTo(queries, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height, planeAspect);
  }

  function listenToPlane() {
    const plane = at("plane");
    plane.addEventListener("pointermove", (event) => {
      const dragged = event.buttons > 0;
      if (dragged || (event.pointerType === "mouse" && !state.held)) go(pointed(event));
    });
    plane.addEventListener("pointerdown", (event) => {
      plane.setPointerCapture(event.pointerId);
      const index = pointed(event);
      if (event.pointerType === "mouse") setHeld(!(state.held && index === state.index));
      go(index);
    });
    plane.addEventListener("keydown", (event) => {
      const steps = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      if (steps) {
        let index = state.index;
        for (let i = 0; i < (event.shiftKey ? 5 : 1); i++) index = nextTo(queries, index, ...steps, planeAspect);
        go(index);
      } else if (event.key === "Home") go(0);
      else if (event.key === "End") go(queries.numbers.length - 1);
      else if (event.key === "Enter" || event.key === " ") setHeld(!state.held);
      else return;
      event.preventDefault();
    });
  }

  function listen() {
    listenToPlane();
    at("hold").addEventListener("click", () => setHeld(!state.held));
    at("number").addEventListener("change", () => {
      go(indexOf(queries, Number(at("number").value)));
      at("number").value = queries.numbers[state.index];
    });
    at("call").addEventListener("change", () => {
      setLook(Number(at("call").value));
      remember();
      update();
    });
    for (const radio of document.querySelectorAll("input[name=colour]")) {
      radio.addEventListener("change", () => {
        state.colour = radio.value;
        update();
      });
    }
    for (const radio of document.querySelectorAll("input[name=apart]")) {
      radio.addEventListener("change", () => {
        state.apart = radio.value === "apart";
        buildPanels();
        update();
      });
    }
    at("loupe").addEventListener("change", update);
    at("least").addEventListener("input", update);
    at("table").addEventListener("toggle", updateTable);
    document.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
    window.addEventListener("hashchange", () => {
      followAddress();
      setLook(state.look);
      update();
    });
    new ResizeObserver(() => {
      sizePlane();
      arrangePanels();
      update();
    }).observe(document.body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  }

  /** Limit the plane's height. On a phone, the pictures below the plane need room. */
  function sizePlane() {
    const most = window.innerWidth <= 760 ? 0.34 * window.innerHeight : 0.62 * window.innerHeight;
    at("plane").style.maxWidth = `${Math.round(most * planeAspect)}px`;
    at("plane").style.aspectRatio = String(planeAspect);
  }

  function drawRamp() {
    const context = at("ramp").getContext("2d");
    for (let i = 0; i < 80; i++) {
      context.fillStyle = colourOfShare(i / 79);
      context.fillRect(i, 0, 1, 10);
    }
  }

  async function start() {
    images = await Promise.all(data.cameras.map((camera) => Promise.all(camera.pictures.map(load))));
    planeImage = data.plane.picture === null ? null : await load(data.plane.picture);
    looks.forEach(({name}, number) => at("call").append(make("option", {value: number, textContent: name})));
    at("calls").hidden = looks.length < 2;
    at("number").max = queries.total - 1;
    at("sentence").textContent = queries.sentence;
    at("help-rows").hidden = looks.every(({heads, levels}) => heads < 2 && levels < 2);
    at("help-pictures").hidden = data.cameras.length < 2;
    at("main").hidden = false;
    followAddress();
    setLook(state.look);
    drawRamp();
    listen();
    sizePlane();
    update();
  }

  start();
})();
