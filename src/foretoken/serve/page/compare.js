/** The same request with and without drafts: does speculation pay, and is the text the same? */

import { generate } from "./api.js";
import { byId, make } from "./detail.js";

const showSpeed = (name, rate) => { byId(`${name}-speed`).textContent = `${rate.toFixed(0)} tokens/s`; };

/** Forget the last comparison. */
export function clearComparison(verdict) {
  for (const id of ["same", "on-text", "off-text"]) byId(id).textContent = "";
  for (const id of ["on-speed", "off-speed"]) byId(id).textContent = "–";
  byId("verdict").textContent = verdict;
}

/** Time one run. It has no trace, since the cost of a trace grows with the number of drafts. */
async function timeRun(request, drafts, key, signal) {
  const name = drafts ? "on" : "off";
  const [start, result] = [performance.now(), { text: "", tokens: 0, seconds: 0 }];
  byId(`${name}-text`).textContent = "";
  for await (const { text, usage } of generate(request, { traced: false, drafts }, key, signal)) {
    result.text += text;
    byId(`${name}-text`).append(text);
    result.seconds = (performance.now() - start) / 1000;
    if (usage) result.tokens = usage.completion_tokens;
  }
  result.rate = result.tokens / result.seconds;
  showSpeed(name, result.rate);
  return result;
}

const ratio = ({ on, off }) => on.rate / off.rate;

const MIN_PAIRS = 3; // pairs for a verdict: if all their ratios are on one side of 1, chance is unlikely

/** Time the request with drafts and without, in turns, and show the verdict. */
export async function compare(request, rule, numPairs, key, signal) {
  const pairs = [];
  for (let i = 0; i < numPairs; i += 1) {
    byId("verdict").textContent = `Timing: ${i + 1} of ${numPairs}`;
    const pair = {};
    for (const name of i % 2 ? ["on", "off"] : ["off", "on"]) {
      pair[name] = await timeRun(request, name === "on", key, signal);
    }
    pairs.push(pair);
  }
  const sorted = pairs.toSorted((a, b) => ratio(a) - ratio(b));
  const [low, middle, high] = [sorted[0], sorted[numPairs >> 1], sorted.at(-1)].map(ratio);
  for (const name of ["on", "off"]) showSpeed(name, sorted[numPairs >> 1][name].rate);  // an odd number
  const missing = MIN_PAIRS - numPairs;
  const verdict = missing > 0 ? "Too few for a verdict"
    : low > 1 ? "Speculation paid" : high < 1 ? "Speculation did not pay" : "No clear difference";
  const spread = missing > 0 ? `in ${numPairs} pair; ${missing} more are needed`
    : `the median of ${numPairs} pairs (${low.toFixed(2)}–${high.toFixed(2)})`;
  byId("verdict").replaceChildren(`${verdict}: `,
    make("strong", { id: "ratio" }, `${middle.toFixed(2)}×`), ` the tokens per second, ${spread}.`);
  byId("same").textContent = textVerdict(request, rule, pairs.every(({ on, off }) => on.text === off.text));
}

/** A sentence: whether both texts are the same, and whether the rule demands that they are. */
function textVerdict(request, rule, isSame) {
  if (rule === "synthetic") return "The rule synthetic sets what is accepted: this text means nothing.";
  const reason = request.temperature === 0 ? "at temperature 0" : rule === "coupled" && "under the rule coupled";
  if (reason && isSame) return `Both texts are the same, as they must be ${reason}.`;
  if (reason) return `The texts differ. ${reason[0].toUpperCase()}${reason.slice(1)} only rounding at a near-tie can do that.`;
  const finding = isSame ? "Both texts happen to be the same" : "The texts are different draws";
  return `${finding}: the rule ${rule} keeps their distribution. Temperature 0 and the rule coupled keep the text.`;
}
