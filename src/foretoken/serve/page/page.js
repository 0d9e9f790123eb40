/** The form, the runs it starts, and the server's state. */

import { ServerError, ask, generate } from "./api.js";
import { clearComparison, compare } from "./compare.js";
import { byId, make } from "./detail.js";
import { TracedRun, watchTokens } from "./run.js";

const value = (id) => byId(id).value;
const REFRESH_MS = 1000;
let served = null; // the server's options
let run = null; // the last run
let aborter = null; // stops the present run
let isDown = false;

/** Show an error; "" hides it. */
function showError(message) {
  byId("error").textContent = message;
  byId("error").hidden = !message;
}

const readsPrediction = () => served.predictors.includes(value("drafter") || served.drafter);

/** The form's settings. A text that is no number is kept, so that the server refuses it. */
function settings() {
  const number = (id, text = value(id).trim()) =>
    (text === "" ? undefined : Number.isFinite(+text) ? +text : text);
  return {
    api: value("api"), prompt: value("prompt"), temperature: number("temperature"),
    max_tokens: number("max_tokens"), seed: number("seed") ?? Math.floor(Math.random() * 2 ** 32),
    k: value("k"), drafter: value("drafter"), rule: value("rule"),
    prediction: readsPrediction() ? value("prediction") : "",
  };
}

/** Fill the form with this server's options. */
function fillForm() {
  const { num_drafts: maxDrafts, adapts, drafters, drafter, rules, rule } = served;
  const fill = (id, first, names, label = (name) => name) => byId(id).replaceChildren(
    make("option", { value: "" }, `default: ${first}`),
    ...names.map((name) => make("option", { value: name }, label(name))));
  byId("model").textContent = served.model;
  byId("api").parentElement.hidden = !served.has_chat;
  const numbers = Array.from({ length: maxDrafts }, (_, i) => String(i + 1));
  fill("k", adapts ? `auto, at most ${maxDrafts}` : maxDrafts, [...(adapts ? ["auto"] : []), "0", ...numbers],
    (name) => (name === "0" ? "off" : name));
  fill("drafter", drafter || "none", drafters.filter((name) => name !== drafter));
  fill("rule", rule, rules.filter((name) => name !== rule),
    (name) => (name === "synthetic" ? "synthetic: the text means nothing" : name));
  adaptForm();
}

const adaptForm = () => { byId("prediction").parentElement.hidden = !readsPrediction(); };

/** Show the server's state; fill the form again if the server's options have changed. */
async function refresh() {
  try {
    const { now, ...options } = await (await ask("page/state", value("key"))).json();
    if (JSON.stringify(options) !== JSON.stringify(served)) {
      served = options;
      fillForm();
    }
    const [drafted, accepted] = [now.num_draft_tokens, now.num_accepted_tokens];
    for (const name of ["running", "waiting"]) byId(name).textContent = now[name];
    byId("kv").textContent = `${(100 * now.kv_cache_usage).toFixed(1)} %`;
    byId("accepted").textContent = drafted ? `${(100 * accepted / drafted).toFixed(1)} %` : "–";
    if (now.failure) throw new ServerError(503, now.failure);
    if (isDown) showError("");
    isDown = false;
  } catch (error) {
    if (error.status === 401) byId("key").parentElement.hidden = false;
    if (!aborter) showError(error.message);
    isDown = true;
  }
  byId("run").disabled = !served || aborter !== null;
}

/** Run the request with a trace, and then time it. */
async function start(event) {
  event.preventDefault();
  if (!served || aborter) return;
  const [request, key, numPairs] = [settings(), value("key"), Number(value("pairs"))];
  const { signal } = (aborter = new AbortController());
  const hasDrafts = served.num_drafts > 0 && request.k !== "0";
  const isTimed = hasDrafts && numPairs > 0;
  setRunning(true);
  showError("");
  byId("status").textContent = "";
  clearComparison(isTimed ? "To be timed when the text is there." : hasDrafts ? "Not timed, as chosen."
    : "Nothing is drafted: there is nothing to compare.");
  run = new TracedRun(served.num_drafts);
  try {
    for await (const piece of generate(request, { traced: true, drafts: true }, key, signal)) run.add(piece);
    byId("status").textContent = `${run.numTokens} tokens in ${run.sizes.length} steps, seed ${request.seed}.`;
    if (isTimed) await compare(request, request.rule || served.rule, numPairs, key, signal);
  } catch (error) {
    if (isTimed) byId("verdict").textContent = "The timing did not come to its end: no verdict.";
    if (error.name === "AbortError") byId("status").textContent = "Stopped.";
    else showError(error instanceof ServerError ? error.message : String(error));
  } finally {
    aborter = null;
    setRunning(false);
  }
}

/** Enable one of the buttons Run and Stop, and move the focus to it; scroll to results below the form. */
function setRunning(isRunning) {
  const [from, to] = (isRunning ? ["run", "stop"] : ["stop", "run"]).map(byId);
  to.disabled = false;
  if (document.activeElement === from) to.focus({ preventScroll: true });
  from.disabled = true;
  const [form, results] = ["form", "results"].map((id) => byId(id).getBoundingClientRect());
  const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (isRunning && results.top >= form.bottom) byId("results").scrollIntoView({ behavior: isStill ? "auto" : "smooth" });
}

byId("form").addEventListener("submit", start);
byId("form").addEventListener("keydown", (event) =>
  event.key === "Enter" && (event.ctrlKey || event.metaKey) && byId("form").requestSubmit());
byId("stop").addEventListener("click", () => aborter?.abort());
byId("drafter").addEventListener("change", adaptForm);
byId("key").addEventListener("change", refresh);
byId("show-dropped").addEventListener("change", (event) =>
  byId("tokens").classList.toggle("with-dropped", event.target.checked));
watchTokens(() => run);
(async function watchServer() {
  if (!document.hidden) await refresh();
  setTimeout(watchServer, REFRESH_MS);
})();
