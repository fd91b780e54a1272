import { readFileSync } from 'node:fs';
import { expect, test } from 'vitest';
import { curve, valueAt, warp } from '../src/lib/curve';
import type { Page } from '../src/lib/data';
import { beatsOf, merged } from '../src/lib/play';

const page: Page = JSON.parse(
  readFileSync(new URL('../../src/zeroshard/explain/walkthroughs.json', import.meta.url), 'utf8'),
);
const data = page.walkthroughs?.transformer as NonNullable<Page['walkthroughs']>['transformer'];
const lists = data.stages.map(({ recording }) => beatsOf(recording, data.layout, true));
const order = merged(lists);

test.each([0, 1])('rank %d: every curve goes to the right, and its highest point is the recorded peak', (rank) => {
  data.stages.forEach(({ recording }, stage) => {
    const points = curve(recording, lists[stage], order, rank);
    expect(points.every(([x], index) => index === 0 || x >= points[index - 1][0])).toBe(true);
    const { peak } = recording.ranks[rank];
    expect(Math.max(...points.map(([, nbytes]) => nbytes))).toBe(peak.total);
    expect(valueAt(points, warp(lists[stage], order, rank)(peak.at))).toBe(peak.total);
  });
});

test('a beat is at its place on the axis, whatever the stage', () => {
  data.stages.forEach((_, stage) => {
    const place = warp(lists[stage], order, 0);
    const alone = lists[stage].filter(({ at }, index) => lists[stage][index + 1]?.at[0] !== at[0]);
    for (const { key, at } of alone) expect(place(at[0])).toBe(order.indexOf(key));
  });
});

test('in backward stage 2 peaks above stage 1, by what is under way', () => {
  const [one, two] = [1, 2].map(
    (stage) => data.stages[stage].moments.find(({ key }) => key === 'backward')?.ranks[0].peak,
  );
  expect([one?.total, two?.total]).toEqual([1820, 2080]);
  const under = (peak: typeof one) => (peak?.held.reduce ?? 0) - (peak?.held.gradients ?? 0);
  expect(under(two)).toBeGreaterThan(under(one));
});
