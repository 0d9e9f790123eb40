/** Elements of tokens in the text, and the numbers that decided about each token. */

export const byId = (id) => document.getElementById(id);

/** An element; texts become text nodes, so that nothing a model writes is ever markup. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A cell with a bar, `share` of it full. */
export function bar(share) {
  const fill = make("i");
  fill.style.width = `${100 * share}%`;
  return make("td", { class: "bar" }, fill);
}

/** A number to read; `value` has all its digits. Null stays null. */
const number = (value) => (value === null ? null
  : make("data", { value }, String(Number(value.toPrecision(4)))));

/** A token's text as a string literal. @param {import("./api.js").Trace} trace */
const quoted = (trace) => JSON.stringify(trace.decoded_token ?? `<${trace.token_id}>`);

const THRESHOLDS = { standard: "min(1, p/q)", block: "h", synthetic: "the rate that was set" };
const EXPLANATIONS = {
  unread: "Draft dropped: a draft before it was rejected.", plain: "Drawn by the target: no drafts here.",
  bonus: "Drawn by the target: all drafts before it were accepted.",
};

/** How a token came about, in a sentence; `replaced`: the rejected draft that the token replaces. */
function explanation(trace, replaced) {
  if (trace.origin === "rejected") return `Draft rejected: ${trace.reason}.`;
  if (trace.origin === "resampled") {
    return `Drawn by the target in the place of ${quoted(replaced)}, which was rejected: ${replaced.reason}.`;
  }
  if (trace.origin !== "accepted") return EXPLANATIONS[trace.origin];
  if (trace.threshold === null) return "Draft accepted: the target chose the same token.";
  if (trace.u < trace.threshold) return `Draft accepted: u is below ${THRESHOLDS[trace.rule]}.`;
  return "Draft accepted: with drafts after it, the rule took a longer block.";
}

/** A line from 0 to 1, with u as a mark, filled up to the threshold. */
function thresholdLine(trace) {
  const line = make("div", { class: "test", "aria-hidden": "true" }, make("i"), make("b"));
  line.firstChild.style.width = `${100 * trace.threshold}%`;
  line.lastChild.style.left = `${100 * trace.u}%`;
  const words = `The mark is u of ${quoted(trace)}: in the filled part it would be accepted.`;
  return [line, make("p", { class: "note" }, words)];
}

/** A table of the drafts that were dropped in a token's place. */
function droppedTable(dropped) {
  const names = ["draft", "p", "q", "u", "below", ""];
  const head = make("tr", {}, ...names.map((name) => make("td", {}, name)));
  const rows = dropped.map((draft) => make("tr", {},
    make("th", { scope: "row" }, make("s", { class: draft.origin }, quoted(draft))),
    ...[draft.p, draft.q, draft.u, draft.threshold].map((value) => make("td", {}, number(value) || "–")),
    make("td", { class: "why" }, draft.origin)));
  return make("table", {}, make("caption", {}, "Drafts that came to nothing"), head, ...rows);
}

/** A table of the likeliest tokens in a token's place. */
function alternatives(top) {
  const rows = top.map(([text, logprob]) => make("tr", {},
    make("th", { scope: "row" }, JSON.stringify(text)), bar(Math.exp(logprob)),
    make("td", {}, `${(100 * Math.exp(logprob)).toFixed(1)} %`)));
  return make("table", {}, make("caption", {}, "The model's likeliest, before temperature"), ...rows);
}

/** All facts about a token or a draft, and the likeliest tokens in its place. */
export function explain(trace, top) {
  const dropped = trace.dropped ?? [];
  const replaced = trace.origin === "resampled" ? dropped[0] : null;
  const facts = {
    "p, target": number(trace.p), "q, draft": number(trace.q), u: number(trace.u),
    "u below": number(trace.threshold), step: trace.round, position: trace.position,
    rule: trace.rule, drafter: trace.drafter,
  };
  const decided = [trace, replaced].find((each) => typeof each?.threshold === "number");
  return [
    make("p", { class: "head" }, make("code", {}, quoted(trace)), " ",
      make("b", { class: trace.origin }, trace.origin)),
    make("p", {}, explanation(trace, replaced)),
    ...(decided ? thresholdLine(decided) : []),
    make("dl", {}, ...Object.entries(facts).filter(([, value]) => value !== null)
      .map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))),
    ...(dropped.length ? [droppedTable(dropped)] : []),
    ...(top.length ? [alternatives(top)] : []),
  ];
}

/** The element for a token of the text, or for a dropped draft. */
export function tokenElement(trace, text, tag = "span") {
  const kind = /^\n+$/.test(text) ? "token newline" : "token";
  return make(tag, {
    class: `${kind} ${trace.origin}`, role: "option", tabindex: "-1", "aria-selected": "false",
    "aria-label": `${quoted(trace)}, ${trace.origin}`, "data-round": trace.round,
  }, text);
}
