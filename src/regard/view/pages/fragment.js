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

// Keep these by name, and what else was kept; null takes one away.
export function keep(values) {
  clearTimeout(timer);
  wanted = { ...wanted, ...values };
  const here = location.hash;
  timer = setTimeout(() => {
    const kept = Object.entries({ ...fragment(), ...wanted }).filter(([, value]) => value !== null);
    wanted = {};
    if (location.hash !== here) return; // someone went elsewhere meanwhile
    try {
      history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
    } catch {
      // A frame without an address of its own keeps nothing.
    }
  }, KEEP_AFTER);
}
let wanted = {};
