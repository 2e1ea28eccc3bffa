// What the address keeps after its #: texts by name. What someone wrote by hand may be anything, and is checked by who reads.

const KEEP_AFTER = 250; // milliseconds; a browser takes only so many changes
let timer = 0;

export function fragment() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

// A number of the fragment, where it is one and lies in a range; else null.
export function within(text, low, high) {
  const value = text === undefined || text.trim() === "" ? NaN : Number(text);
  return value >= low && value <= high ? value : null;
}

// Keep these by name, and what else was kept; null takes one away. `keepNow` does not wait, for who goes on from here.
export function keep(values) {
  clearTimeout(timer);
  wanted = { ...wanted, ...values };
  keptFrom = location.hash;
  timer = setTimeout(keepNow, KEEP_AFTER);
}
let wanted = {}, keptFrom = "";

export function keepNow() {
  clearTimeout(timer);
  const kept = Object.entries({ ...fragment(), ...wanted }).filter(([, value]) => value !== null);
  const changed = Object.keys(wanted).length > 0;
  wanted = {};
  if (!changed || location.hash !== keptFrom) return; // someone went elsewhere meanwhile
  try {
    history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
  } catch {
    // A frame without an address of its own keeps nothing.
  }
}
