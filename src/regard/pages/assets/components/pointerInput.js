// Pointers and wheel on a map: one finger moves it, two fingers or the wheel zoom, a tap or a click selects a cell.

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

// `onHover(x, y)`, `onSelect(x, y)`, `onMove(x, y)` and `onZoom(factor, x, y)` get pixels. If `isZoomedOut()`, scrolling
// down is left to the page.
export function listenToPointers(canvas, { onHover, onSelect, onMove, onZoom, isZoomedOut }) {
  const pointers = new Map();
  let dragged = false;

  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event);
    dragged = pointers.size > 1;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const last = pointers.get(event.pointerId);
    if (!last) {
      onHover(event.offsetX, event.offsetY);
      return;
    }
    const x = event.offsetX - last.offsetX, y = event.offsetY - last.offsetY;
    if (pointers.size === 2) {
      const other = [...pointers.values()].find((pointer) => pointer.pointerId !== event.pointerId);
      const distance = (pointer) => Math.hypot(pointer.offsetX - other.offsetX, pointer.offsetY - other.offsetY);
      onZoom(distance(event) / Math.max(distance(last), 1), other.offsetX, other.offsetY);
    } else if (dragged || Math.hypot(x, y) > 4) {
      dragged = true;
      onMove(-x, -y);
    } else return;
    pointers.set(event.pointerId, event);
  });
  const release = (event) => {
    const tapped = pointers.size === 1 && !dragged && event.type === "pointerup";
    pointers.delete(event.pointerId);
    if (tapped) onSelect(event.offsetX, event.offsetY);
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("dblclick", (event) => onZoom(4, event.offsetX, event.offsetY));
  canvas.addEventListener("wheel", (event) => {
    if (event.deltaY > 0 && isZoomedOut()) return;
    event.preventDefault();
    const distance = clamp(event.deltaY * (event.deltaMode ? 30 : 1), -240, 240);
    onZoom(2 ** (-distance / 160), event.offsetX, event.offsetY);
  }, { passive: false });
}
