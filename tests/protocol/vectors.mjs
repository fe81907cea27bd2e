// Reads the golden vectors in a language that shares no code with ours: decodes every map with
// the small msgpack reader below and compares it with the vector's JSON.
//
//   node tests/protocol/vectors.mjs protocol/vectors
//
// Prints "<checked> vectors" and exits with 0, or says what differs and exits with 1.

import { readFileSync } from "node:fs";
import { isDeepStrictEqual } from "node:util";

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
  }

  number(size, name) {
    const value = this.view[name](this.at);
    this.at += size;
    return typeof value === "bigint" ? value : Number(value);
  }

  slice(length) {
    if (this.at + length > this.bytes.length) throw new Error("truncated");
    this.at += length;
    return this.bytes.subarray(this.at - length, this.at);
  }

  // Integers become bigint, so that 64-bit ones stay exact and floats stay apart from them.
  value() {
    const tag = this.number(1, "getUint8");
    if (tag < 0x80) return BigInt(tag);
    if (tag < 0x90) return this.map(tag & 0x0f);
    if (tag < 0xa0) return this.array(tag & 0x0f);
    if (tag < 0xc0) return this.text(tag & 0x1f);
    if (tag >= 0xe0) return BigInt(tag - 0x100);
    switch (tag) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return this.binary(this.number(1, "getUint8"));
      case 0xc5: return this.binary(this.number(2, "getUint16"));
      case 0xc6: return this.binary(this.number(4, "getUint32"));
      case 0xca: return this.number(4, "getFloat32");
      case 0xcb: return this.number(8, "getFloat64");
      case 0xcc: return BigInt(this.number(1, "getUint8"));
      case 0xcd: return BigInt(this.number(2, "getUint16"));
      case 0xce: return BigInt(this.number(4, "getUint32"));
      case 0xcf: return this.number(8, "getBigUint64");
      case 0xd0: return BigInt(this.number(1, "getInt8"));
      case 0xd1: return BigInt(this.number(2, "getInt16"));
      case 0xd2: return BigInt(this.number(4, "getInt32"));
      case 0xd3: return this.number(8, "getBigInt64");
      case 0xd9: return this.text(this.number(1, "getUint8"));
      case 0xda: return this.text(this.number(2, "getUint16"));
      case 0xdb: return this.text(this.number(4, "getUint32"));
      case 0xdc: return this.array(this.number(2, "getUint16"));
      case 0xdd: return this.array(this.number(4, "getUint32"));
      case 0xde: return this.map(this.number(2, "getUint16"));
      case 0xdf: return this.map(this.number(4, "getUint32"));
      default: throw new Error(`no value begins with 0x${tag.toString(16)}`);
    }
  }

  text(length) {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(this.slice(length));
  }

  binary(length) {
    return { $bytes: Buffer.from(this.slice(length)).toString("hex") };
  }

  array(length) {
    return Array.from({ length }, () => this.value());
  }

  map(length) {
    const made = {};
    for (let i = 0; i < length; i += 1) {
      const key = this.value();
      if (typeof key !== "string") throw new Error("a key is no string");
      made[key] = this.value();
    }
    return made;
  }
}

function decode(hex) {
  const reader = new Reader(Buffer.from(hex, "hex"));
  const value = reader.value();
  if (reader.at !== reader.bytes.length) throw new Error("trailing bytes");
  return value;
}

// JSON tells integers and floats apart by their spelling, which JSON.parse forgets: mark floats.
function parse(text) {
  const strings = /"(?:[^"\\]|\\.)*"/y;
  let marked = "";
  for (let at = 0; at < text.length; ) {
    strings.lastIndex = at;
    const string = text[at] === '"' ? strings.exec(text)[0] : null;
    const number = string ? null : /^-?\d+(\.\d+)?([eE][+-]?\d+)?/.exec(text.slice(at, at + 40));
    const token = string ?? number?.[0] ?? text[at];
    const float = number && (number[1] !== undefined || number[2] !== undefined);
    marked += number ? `{"$${float ? "float" : "int"}":"${token}"}` : token;
    at += token.length;
  }
  return JSON.parse(marked, (_, value) => {
    if (value?.$int !== undefined) return BigInt(value.$int);
    if (value?.$float !== undefined) return Number(value.$float);
    return value;
  });
}

const folder = process.argv[2];
const problems = [];
let checked = 0;
for (const name of ["client.json", "worker.json"]) {
  for (const vector of parse(readFileSync(`${folder}/${name}`, "utf-8")).vectors) {
    if (vector.json === null) continue;
    checked += 1;
    if (vector.frames_hex[0] !== "564d4301") problems.push(`${vector.name}: preamble`);
    try {
      if (!isDeepStrictEqual(decode(vector.frames_hex[1]), vector.json)) {
        problems.push(`${vector.name}: another value`);
      }
    } catch (error) {
      problems.push(`${vector.name}: ${error.message}`);
    }
  }
}
for (const problem of problems) console.error(problem);
console.log(`${checked} vectors`);
process.exit(problems.length ? 1 : 0);
