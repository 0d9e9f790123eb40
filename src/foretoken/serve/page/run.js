/** A traced run as it arrives: the text by origin, the steps, and acceptance by position. */

import { bar, byId, explain, make, tokenElement } from "./detail.js";

const SVG = "http://www.w3.org/2000/svg";
const [CELL, PITCH, WINDOW] = [14, 16, 8]; // px and px as in page.css; steps of a running mean
const LABEL_STRIDE = 5; // steps from one step number on the axis to the next
const percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(1)} %` : "–");

/** The axis for the number of tokens in a step, from 0 to `max`, with labels that do not overlap. */
function axis(max) {
  const stride = [1, 2, 5, 10].find((n) => max / n <= 8) ?? 20;
  const marks = Array.from({ length: Math.floor(max / stride) + 1 }, (_, i) => {
    const mark = make("span", { class: "tick" }, i * stride);
    mark.style.bottom = `${i * stride * CELL}px`;
    return mark;
  });
  return make("div", { id: "counts" }, ...marks);
}

/** The state of a run, shown as it grows. */
export class TracedRun {
  /** @param {number} numDrafts the most drafts of a step */
  constructor(numDrafts) {
    this.counts = { accepted: 0, resampled: 0, bonus: 0, plain: 0 };
    this.byPosition = Array.from({ length: numDrafts }, () => ({ drafted: 0, accepted: 0 }));
    this.numTokens = 0;
    this.sizes = []; // tokens of each step
    this.points = []; // by step: its point on the line of running means
    this.explained = new WeakMap(); // by element: the trace and likeliest tokens to explain
    this.start = performance.now();
    const svg = document.createElementNS(SVG, "svg");
    this.line = svg.appendChild(document.createElementNS(SVG, "polyline"));
    byId("tokens").replaceChildren();
    byId("steps").replaceChildren(axis(numDrafts + 1), svg);
    byId("steps").style.height = `${(numDrafts + 1) * CELL}px`;
    this.show();
  }

  /** Add a piece: one token, or text without one, which belongs to the last token. @param {import("./api.js").Piece} piece */
  add({ text, trace: [token], top }) {
    if (!token) {
      byId("tokens").lastElementChild?.append(text);
      return;
    }
    const shown = tokenElement(token, text);
    this.explained.set(shown, [token, top]);
    const dropped = token.dropped.map((draft) => {
      const element = tokenElement(draft, (draft.decoded_token ?? "").replaceAll("\n", "⏎"), "s");
      this.explained.set(element, [draft, []]);
      return element;
    });
    const endedText = token.dropped[0]?.position > token.position;
    byId("tokens").append(...(endedText ? [shown, ...dropped] : [...dropped, shown]));
    this.addToStep(token);
    this.counts[token.origin] += 1;
    this.numTokens += 1;
    for (const { draft_index: index, origin } of [token, ...token.dropped]) {
      if (index === null) continue;
      this.byPosition[index].drafted += 1;
      this.byPosition[index].accepted += origin === "accepted";
    }
    this.show();
  }

  /** Add a token to the column of its step, and outlines of the drafts dropped with it. */
  addToStep({ round, origin, dropped }) {
    const steps = byId("steps");
    if (round === this.sizes.length) {
      this.sizes.push(0);
      steps.append(make("div", { class: "step" }, ...(round % LABEL_STRIDE ? [] : [make("span", { class: "tick" }, round)])));
    }
    this.sizes[round] += 1;
    steps.lastElementChild.append(make("i", { class: origin }),
      ...dropped.map((draft) => make("i", { class: `wasted ${draft.origin}` })));
    steps.lastElementChild.title = `Step ${round}, tokens: ${this.sizes[round]}`;
    const recent = this.sizes.slice(-WINDOW);
    const mean = recent.reduce((sum, size) => sum + size, 0) / recent.length;
    this.points[round] = `${round * PITCH + CELL / 2},${-mean * CELL}`;
    this.line.setAttribute("points", this.points.join(" "));
    steps.scrollLeft = steps.scrollWidth;
  }

  show() {
    const sum = (name) => this.byPosition.reduce((total, row) => total + row[name], 0);
    const [steps, tokens] = [this.sizes.length, this.numTokens];
    const [drafted, accepted] = [sum("drafted"), sum("accepted")];
    for (const [origin, count] of Object.entries(this.counts)) byId(`n-${origin}`).textContent = count;
    byId("per-step").textContent = steps ? (tokens / steps).toFixed(2) : "–";
    byId("rate").textContent = percent(accepted, drafted);
    byId("speed").textContent = steps ? (1000 * tokens / (performance.now() - this.start)).toFixed(0) : "–";
    byId("steps").ariaLabel = `${steps} steps made ${tokens} tokens; ${accepted} of ${drafted} drafts were accepted`;
    const drawn = this.byPosition.filter((row) => row.drafted);
    byId("positions").tBodies[0].replaceChildren(...drawn.map((row, i) => make("tr", {},
      make("th", { scope: "row" }, String(i + 1)), bar(row.accepted / row.drafted),
      make("td", {}, `${percent(row.accepted, row.drafted)} (${row.accepted} of ${row.drafted})`))));
  }
}

const MOVES = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };

/** Explain the token under the pointer, or else the focused token; keys move the focus. */
export function watchTokens(current) {
  const [tokens, detail] = [byId("tokens"), byId("detail")];

  function show(element) {
    const explained = current()?.explained.get(element);
    detail.hidden = !explained;
    for (const { classList, dataset } of tokens.children) {
      classList.toggle("same-step", Boolean(explained) && dataset.round === element.dataset.round);
    }
    if (!explained) return;
    detail.replaceChildren(...explain(...explained));
    element.setAttribute("aria-describedby", "detail");
    const at = element.getBoundingClientRect(), height = detail.scrollHeight, under = innerHeight - at.bottom;
    const below = under > Math.min(height + 10, at.top), top = below ? at.bottom + 6 : at.top - 6 - height;
    const left = Math.max(4, Math.min(at.left, innerWidth - detail.offsetWidth - 12)), room = below ? under : at.top;
    Object.assign(detail.style, { top: `${Math.max(4, top)}px`, left: `${left}px`, maxHeight: `${room - 10}px` });
  }

  function move(event) {
    const shown = [...tokens.children].filter((element) => element.offsetParent);
    const step = MOVES[event.key];
    if (!step || !shown.length) return;
    event.preventDefault();
    const to = shown.indexOf(document.activeElement) + step;
    shown[Math.max(0, Math.min(shown.length - 1, to))].focus();
  }

  const focused = () => show(document.activeElement);
  tokens.addEventListener("pointerover", ({ target }) => (target === tokens ? focused() : show(target)));
  tokens.addEventListener("pointerleave", focused);
  tokens.addEventListener("focusin", focused);
  tokens.addEventListener("focusin", ({ target }) => target.scrollIntoView({ block: "nearest" }));
  tokens.addEventListener("focusout", () => show(null));
  tokens.addEventListener("keydown", move);
  document.addEventListener("keydown", (event) => event.key === "Escape" && show(null));
  document.addEventListener("scroll", focused, { passive: true });
}
