// Colours as [red, green, blue], 0 to 255.

// The colour at `place`, from 0 to 1, mixed from the two nearest points of the scale.
export function mixed(points, place) {
  const at = Math.max(0, Math.min(1, place)) * (points.length - 1);
  const low = points[Math.floor(at)], high = points[Math.ceil(at)];
  return low.map((channel, i) => Math.round(channel + (high[i] - channel) * (at % 1)));
}

export const css = (colour) => `rgb(${colour.join(" ")})`;

// The luminance of a channel, as WCAG defines it.
const linear = (x) => (x <= 10 ? x / 3294.6 : ((x / 255 + 0.055) / 1.055) ** 2.4);

// Black or white, whichever has more contrast with a background: at least 4.58.
export const inkOn = ([red, green, blue]) =>
  (0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue) > 0.179 ? "#000000" : "#ffffff");
