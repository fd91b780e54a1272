import { expect, test } from 'vitest';
import { LARGE, large } from '../src/lib/large';

test('7 B parameters on 8 GPUs hold at rest what the papers say, and more at the peak of a step', () => {
  expect([LARGE.parameters, LARGE.ranks]).toEqual([7e9, 8]);
  const found = large();
  expect(found.map(({ stage, rest }) => [stage, rest / 1e9])).toEqual([
    [0, 112],
    [1, 38.5],
    [2, 26.25],
    [3, 14],
  ]);
  for (const { rest, peak } of found) {
    expect(peak).toBeGreaterThan(rest);
    expect(peak).toBeLessThan(1.2 * 112e9);
  }
});
