// State that the address keeps after its #, as texts by name. A reader may have typed anything: check every value.

const WRITE_DELAY = 250; // milliseconds; browsers limit how often the address may change
let timer = 0, pending = {}, pendingSince = "";

export function readUrlState() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

// The number in a text if it lies in a range, else null.
export function parseInRange(text, low, high) {
  const value = text === undefined || text.trim() === "" ? NaN : Number(text);
  return value >= low && value <= high ? value : null;
}

// Write these values, and keep the others; null removes a name. The address changes after a delay.
export function updateUrlState(values) {
  clearTimeout(timer);
  pending = { ...pending, ...values };
  pendingSince = location.hash;
  timer = setTimeout(flushUrlState, WRITE_DELAY);
}

// Write pending values at once.
export function flushUrlState() {
  clearTimeout(timer);
  const entries = Object.entries({ ...readUrlState(), ...pending }).filter(([, value]) => value !== null);
  const changed = Object.keys(pending).length > 0;
  pending = {};
  if (!changed || location.hash !== pendingSince) return; // the reader has navigated meanwhile
  try {
    history.replaceState(null, "", `#${new URLSearchParams(entries)}`);
  } catch {
    // A frame without an address of its own keeps no state.
  }
}
