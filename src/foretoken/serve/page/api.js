/** The server's interface for the page: requests, refusals and streams. */

/**
 * How a token came about, or a draft that was dropped: docs/verification.md.
 * @typedef {{decoded_token: ?string, token_id: number, position: number, round: number,
 *   rule: string, origin: string, p: number, q: ?number, drafter: ?string, draft_index: ?number,
 *   u: ?number, threshold: ?number, reason: ?string, dropped?: Trace[]}} Trace
 * @typedef {{api: string, prompt: string, temperature?: number, max_tokens?: number,
 *   seed: number, k: string, drafter: string, rule: string, prediction: string}} Settings
 * @typedef {{text: string, trace: Trace[], top: [string, number][], usage?: object}} Piece
 */

/** The server's message when it refuses a request. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Fetch a path of this server with the key; a refusal raises a `ServerError`. */
export async function ask(path, key, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server does not answer.");
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new ServerError(answer.status, body?.error?.message ?? `Status ${answer.status}`);
}

/** The parsed chunks of a streamed answer, in order of arrival. */
async function* chunks(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError(0, "The stream broke off.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(200, chunk.error.message);
      yield chunk;
    }
  }
}

/** The body of a request. @param {Settings} settings */
function bodyOf(settings, { traced, drafts }) {
  const { api, prompt, temperature, max_tokens, seed, k, drafter, rule, prediction } = settings;
  const speculative = { trace: traced };
  const isOff = !drafts || k === "0";  // without drafts a prediction is not read
  if (rule) speculative.rule = rule;
  if (drafter && !isOff) speculative.drafter = drafter;
  if (isOff || k) speculative.num_speculative_tokens = isOff ? 0 : k === "auto" ? k : Number(k);
  const body = { temperature, max_tokens, seed, speculative, stream: true };
  body.stream_options = { include_usage: true, split_tokens: traced };
  if (prediction && !isOff) body.prediction = { type: "content", content: prediction };
  if (api === "chat") {
    const shown = traced ? { logprobs: true, top_logprobs: 5 } : {};
    return { ...body, ...shown, messages: [{ role: "user", content: prompt }] };
  }
  return traced ? { ...body, prompt, logprobs: 5 } : { ...body, prompt };
}

/** The likeliest tokens at a position: pairs of a text and its log-probability. */
function likeliest(logprobs) {
  const chat = logprobs?.content?.[0]?.top_logprobs;
  if (chat) return chat.map(({ token, logprob }) => [token, logprob]);
  return Object.entries(logprobs?.top_logprobs?.[0] ?? {}).sort((a, b) => b[1] - a[1]);
}

/** Have the server generate: a piece for each token if `how.traced`, else for each step, and one with the usage. @returns {AsyncGenerator<Piece>} */
export async function* generate(settings, how, key, signal) {
  const path = settings.api === "chat" ? "v1/chat/completions" : "v1/completions";
  const body = JSON.stringify(bodyOf(settings, how));
  const answer = await ask(path, key, { method: "POST", body, signal });
  for await (const { choices, usage } of chunks(answer)) {
    for (const { text, delta, trace, logprobs } of choices) {
      const content = text ?? delta.content ?? "";
      if (content || trace) yield { text: content, trace: trace ?? [], top: likeliest(logprobs) };
    }
    if (usage) yield { text: "", trace: [], top: [], usage };
  }
}
