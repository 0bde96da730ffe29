// Colours as [red, green, blue], 0 to 255.

// The colour at `place`, from 0 to 1, mixed from the two nearest points of the scale.
export function mixed(points, place) {
  const at = Math.max(0, Math.min(1, place)) * (points.length - 1);
  const low = points[Math.floor(at)], high = points[Math.ceil(at)];
  return low.map((channel, i) => Math.round(channel + (high[i] - channel) * (at % 1)));
}

export const css = (colour) => `rgb(${colour.join(" ")})`;

// A text colour that is readable on a background.
export const inkOn = ([red, green, blue]) =>
  (0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#14181c" : "#ffffff");
