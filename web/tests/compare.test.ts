import { readFileSync } from 'node:fs';
import { expect, test } from 'vitest';
import { losses, memories, verdict } from '../src/lib/compare';
import type { Compared, Page, Run } from '../src/lib/data';

const page = JSON.parse(readFileSync(new URL('../fixtures/run.json', import.meta.url), 'utf8')) as Page;
const run = page.run as Run;
const compared: Compared = {
  names: ['a', 'b'],
  steps: [12, 12],
  compared: 12,
  differs: null,
  weights: ['0a', '0a'],
  equal: true,
};

test('one sentence says whether bits are equal, and where not', () => {
  expect(verdict(compared)).toEqual({
    title: 'The bits are equal',
    says: '12 losses and gradient norms, and all weights.',
  });
  const differs = { step: 4, losses: [1.5, 1.25] as [number, number] };
  expect(verdict({ ...compared, equal: false, differs })).toEqual({
    title: 'The bits differ',
    says: 'From step 4 on: the losses there are 1.5 and 1.25.',
  });
  expect(verdict({ ...compared, equal: false, weights: ['0a', '0b'] }).title).toBe('The weights differ');
  expect(verdict({ ...compared, equal: false, weights: ['0a', null] }).title).toBe('The same so far');
});

test('steps of two runs share one axis, and keep their peaks', () => {
  const lines = memories([run, { ...run, recording: null }], ['a', 'b']);
  expect(lines.map(({ name }) => name)).toEqual(['a']);
  const [{ points }] = lines;
  expect(points.every(([at]) => at >= 0 && at <= 1)).toBe(true);
  expect(points[points.length - 1][0]).toBe(1);
  expect(Math.max(...points.map(([, nbytes]) => nbytes))).toBe(run.recording?.ranks[0].peak.total);
});

test('losses are drawn where there are some', () => {
  const curves = {
    columns: ['step', 'loss'],
    rows: [
      [1, 5.5],
      [2, 'nan'],
      [3, 4.5],
    ],
    note: null,
  } as Run['curves'];
  expect(
    losses(
      [
        { ...run, curves },
        { ...run, curves: null },
      ],
      ['a', 'b'],
    ),
  ).toEqual([
    {
      name: 'a',
      points: [
        [1, 5.5],
        [3, 4.5],
      ],
    },
  ]);
});
