import { expect, test } from 'vitest';
import { LARGE, large } from '../src/lib/large';
import { OURS, PAPER, RECIPES } from '../src/lib/recipes';

test('7 B parameters on 8 GPUs hold at rest what README.md says, here and in the paper', () => {
  expect([LARGE.parameters, LARGE.ranks]).toEqual([7e9, 8]);
  expect([OURS.total, PAPER.total, RECIPES[0]]).toEqual([18, 16, OURS]);
  expect(large(OURS).map(({ total }) => total / 1e9)).toEqual([126, 52.5, 28, 14]);
  expect(large(PAPER).map(({ total }) => total / 1e9)).toEqual([112, 38.5, 26.25, 14]);
});

test('each stage peaks above what rests, and below the stage before', () => {
  for (const recipe of [OURS, PAPER]) {
    const found = large(recipe).map(({ device, peak }) => [device, peak ?? 0]);
    for (const [rest, peak] of found) expect(peak).toBeGreaterThan(rest);
    expect(found.map(([, peak]) => peak)).toEqual(found.map(([, peak]) => peak).sort((one, other) => other - one));
  }
});

test('stage 0 sends as many bytes as stage 3 where sums are fp32, and two thirds in the paper', () => {
  const sent = [OURS, PAPER].map((recipe) => large(recipe).map(({ traffic }) => traffic.total.sent / 1e9));
  expect(sent).toEqual([
    [36.75, 24.5, 24.5, 36.75],
    [24.5, 24.5, 24.5, 36.75],
  ]);
});
