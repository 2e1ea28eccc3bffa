// Thumbnails of heads, from levels as `regard.pages.encoding` writes them. Each is coloured by the square root of its
// weights, up to its own largest.
import { createPalette } from "./colorScale.js";

const LEVEL_RATIO = Math.log(1e8) / 253; // between a level and the next

export function paintThumbnail(canvas, levels) {
  const colors = createPalette(), highest = levels.reduce((a, b) => Math.max(a, b), 0);
  const table = Uint8Array.from({ length: 256 }, (_, level) =>
    2 + (level > 1 ? Math.round(253 * Math.min(1, Math.exp(((level - highest) * LEVEL_RATIO) / 2))) : 0));
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  for (let i = 0; i < levels.length; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = colors[3 * table[levels[i]] + c];
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}
