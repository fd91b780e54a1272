import { expect, test } from 'vitest';
import { BYTES, TIME, ticks } from '../src/lib/axis';

const texts = (...of: Parameters<typeof ticks>) => ticks(...of).map(({ text }) => text);

test('round values in the unit of the larger end', () => {
  expect(texts(0, 250e6, 3, TIME)).toEqual(['0', '100 ms', '200 ms']);
  expect(texts(0, 1040, 3, BYTES)).toEqual(['0', '0.5 kB', '1.0 kB']);
  expect(ticks(0, 1040, 3, BYTES).map(({ value }) => value)).toEqual([0, 500, 1000]);
});

test('as many digits as tell neighbours apart, however deep the zoom', () => {
  const found = texts(1_234_567_000, 1_234_568_000, 5, TIME);
  expect(found.length).toBeGreaterThan(2);
  expect(new Set(found).size).toBe(found.length);
});

test('an empty range has one value or none', () => {
  expect(texts(0, 0, 3, BYTES)).toEqual(['0']);
});
