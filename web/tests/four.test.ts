import { readFileSync } from 'node:fs';
import { expect, test } from 'vitest';
import type { Page } from '../src/lib/data';
import { chaptersOf, flightsAt, networkAt } from '../src/lib/four';

const page: Page = JSON.parse(
  readFileSync(new URL('../../src/zeroshard/explain/walkthroughs.json', import.meta.url), 'utf8'),
);
const four = page.walkthroughs?.four as NonNullable<Page['walkthroughs']>['four'];
const { values } = four;
const last = (stage: number) => Math.min(...four.stages[stage].story.map(({ length }) => length)) - 1;
const [OLD, NEW] = [values.parameters, values.parameters_after];

test.each([1, 2])('stage %d: after Adam the model is half new on each rank, then whole on both', (stage) => {
  const stepped = four.stages[stage].story[0].findLastIndex(({ verb }) => verb === 'step');
  const at = (rank: number, line: number) => networkAt(four, stage, rank, line).weights;
  expect(at(0, stepped)).toEqual([NEW[0], NEW[1], OLD[2], OLD[3]]);
  expect(at(1, stepped)).toEqual([OLD[0], OLD[1], NEW[2], NEW[3]]);
  for (const rank of [0, 1]) expect(at(rank, last(stage))).toEqual(NEW);
});

test('stage 3: a rank has what it owns, and for a moment what it needs', () => {
  const { story } = four.stages[3];
  const gather = story[1].findIndex(({ verb, unit }) => verb === 'gather' && unit === 'layer1');
  const has = [gather - 1, gather, gather + 1, gather + 2].map((line) => networkAt(four, 3, 1, line).weights);
  const [without, full] = [[null, null, OLD[2], OLD[3]], OLD];
  expect(story[1].slice(gather, gather + 3).map(({ verb }) => verb)).toEqual(['gather', 'forward', 'release']);
  expect(has).toEqual([without, full, full, without]);
  expect(networkAt(four, 3, 0, last(3)).weights).toEqual([NEW[0], NEW[1], null, null]);
});

test.each([0, 1, 2, 3])('stage %d: values and gradients come when they are computed', (stage) => {
  four.stages[stage].story.forEach((story, rank) => {
    const done = story.findLastIndex(({ verb }) => verb === 'forward');
    expect(networkAt(four, stage, rank, done).values).toEqual({
      ...Object.fromEntries(values.forward[rank]),
      loss: values.loss[rank],
    });
    const reduced = networkAt(
      four,
      stage,
      rank,
      story.findLastIndex(({ verb }) => verb === 'reduce'),
    );
    const own = (index: number) => index < 2 === (rank === 0);
    expect(reduced.gradients).toEqual(
      values.average.map((average, index) => (own(index) ? average : stage < 2 ? values.gradients[rank][index] : null)),
    );
  });
});

test.each(four.stages)('stage $stage: whatever is sent flies', ({ story }) => {
  for (let at = 0; at < Math.min(...story.map(({ length }) => length)); at += 1) {
    const lines = story.map((each) => each[at]);
    const sending = lines.flatMap(({ sent, verb }, rank) => (sent && verb !== 'step' ? [rank] : []));
    expect(flightsAt(four, lines).map(({ from }) => from)).toEqual(sending);
  }
});

test('a story has the chapters of its stage, without a gap', () => {
  const told = [0, 1, 2, 3].map((stage) => chaptersOf(four, stage, last(stage)));
  expect(told.map((each) => each.map(({ chapter }) => chapter).slice(2))).toEqual([
    ['gathered gradients', 'stepped'],
    ['stepped', 'gathered parameters'],
    ['stepped', 'gathered parameters'],
    ['stepped'],
  ]);
  told.forEach((each, stage) => {
    expect([each[0].first, each.at(-1)?.last]).toEqual([0, last(stage)]);
    expect(each.slice(1).every(({ first }, index) => first === each[index].last + 1)).toBe(true);
  });
});
