// Bytes as text for the page.

const NAMES = { 9: "tab", 10: "new line", 32: "space" }, SIGNS = { 9: "⇥", 10: "⏎", 32: "␣" };
const hex = (byte) => byte.toString(16).toUpperCase().padStart(2, "0");
const isPrintable = (byte) => byte > 32 && byte < 127;

// A sign for a byte: the character, ␣ for a space, or two hexadecimal digits for a byte that is no character by itself.
export const letterSign = (byte) => SIGNS[byte] ?? (isPrintable(byte) ? String.fromCharCode(byte) : hex(byte));

// Words for a byte, for a sentence or a screen reader.
export const letterName = (byte) => NAMES[byte] ?? (isPrintable(byte) ? `“${String.fromCharCode(byte)}”` : `byte ${hex(byte)}`);

export const encodeText = (text) => new TextEncoder().encode(text);
export const decodeBytes = (bytes) => new TextDecoder().decode(bytes);

// A share as per cent: 97 %, 3.1 %, 0.02 %.
export function formatShare(share) {
  const percent = 100 * share;
  return `${percent >= 99.95 ? "100" : percent >= 10 ? percent.toFixed(0) : percent >= 0.095 ? percent.toFixed(1) : percent >= 0.005 ? percent.toFixed(2) : "0"} %`;
}
