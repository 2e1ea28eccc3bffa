// Decode a picture, as `regard.lens.picture_page` writes it: three planes, each the differences from the pixel to the left.

const LUMINANCE = [0.2126, 0.7152, 0.0722]; // of red, green and blue

// A canvas with an image, in its colours or in grey.
function paintImage(image, isGrey) {
  const canvas = document.createElement("canvas"), { data, width, height } = image;
  Object.assign(canvas, { width, height });
  if (isGrey) {
    for (let n = 0; n < data.length; n += 4) data.fill(LUMINANCE.reduce((sum, part, c) => sum + part * data[n + c], 0), n, n + 3);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// Two canvases, { colour, grey }.
export function decodePicture(bytes, [height, width]) {
  const image = new ImageData(width, height), count = width * height;
  for (let plane = 0; plane < 3; plane++) {
    for (let n = 0, value = 0; n < count; n++) {
      value = ((n % width ? value : 0) + bytes[plane * count + n]) & 255;
      image.data[4 * n + plane] = value;
    }
  }
  for (let n = 0; n < count; n++) image.data[4 * n + 3] = 255;
  return { colour: paintImage(image, false), grey: paintImage(image, true), width, height };
}
