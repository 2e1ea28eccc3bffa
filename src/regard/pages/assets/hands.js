// Pointers and wheel on a map: one finger moves it, two or the wheel zoom, a tap or a click chooses a cell.

const clampedTo = (x, low, high) => Math.min(Math.max(x, low), high);

// `hover(x, y)`, `pick(x, y)`, `move(x, y)` and `zoom(factor, x, y)` get pixels; `whole()` says that nothing is left to
// zoom out of, and then the wheel is the page's.
export function handsOn(canvas, { hover, pick, move, zoom, whole }) {
  const fingers = new Map();
  let dragged = false;

  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event);
    dragged = fingers.size > 1;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const last = fingers.get(event.pointerId);
    if (!last) {
      hover(event.offsetX, event.offsetY);
      return;
    }
    const x = event.offsetX - last.offsetX, y = event.offsetY - last.offsetY;
    if (fingers.size === 2) {
      const other = [...fingers.values()].find((each) => each.pointerId !== event.pointerId);
      const apart = (one) => Math.hypot(one.offsetX - other.offsetX, one.offsetY - other.offsetY);
      zoom(apart(event) / Math.max(apart(last), 1), other.offsetX, other.offsetY);
    } else if (dragged || Math.hypot(x, y) > 4) {
      dragged = true;
      move(-x, -y);
    } else return;
    fingers.set(event.pointerId, event);
  });
  const lift = (event) => {
    const tapped = fingers.size === 1 && !dragged && event.type === "pointerup";
    fingers.delete(event.pointerId);
    if (tapped) pick(event.offsetX, event.offsetY);
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("dblclick", (event) => zoom(4, event.offsetX, event.offsetY));
  canvas.addEventListener("wheel", (event) => {
    if (event.deltaY > 0 && whole()) return;
    event.preventDefault();
    const turned = clampedTo(event.deltaY * (event.deltaMode ? 30 : 1), -240, 240);
    zoom(2 ** (-turned / 160), event.offsetX, event.offsetY);
  }, { passive: false });
}
