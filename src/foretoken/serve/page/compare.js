/** The same request with drafts and without: whether speculation pays, and whether the text is the same. */

import { generate } from "./api.js";
import { byId, make } from "./detail.js";

const show = (name, rate) => { byId(`${name}-speed`).textContent = `${rate.toFixed(0)} tokens/s`; };

/** Forget the last comparison. */
export function clearComparison(verdict) {
  for (const id of ["same", "on-text", "off-text"]) byId(id).textContent = "";
  for (const id of ["on-speed", "off-speed"]) byId(id).textContent = "–";
  byId("verdict").textContent = verdict;
}

/** One timed run; without a trace, whose cost grows with the number of drafts. */
async function timed(asked, drafts, key, signal) {
  const name = drafts ? "on" : "off";
  const [start, found] = [performance.now(), { text: "", tokens: 0, seconds: 0 }];
  byId(`${name}-text`).textContent = "";
  for await (const { text, usage } of generate(asked, { traced: false, drafts }, key, signal)) {
    found.text += text;
    byId(`${name}-text`).append(text);
    found.seconds = (performance.now() - start) / 1000;
    if (usage) found.tokens = usage.completion_tokens;
  }
  found.rate = found.tokens / found.seconds;
  show(name, found.rate);
  return found;
}

const ratio = ({ on, off }) => on.rate / off.rate;

const ENOUGH = 3; // pairs: with all of them on one side of 1, chance is a less likely reason

/** Time the request with drafts and without, in turns, and show the verdict. */
export async function compare(asked, rule, numPairs, key, signal) {
  const pairs = [];
  for (let i = 0; i < numPairs; i += 1) {
    byId("verdict").textContent = `Timing: ${i + 1} of ${numPairs}`;
    const pair = {};
    for (const name of i % 2 ? ["on", "off"] : ["off", "on"]) {
      pair[name] = await timed(asked, name === "on", key, signal);
    }
    pairs.push(pair);
  }
  const sorted = pairs.toSorted((a, b) => ratio(a) - ratio(b));
  const [low, middle, high] = [sorted[0], sorted[numPairs >> 1], sorted.at(-1)].map(ratio);
  for (const name of ["on", "off"]) show(name, sorted[numPairs >> 1][name].rate);  // an odd number
  const more = ENOUGH - numPairs;
  const said = more > 0 ? "Too few for a verdict"
    : low > 1 ? "Speculation paid" : high < 1 ? "Speculation did not pay" : "No clear difference";
  const spread = more > 0 ? `in ${numPairs} pair; ${more} more are needed`
    : `the median of ${numPairs} pairs (${low.toFixed(2)}–${high.toFixed(2)})`;
  byId("verdict").replaceChildren(`${said}: `,
    make("strong", { id: "ratio" }, `${middle.toFixed(2)}×`), ` the tokens per second, ${spread}.`);
  byId("same").textContent = sameness(asked, rule, pairs.every(({ on, off }) => on.text === off.text));
}

/** What the rule promises about both texts, and whether it holds. */
function sameness(asked, rule, isSame) {
  if (rule === "synthetic") return "The rule synthetic sets what is accepted: this text means nothing.";
  const reason = asked.temperature === 0 ? "at temperature 0" : rule === "coupled" && "under the rule coupled";
  if (reason && isSame) return `Both texts are the same, as they must be ${reason}.`;
  if (reason) return `The texts differ. ${reason[0].toUpperCase()}${reason.slice(1)} only rounding at a near-tie can do that.`;
  const found = isSame ? "Both texts happen to be the same" : "The texts are different draws";
  return `${found}: the rule ${rule} keeps their distribution. Temperature 0 and the rule coupled keep the text.`;
}
