import { integer } from './format';

/** What a field shows, the number that is (the fallback where it is none), and in words what is wrong with it. */
export interface Field {
  text: string;
  value: number;
  wrong: string;
  low: number;
  high: number;
  whole: boolean;
}

/** A number from `low` to `high`, whole unless told. `of`: what is counted. Nothing is rounded, and nothing moved. */
export function field(
  text: string | undefined,
  fallback: number,
  [low, high]: readonly [number, number],
  of: string,
  whole = true,
): Field {
  const shown = text ?? String(fallback);
  const value = /^[0-9]+(\.[0-9]+)?(e[0-9]+)?$/i.test(shown.trim()) ? Number(shown) : Number.NaN;
  const right = value >= low && value <= high && (!whole || Number.isInteger(value));
  const expected = `a ${whole ? 'whole number' : 'number'} of ${of} from ${bound(low)} to ${bound(high)}`;
  const wrong = right ? '' : shown.trim() ? `“${shown.trim()}” is not ${expected}.` : `Write ${expected}.`;
  return { text: shown, value: right ? value : fallback, wrong, low, high, whole };
}

const bound = (value: number) => (Number.isInteger(value) ? integer(value) : String(value));
