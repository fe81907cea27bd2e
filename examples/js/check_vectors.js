// Reads and writes the golden vectors (protocol/SPEC.md, "Golden vectors") with what the client uses.
//   node check_vectors.js [FOLDER]     prints one JSON line of counts; exit 1: says which differ
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { isDeepStrictEqual } from "node:util";
import { pack, unpack } from "./wire.js";

const folder = process.argv[2] ?? fileURLToPath(new URL("../../protocol/vectors", import.meta.url));
const count = { decoded: 0, not_in_json: 0, encoded: 0, same_bytes: 0, refused: 0, left_to_the_broker: 0 };
const wrong = [];

/** JSON text to values as `unpack` gives them: bins are Buffers, what a double cannot hold is BigInt. */
function parse(text) {
  let wholeFloats = false; // JavaScript writes 1.0 as 1: such vectors are not compared byte by byte
  const exact = text.replace(/"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?/gi, (token) => {
    if (token[0] === '"') return token;
    return /^-?\d+$/.test(token) ? `{"$int": "${token}"}` : `{"$float": "${token}"}`;
  });
  return JSON.parse(exact, (_, value) => {
    if (value?.$bytes !== undefined) return Buffer.from(value.$bytes, "hex");
    if (value?.$int !== undefined) return plain(BigInt(value.$int));
    if (value?.frames_hex !== undefined) [value.wholeFloats, wholeFloats] = [wholeFloats, false];
    if (value?.$float === undefined) return value;
    const number = Number(value.$float.replace("inf", "Infinity"));
    wholeFloats ||= Number.isInteger(number);
    return number;
  });
}

/** One form for all integers and all bins: how wide they travelled is not their value. */
function plain(value) {
  if (typeof value === "bigint") return Number.isSafeInteger(Number(value)) ? Number(value) : value;
  if (value instanceof Uint8Array) return Buffer.from(value);
  if (Array.isArray(value)) return value.map(plain);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, plain(item)]));
}

/** The vectors' own sender may write a map's header in three bytes where one would do. */
const narrow = (map) =>
  map[0] === 0xde && map[1] === 0 && map[2] < 16 ? Buffer.concat([Buffer.of(0x80 | map[2]), map.subarray(3)]) : map;

function accept({ name, direction, json, canonical, wholeFloats }, frames) {
  const message = plain(unpack(frames));
  if (json === null) count.not_in_json += 1;
  else if (!isDeepStrictEqual(message, json)) return wrong.push(`${name}: decoded to something else`);
  count.decoded += 1;
  if (json === null || direction !== "client_to_broker") return;
  const written = pack(message);
  if (!isDeepStrictEqual(plain(unpack(written)), json)) wrong.push(`${name}: does not survive encoding`);
  count.encoded += 1;
  if (!canonical || wholeFloats) return;
  if (narrow(frames[1]).equals(written[1])) count.same_bytes += 1;
  else wrong.push(`${name}: encoded to other bytes: ${Buffer.from(written[1]).toString("hex")}`);
}

/** What a client may leave to the broker: whether the fields of a request make sense. */
function refuse({ name, direction, reason, json }, frames) {
  try {
    unpack(frames);
  } catch {
    count.refused += 1;
    return;
  }
  const framing = ["bad_frames", "bad_preamble"].includes(reason);
  if (direction === "broker_to_client" || framing) wrong.push(`${name}: was accepted`);
  else count.left_to_the_broker += 1;
}

for (const file of ["client.json", "worker.json", "invalid.json"])
  for (const vector of parse(readFileSync(`${folder}/${file}`, "utf8")).vectors)
    try {
      (vector.ok ? accept : refuse)(vector, vector.frames_hex.map((hex) => Buffer.from(hex, "hex")));
    } catch (error) {
      wrong.push(`${vector.name}: ${error.message}`);
    }
console.log(JSON.stringify(count));
if (wrong.length) console.error(wrong.join("\n"));
process.exitCode = wrong.length ? 1 : 0;
