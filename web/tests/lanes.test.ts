import { expect, test } from 'vitest';
import { rows } from '../src/lib/lanes';

test('what is under way at once has rows of its own', () => {
  expect(rows([])).toEqual([]);
  expect(
    rows([
      [0, 5],
      [5, 9],
      [4, 8],
      [8, 9],
      [1, 3],
    ]),
  ).toEqual([0, 0, 1, 1, 1]);
});
