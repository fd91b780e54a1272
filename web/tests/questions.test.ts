import { readFileSync } from 'node:fs';
import { expect, test } from 'vitest';
import type { Page, Walkthroughs } from '../src/lib/data';
import { questions } from '../src/lib/questions';

const page: Page = JSON.parse(
  readFileSync(new URL('../../src/zeroshard/explain/walkthroughs.json', import.meta.url), 'utf8'),
);

test('every question has its answer among different options', () => {
  const asked = questions(page.walkthroughs as Walkthroughs);
  expect(Object.entries(asked).map(([view, { answer }]) => [view, answer])).toEqual([
    ['overview', 'parameters'],
    ['transformer', '2,080'],
    ['weights', '2 times'],
    ['layers', '4,252'],
  ]);
  for (const { options, answer } of Object.values(asked)) {
    expect(new Set(options).size).toBe(options.length);
    expect(options).toContain(answer);
  }
});
