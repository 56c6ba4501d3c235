// Read the page's data: the samples of a query, sums of weights, and the query at a place. This file does not use the DOM.
"use strict";

const NOTHING = 65535;
const LARGEST = 32767;

function unpack(base64, Kind) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Kind(bytes.buffer);
}

/** Return the queries with typed arrays: `numbers`; `places`, 2 or 4 numbers a query; `grid`, row and column of a query. */
function readQueries(queries) {
  return {
    ...queries,
    numbers: unpack(queries.numbers, Uint32Array),
    places: unpack(queries.places, Float32Array),
    width: queries.boxes ? 4 : 2,
    grid: queries.grid === null ? null : unpack(queries.grid, Uint16Array),
  };
}

/** Return a call with typed arrays. */
function readLook(look) {
  return {
    ...look,
    ends: unpack(look.ends, Uint32Array),
    camera: unpack(look.camera, Uint16Array),
    locations: unpack(look.locations, Uint16Array),
    weights: unpack(look.weights, Int16Array),
  };
}

/** Return the samples of a query, without samples of weight 0. x and y are null if a sample reads nothing. */
function samplesOf(look, index) {
  const [ownHeads, ownLevels] = look.shared;
  const {heads, levels, points} = look;
  const samples = [];
  for (let block = index ? look.ends[index - 1] : 0; block < look.ends[index]; block++) {
    for (let head = 0; head < heads; head++) {
      for (let level = 0; level < levels; level++) {
        for (let point = 0; point < points; point++) {
          const stored = look.weights[((block * heads + head) * levels + level) * points + point];
          if (stored === 0) continue;
          const own = (block * ownHeads + (ownHeads > 1 ? head : 0)) * ownLevels + (ownLevels > 1 ? level : 0);
          const place = 2 * (own * points + point);
          const nothing = look.locations[place] === NOTHING;
          const at = (i) => (nothing ? null : look.locations[place + i] / 32767 - 0.5);
          const weight = (stored / LARGEST) * look.largest;
          samples.push({camera: look.camera[block], head, level, point, x: at(0), y: at(1), weight});
        }
      }
    }
  }
  return samples;
}

/** Return the samples that pass the filters. */
function shownOf(samples, heads, levels, least) {
  return samples.filter((s) => s.x !== null && heads.has(s.head) && levels.has(s.level) && Math.abs(s.weight) >= least);
}

/** Return sums of absolute weights: of samples that read, of samples that read nothing, and by head, level and camera. */
function sumsOf(samples, heads, levels, cameras) {
  const zeros = (n) => new Array(n).fill(0);
  const sums = {read: 0, lost: 0, reading: 0, losing: 0, head: zeros(heads), level: zeros(levels), camera: zeros(cameras)};
  for (const sample of samples) {
    const weight = Math.abs(sample.weight);
    if (sample.x === null) {
      sums.losing++;
      sums.lost += weight;
      continue;
    }
    sums.reading++;
    sums.read += weight;
    for (const axis of ["head", "level", "camera"]) sums[axis][sample[axis]] += weight;
  }
  return sums;
}

/** Return the index of the query with the least cost; `otherwise` if every cost is infinite. */
function cheapest(queries, cost, otherwise = 0) {
  let [best, least] = [otherwise, Infinity];
  for (let i = 0; i < queries.numbers.length; i++) {
    const own = cost(i);
    if (own < least) [best, least] = [i, own];
  }
  return best;
}

/** Return the index of the query nearest to (x, y); aspect is the plane's width over its height. */
function nearestTo(queries, x, y, aspect) {
  const {places, width} = queries;
  return cheapest(queries, (i) => ((places[i * width] - x) * aspect) ** 2 + (places[i * width + 1] - y) ** 2);
}

/** Return the index of the next query in a direction, (1, 0) for right and (0, 1) for down; the same index if there is none. */
function nextTo(queries, index, right, down, aspect) {
  const {places, width} = queries;
  const cost = (i) => {
    const dx = (places[i * width] - places[index * width]) * aspect;
    const dy = places[i * width + 1] - places[index * width + 1];
    const along = dx * right + dy * down;
    return along > 1e-6 ? along + 3 * (Math.abs(dx * down) + Math.abs(dy * right)) : Infinity;
  };
  return cheapest(queries, cost, index);
}

/** Return the index of the query with this number, or of the shown query with the nearest number. */
function indexOf(queries, number) {
  return cheapest(queries, (i) => Math.abs(queries.numbers[i] - number));
}

/** Return the index of the first query to show: of the queries that read the most cameras, the nearest to the middle. */
function firstOf(look, queries) {
  const counts = Array.from(look.ends, (end, i) => end - (i ? look.ends[i - 1] : 0));
  const most = counts.reduce((a, b) => Math.max(a, b), 0);
  const away = (i) => Math.hypot(queries.places[i * queries.width] - 0.5, queries.places[i * queries.width + 1] - 0.5);
  return cheapest(queries, (i) => (counts[i] === most ? away(i) : Infinity));
}

/** Return corner and side of a square around samples that lie close together, in fractions of the width. Return null if the
 *  samples lie too far apart for a loupe. */
function closeUp(samples, width, height) {
  if (!samples.length) return null;
  const [xs, ys] = [samples.map((s) => s.x), samples.map((s) => (s.y * height) / width)];
  const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const side = Math.max(1.5 * Math.max(right - left, bottom - top), 0.045);
  if (side > 0.22) return null;
  const within = (start, most) => Math.min(Math.max(start, 0), Math.max(most - side, 0));
  return {x: within((left + right - side) / 2, 1), y: within((top + bottom - side) / 2, height / width), side};
}

/** Return a number as a short text, such as "0.071". */
function brief(number) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  return size >= 100 || size < 0.001 ? number.toPrecision(2) : number.toFixed(size >= 10 ? 1 : size >= 0.9995 ? 2 : 3);
}

// Okabe and Ito's colours, which colour-blind people can tell apart.
const COLOURS = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#bbbbbb"];
const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

function colourOfShare(share) {
  const place = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const mixed = VIRIDIS[low].map((c, i) => Math.round(c + (VIRIDIS[low + 1][i] - c) * (place - low)));
  return `rgb(${mixed.join(" ")})`;
}

function colourOf(sample, by, largest) {
  return by === "weight" ? colourOfShare(Math.abs(sample.weight) / largest) : COLOURS[sample[by] % COLOURS.length];
}

// The corners of each level's mark; no corners: a circle. All marks have about the circle's area.
const SHAPES = [
  [],
  [[-0.88, -0.88], [0.88, -0.88], [0.88, 0.88], [-0.88, 0.88]],
  [[0, -1.3], [1.2, 0.8], [-1.2, 0.8]],
  [[0, -1.25], [1.25, 0], [0, 1.25], [-1.25, 0]],
];

function shapeOf(level) {
  return SHAPES[level % SHAPES.length];
}
