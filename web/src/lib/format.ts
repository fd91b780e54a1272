/** Numbers as text. Everything exact is shown exactly; what is rounded says so by its unit. */

export const integer = (value: number): string => value.toLocaleString('en-US', { maximumFractionDigits: 0 });

const DECIMAL = ['bytes', 'kB', 'MB', 'GB', 'TB', 'PB'];
const BINARY = ['bytes', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];

function scaled(nbytes: number, base: number, units: string[]): string {
  let power = 0;
  let value = nbytes;
  while (Math.abs(value) >= base && power < units.length - 1) {
    value /= base;
    power += 1;
  }
  return power === 0 ? `${integer(nbytes)} ${nbytes === 1 ? 'byte' : 'bytes'}` : `${digits(value)} ${units[power]}`;
}

/** `26.25 GB`: powers of 1000. */
export const gb = (nbytes: number): string => scaled(nbytes, 1000, DECIMAL);
/** `24.45 GiB`: powers of 1024. */
export const gib = (nbytes: number): string => scaled(nbytes, 1024, BINARY);
/** `26,250,000,000 bytes`. */
export const bytes = (nbytes: number): string => `${integer(nbytes)} ${nbytes === 1 ? 'byte' : 'bytes'}`;
/** Exact while that is short, else in GB and its kin. */
export const size = (nbytes: number): string => (nbytes < 100_000 ? bytes(nbytes) : gb(nbytes));

/** Four significant digits, without trailing zeros. */
export const digits = (value: number): string =>
  value.toLocaleString('en-US', { maximumSignificantDigits: 4, useGrouping: false });

/** At most six decimals, but never fewer than four significant digits: 1,342.382, 0.0000004. */
export function exact(value: number): string {
  const maximumFractionDigits =
    0 < Math.abs(value) && Math.abs(value) < 1e-3 ? 3 - Math.floor(Math.log10(Math.abs(value))) : 6;
  return value.toLocaleString('en-US', { maximumFractionDigits });
}

export const percent = (fraction: number): string => `${(100 * fraction).toFixed(1)} %`;

/** `7 B`, `1.34 B`, `260`: a number of parameters. */
export function count(value: number): string {
  for (const [letter, power] of [
    ['T', 12],
    ['B', 9],
    ['M', 6],
    ['k', 3],
  ] as const)
    if (value >= 10 ** power) return `${digits(value / 10 ** power)} ${letter}`;
  return integer(value);
}

/** Reads `7e9`, `6,738,415,616`, `7B`, `1.34 b`; NaN for anything else. */
export function parseCount(text: string): number {
  const match = /^\s*([0-9][0-9,_]*(?:\.[0-9]+)?)(?:(e[0-9]{1,2})|\s*([kmbgt]))?\s*$/i.exec(text);
  if (!match) return Number.NaN;
  const power = match[2] ?? `e${{ k: 3, m: 6, b: 9, g: 9, t: 12 }[match[3]?.toLowerCase() ?? ''] ?? 0}`;
  const value = Number(match[1].replace(/[,_]/g, '') + power);
  return Number.isInteger(value) && value > 0 ? value : Number.NaN;
}

/** As the document has it, which writes every number with the digits that are it. */
export const float = (value: number | string | null | undefined): string =>
  String(value ?? '–')
    .replace('-', '−')
    .replace('e-', 'e−');

/** At most `most` significant digits, for a crowded table; the exact value belongs into a title. */
export function short(value: number | null | undefined, most = 4): string {
  if (value === null || value === undefined) return '–';
  if (value === 0 || !Number.isFinite(value)) return float(value);
  const text = Math.abs(value) < 1e-4 ? value.toExponential(most - 1) : String(Number(value.toPrecision(most)));
  return text.replace(/\.?0+e/, 'e').replaceAll('-', '−');
}

/** The numbers of one table with as many decimals as give its largest three digits; the exact value goes into a title. */
export function aligned(values: readonly number[]): (value: number) => string {
  const most = Math.max(...values.map(Math.abs).filter(Number.isFinite), 0);
  if (most === 0) return float;
  if (most < 1e-4) return (value) => (value === 0 ? '0' : float(value.toExponential(2)));
  const decimals = Math.max(2 - Math.floor(Math.log10(most)), 0);
  return (value) => (Number.isFinite(value) ? float(value.toFixed(decimals)) : float(value));
}

export const plural = (amount: number, noun: string): string => `${integer(amount)} ${noun}${amount === 1 ? '' : 's'}`;

/** `3.21 ms`: seconds, in the unit that suits them. */
export function seconds(value: number): string {
  if (value === 0) return '0';
  for (const [unit, scale] of [
    ['s', 1],
    ['ms', 1e-3],
    ['µs', 1e-6],
  ] as const)
    if (Math.abs(value) >= scale) return `${digits(value / scale)} ${unit}`;
  return `${digits(value / 1e-9)} ns`;
}
