// Messages and their frames (protocol/SPEC.md, "Frames"): a preamble, then one msgpack map.
import { decode, encode, ExtData } from "@msgpack/msgpack";

const PREAMBLE = Buffer.from("VMC\x01", "latin1"), NO_STRING = "\0no string", NESTING_MAX = 16;
const KNOWN = ["t", "rid", "text", "body", "error", "usage"]; // what other keys hold does not matter
const options = { useBigInt64: true, mapKeyConverter: (key) => (typeof key === "string" ? key : NO_STRING) };
const utf8 = new TextDecoder("utf-8", { fatal: true });

export const pack = (message) => [PREAMBLE, encode(message, options)];

/** The map of a message. What came as 64-bit integers is BigInt. Throws if it breaks the rules. */
export function unpack(frames) {
  if (!frames[0] || !PREAMBLE.equals(frames[0])) throw new Error("not of this protocol");
  const message = decode(frames[1], options);
  const n_raw = message?.n_raw ?? (message?.t === "STARTED" ? 1 : 0);
  if (typeof message?.t !== "string" || frames.length !== 2 + n_raw) throw new Error("no message");
  const raw = decode(frames[1], { ...options, rawStrings: true }); // to see what is not UTF-8
  for (const key of KNOWN) check(message[key], raw[key], 0);
  return message;
}

function check(value, raw, depth) {
  const foreign = value instanceof ExtData || value instanceof Date; // Date: the timestamp extension
  if (foreign || depth > NESTING_MAX || value?.[NO_STRING] !== undefined) throw new Error("no plain value");
  if (typeof value === "string") utf8.decode(raw);
  else if (value && !(value instanceof Uint8Array)) for (const key in value) check(value[key], raw[key], depth + 1);
}
