// One agent and one streamed answer, without the Python library. Ctrl-C cancels the answer.
//   node client.js ENDPOINT [MODEL [PROMPT [MAX_TOKENS]]]     (`conductor up` prints the endpoint)
import { randomBytes } from "node:crypto";
import { Dealer } from "zeromq";
import { pack, unpack } from "./wire.js";

const [endpoint, model = "smollm2-135m", prompt = "The sea is", most = "48"] = process.argv.slice(2);
const [WINDOW, WELCOME_MS, SILENT] = [64, 5000, 3];
const socket = new Dealer({ linger: 500, maxMessageSize: 8 << 20, heartbeatInterval: 5000 });
const fail = (code, text) => (console.error(text), process.exit(code));
if (!endpoint) fail(64, "usage: node client.js ENDPOINT [MODEL [PROMPT [MAX_TOKENS]]]");
let heard = Date.now(), sending = Promise.resolve(), cancelled = false, current;

/** Send a message; a socket sends one at a time. Returns the rid, which every answer repeats. */
function send(t, fields = {}, rid = randomBytes(16)) {
  sending = sending.then(() => socket.send(pack({ t, rid, ...fields })));
  return rid;
}

/** Send a request; its answers up to OK, DONE or WELCOME. Throws the ERROR that it ends with. */
async function* request(t, fields) {
  current = send(t, fields);
  for (let message; !["OK", "DONE", "WELCOME"].includes(message?.t); ) {
    message = unpack(await socket.receive());
    heard = Date.now();
    if (message.rid?.length && !current.equals(message.rid)) continue;
    if (message.t === "ERROR") throw message.error;
    yield message;
  }
}

/** Register an agent; what does not fit is asked for again, with the largest context that does. */
async function register(fields) {
  try {
    for await (const { t, stage, note = stage } of request("REGISTER", fields)) if (t !== "OK") console.error(note);
  } catch (error) {
    const n_ctx = error.details?.largest_n_ctx_that_fits;
    if (error.reason !== "VRAM_LEDGER_DENY" || !n_ctx || n_ctx === fields.n_ctx) throw error;
    console.error(`asking for n_ctx=${n_ctx}: ${error.message}`);
    await register({ ...fields, n_ctx });
  }
}

/** One prompt, its text as it comes; credit for at most WINDOW pieces that were not read yet. */
async function stream(fields) {
  let next = 0, upto = WINDOW;
  for await (const { t, seq, text, usage } of request("DECODE", { ...fields, window: upto })) {
    if (t === "DONE") return usage;
    if (t !== "TOKENS" || seq !== next) continue; // a piece may come twice
    process.stdout.write(text);
    if (upto - ++next <= WINDOW / 2) send("CREDIT", { ack: next, upto: (upto = next + WINDOW) }, current);
  }
}

process.on("SIGINT", () => (cancelled ? process.exit(130) : (cancelled = send("CANCEL", {}, current))));
socket.connect(endpoint);
try {
  const timer = setTimeout(fail, WELCOME_MS, 69, "no answer: is the broker running?"), agent = `js-${process.pid}`;
  for await (const { heartbeat_ms: ms } of request("HELLO", { v: [1, 0], client: "js-example" }))
    setInterval(() => (Date.now() - heard > SILENT * ms ? fail(69, "the broker is silent") : send("PING")), ms).unref();
  clearTimeout(timer);
  await register({ agent, model, ephemeral: true });
  console.log("\n%o", await stream({ agent, prompt, max_tokens: Number(most) }));
  send("BYE");
  await sending;
  socket.close();
  if (cancelled) process.exitCode = 130;
} catch ({ reason, message, retryable, stack }) {
  if (!reason) fail(70, stack);
  fail(retryable ? 75 : 1, `${reason}: ${message}${retryable ? " (try again later)" : ""}`);
}
