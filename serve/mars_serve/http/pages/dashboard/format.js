// Writes numbers with their units.

const DASH = "–";

export const count = (value) => (value == null ? DASH : Math.round(value).toLocaleString("en"));

export const plain = (value) => (value == null ? DASH : trimmed(value));

export const rate = (value) => (value == null ? DASH : trimmed(value));

export const percent = (value) => (value == null ? DASH : `${trimmed(100 * value)}%`);

export const seconds = (value) => {
  if (value == null) return DASH;
  return value < 1 ? `${trimmed(1000 * value)} ms` : `${trimmed(value)} s`;
};

export const clock = (timeS, withSeconds = true) =>
  new Date(1000 * timeS).toLocaleTimeString("en-GB", {
    hour: "2-digit",
    minute: "2-digit",
    second: withSeconds ? "2-digit" : undefined,
  });

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

function trimmed(value) {
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}
